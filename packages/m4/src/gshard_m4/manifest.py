"""Manifest: size and SHA-256 of every file of a folder, written last and read first.

What writes arrays notices a missing file, sometimes a short one, and almost never a flipped bit. So every file is read
against the manifest before anything in it is believed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gshard_m4.errors import CheckpointError, DamagedError

FORMAT = 1
MANIFEST = "MANIFEST.json"
_LARGEST = 64 * 2**20  # bytes; more than a million files


def write(folder: Path) -> None:
    """Hashes every file below `folder`, writes the manifest, and flushes all of it to the disk."""
    write_json(folder / MANIFEST, {"format": FORMAT, "files": _digests(folder)})
    for path in (*_files(folder), *(p for p in folder.rglob("*") if p.is_dir()), folder):
        flush(path)


def verify(folder: Path) -> None:
    """Reads every file of a folder against its manifest.

    Raises:
        DamagedError: the first thing that is wrong, by name.
    """
    manifest = _read(folder)
    present = {p.relative_to(folder).as_posix(): p for p in _files(folder)}
    present.pop(MANIFEST, None)
    for name in sorted(manifest.keys() - present.keys()):
        raise damaged(folder, f"the file {name!r} is missing")
    for name in sorted(present.keys() - manifest.keys()):
        raise damaged(folder, f"the file {name!r} does not belong to it")
    for name, path in sorted(present.items()):
        entry = manifest[name]
        size = path.stat().st_size
        if size != entry["bytes"]:
            raise damaged(folder, f"the file {name!r} has {size} bytes instead of {entry['bytes']}")
        if _digest(path) != entry["sha256"]:
            raise damaged(folder, f"the contents of {name!r} have changed")


def is_sound(folder: Path) -> bool:
    """Whether `verify` has nothing to say."""
    try:
        verify(folder)
    except CheckpointError:
        return False
    return True


def damaged(folder: Path, what: str) -> DamagedError:
    """The error for a folder that is not as it was written."""
    return DamagedError(
        f"the checkpoint is damaged: {what}.",
        where=str(folder),
        hint="Remove that folder to go on from an earlier step, or train again.",
    )


def write_json(path: Path, value: Any) -> None:
    """Writes JSON that is the same for the same value; refuses what JSON cannot say."""
    path.write_text(json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False), "utf-8")


def flush(path: Path) -> None:
    """Waits until a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _files(folder: Path) -> Iterator[Path]:
    """Every file below `folder`; links are not followed but listed, so that they do not verify."""
    return (p for p in folder.rglob("*") if p.is_symlink() or not p.is_dir())


def _digests(folder: Path) -> dict[str, dict[str, Any]]:
    return {
        p.relative_to(folder).as_posix(): {"bytes": p.stat().st_size, "sha256": _digest(p)}
        for p in sorted(_files(folder))
    }


def _digest(path: Path) -> str:
    if path.is_symlink():
        return "a link"
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read(folder: Path) -> dict[str, dict[str, Any]]:
    path = folder / MANIFEST
    try:
        if path.stat().st_size > _LARGEST:
            raise ValueError("too large")
        manifest = json.loads(path.read_text("utf-8"))
        if manifest["format"] != FORMAT:
            raise ValueError(f"format {manifest['format']!r}")
        files = manifest["files"]
        for entry in files.values():
            if not isinstance(entry["bytes"], int) or not isinstance(entry["sha256"], str):
                raise TypeError("no size or no hash")
    except FileNotFoundError as error:
        raise damaged(folder, f"the file {MANIFEST!r} is missing") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(folder, f"{MANIFEST!r} cannot be read ({error})") from error
    return dict(files)
