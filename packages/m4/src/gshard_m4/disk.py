"""Room on the disk: asked before writing, recognised when it runs out, told in the user's terms."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Sequence
from pathlib import Path

from gshard_m4.errors import CheckpointError

_SPARE = 2**20  # bytes that must stay free beside the arrays: names, manifests, the file system's own
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FULL_TEXTS = ("no space left", "disk quota exceeded", "file too large", "resource_exhausted")


def check_room(directory: Path, step: int, bytes_needed: int, kept: Sequence[int]) -> None:
    """Refuses to begin what cannot end.

    Args:
        directory: where will be written.
        step: what.
        bytes_needed: how much.
        kept: earlier steps, for the message.

    Raises:
        CheckpointError: less is free than needed.
    """
    free = shutil.disk_usage(directory).free
    if bytes_needed + _SPARE > free:
        raise _full(directory, step, bytes_needed, free, kept)


def says_full(error: BaseException | None) -> bool:
    """Whether the disk is the cause; the array writer reports it as text and not as an `OSError`."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        if any(text in str(error).lower() for text in _FULL_TEXTS):
            return True
        error = error.__cause__ or error.__context__
    return False


def cannot_write(
    error: BaseException, directory: Path, step: int, bytes_needed: int, kept: Sequence[int]
) -> CheckpointError:
    """What to tell the user of an error while writing."""
    if says_full(error):
        return _full(directory, step, bytes_needed, shutil.disk_usage(directory).free, kept)
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return CheckpointError(
        f"step {step} could not be saved: {reason}.",
        where=str(directory),
        hint="Name a directory that can be written to.",
    )


def _full(directory: Path, step: int, bytes_needed: int, free: int, kept: Sequence[int]) -> CheckpointError:
    intact = f"step {kept[-1]} is intact" if kept else "there was no earlier step"
    return CheckpointError(
        f"step {step} could not be saved: no space left to write it (disk full, or a limit on file sizes).",
        where=str(directory),
        got=f"needed: about {mib(bytes_needed + _SPARE)}; free: {mib(free)}; {intact}, nothing half-written is left",
        hint="Free some space or name another directory, then resume.",
    )


def mib(count: int) -> str:
    """A number of bytes in words."""
    return f"{count / 2**20:,.1f} MiB"
