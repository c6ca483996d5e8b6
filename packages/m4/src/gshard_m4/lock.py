"""Lock: one process trains in a folder at a time."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gshard_m4.errors import TrainError


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds a lock file; the system lets go of it when the process ends, however it ends.

    Raises:
        TrainError: another process holds it, or the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+", encoding="utf-8")
    except OSError as error:
        raise TrainError(
            f"the folder of the run cannot be written: {error.strerror}.",
            where=str(path.parent),
            hint="Name a folder that can be written to.",
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            raise TrainError(
                "another process trains in this folder.",
                where=str(path.parent),
                got=file.read().strip() or None,
                hint="Wait for it, stop it, or name another folder.",
            ) from error
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def alive(pid: int) -> bool:
    """Whether there is a process of this number on this machine."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
