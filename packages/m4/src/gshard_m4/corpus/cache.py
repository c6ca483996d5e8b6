"""Cache: work that is done once, so that what is stopped goes on where it was.

What a killed process left is swept away by the next one; several may share the cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gshard_m4.lock import alive

_PREFIX = "unfinished"
_NAME = re.compile(rf"{_PREFIX}-(\d+)-")


@contextmanager
def work_folder(parent: Path) -> Iterator[Path]:
    """An empty folder inside another, gone when it is left: files move out of it when they are finished."""
    parent.mkdir(parents=True, exist_ok=True)
    for path in parent.glob(f"{_PREFIX}-*"):
        found = _NAME.match(path.name)
        if found and not alive(int(found.group(1))):
            shutil.rmtree(path, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=parent, prefix=f"{_PREFIX}-{os.getpid()}-") as name:
        yield Path(name)


def recall(path: Path, made_from: Any, files: Sequence[Path] = ()) -> dict[str, Any] | None:
    """What `once` wrote, if it was made from the same and the files that were written with it are there."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    same = found.pop("made_from", None) == _digest(made_from)
    return found if same and all(file.exists() for file in files) else None


def once(path: Path, made_from: Any, make: Callable[[], dict[str, Any]], files: Sequence[Path] = ()) -> dict[str, Any]:
    """What a function gave; it is not called if it was before.

    Args:
        path: file to keep it in; written last, so that what the function writes is complete if this is there.
        made_from: what it depends on, as JSON can write it.
        make: the function.
        files: what it writes.
    """
    found = recall(path, made_from, files)
    if found is None:
        path.unlink(missing_ok=True)
        found = make()
        with work_folder(path.parent) as work:
            (work / path.name).write_text(
                json.dumps({**found, "made_from": _digest(made_from)}, ensure_ascii=False), encoding="utf-8"
            )
            (work / path.name).replace(path)
    return found


def _digest(made_from: Any) -> str:
    return hashlib.sha256(json.dumps(made_from).encode()).hexdigest()
