"""Checkpoints: a step is either absent, or complete and verified.

A checkpoint directory holds one folder per saved step:

    run/checkpoints/00000300/
      state/           the arrays, one folder each, written by Orbax
      meta.json        step, configuration, and the shape and dtype of every array
      MANIFEST.json    size and SHA-256 of every other file

A step is written under a hidden name, hashed, flushed to the disk, and renamed last, so a crash or a full
disk leaves the earlier steps as they were and nothing that looks like a step. `restore` reads every file
against the manifest before it believes a byte of it: a flipped bit or a missing end is an error that names
the file, and arrays are one folder each, so the name says which array it is. Nothing is pickled.

Shardings are not saved: a state that eight devices wrote is read by one, or by four, as the caller asks.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from gshard import GShardError

FORMAT = 1
MANIFEST = "MANIFEST.json"
META = "meta.json"
STATE = "state"
_HIDDEN = ".saving-"
_LARGEST_MANIFEST = 64 * 2**20  # bytes; more than a million files
_SPARE = 2**20  # bytes that must stay free beside the arrays: names, manifests, the file system's own
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FULL_TEXTS = ("no space left", "disk quota exceeded", "file too large", "resource_exhausted")


class CheckpointError(GShardError):
    """A checkpoint cannot be written, is not there, is damaged, or belongs to another model."""


def save(directory: str | Path, step: int, state: Any, meta: Mapping[str, Any]) -> Path:
    """Writes `state` as step `step` of `directory`, all of it or nothing.

    Args:
        directory: where the steps lie; created if missing.
        step: the number of the step; one that is there already is not overwritten, unless it is damaged.
        state: a tree of arrays of at least one element; arrays spread over devices are written from there.
        meta: what `restore` gives back beside the arrays; anything JSON can say.

    Returns:
        The folder of the step.

    Raises:
        CheckpointError: the step exists, the directory cannot be written, or the disk is full. The earlier
            steps are intact and no part of this one is left.
    """
    directory = Path(directory)
    target = directory / f"{step:08d}"
    bytes_needed = sum(_bytes(leaf) for leaf in jax.tree.leaves(state))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(directory)
    except OSError as error:
        raise _cannot_write(error, directory, step, bytes_needed) from error
    if target.exists() and _is_sound(target):
        raise CheckpointError(
            f"step {step} is saved already.",
            where=str(target),
            way_out="Save under another step, or remove that folder first.",
        )
    free = shutil.disk_usage(directory).free
    if bytes_needed + _SPARE > free:
        raise _full(directory, step, bytes_needed, free)

    hidden = directory / f"{_HIDDEN}{step:08d}-{os.getpid()}"
    try:
        with ocp.Checkpointer(_handler()) as orbax:
            orbax.save(hidden.absolute() / STATE, state)
        described = {"step": step, "meta": dict(meta), "arrays": _describe(state)}
        _write_json(hidden / META, described)
        _write_json(hidden / MANIFEST, {"format": FORMAT, "files": _digests(hidden)})
        for path in (*_files(hidden), *(p for p in hidden.rglob("*") if p.is_dir()), hidden):
            _flush(path)
        if target.exists():
            shutil.rmtree(target)
        os.rename(hidden, target)
        _flush(directory)
    except Exception as error:
        shutil.rmtree(hidden, ignore_errors=True)
        if isinstance(error, OSError) or _says_full(error):
            raise _cannot_write(error, directory, step, bytes_needed) from error
        raise
    return target


def restore(
    directory: str | Path,
    step: int | None = None,
    like: Any = None,
    check: Callable[[Mapping[str, Any]], None] = lambda meta: None,
) -> tuple[int, Any, dict[str, Any]]:
    """Reads a step back after verifying every file of it.

    Args:
        directory: what `save` was given.
        step: which step; the newest if None.
        like: a tree of arrays or `jax.ShapeDtypeStruct`, of the structure, shapes and dtypes that are expected. Where
            a leaf has a `sharding`, the array comes back with it, and each device reads its own part only. Without
            one, and without `like`, arrays come back as numpy arrays.
        check: is given what was saved as `meta`, before anything is compared with `like`; may raise.

    Returns:
        The step, the state, and what was given as `meta`.

    Raises:
        CheckpointError: there is no such step; a file is missing, truncated, changed or not of the checkpoint; or the
            state differs from `like`, in which case the message names the array and both values.
    """
    directory = Path(directory)
    found = steps(directory)
    if step is None and not found:
        raise CheckpointError(
            "there is no checkpoint.", where=str(directory), way_out="Train first, or name another directory."
        )
    step = found[-1] if step is None else step
    if step not in found:
        raise CheckpointError(
            f"there is no step {step}.",
            where=str(directory),
            got=f"steps: {', '.join(map(str, found)) or 'none'}",
            way_out="Name one of these.",
        )
    folder = directory / f"{step:08d}"
    verify(folder)

    described = json.loads((folder / META).read_text("utf-8"))
    check(described["meta"])
    if like is not None:
        _check_like(folder, described["arrays"], _describe(like))
    with ocp.Checkpointer(_handler()) as orbax:
        path = folder.absolute() / STATE
        template = like if like is not None else orbax.metadata(path).item_metadata
        args = jax.tree.map(_restore_args if like is not None else (lambda _: _as_numpy()), template)
        if like is None:
            state = orbax.restore(path, args=ocp.args.PyTreeRestore(restore_args=args))
        else:
            state = orbax.restore(path, args=ocp.args.PyTreeRestore(item=like, restore_args=args))
    return step, state, described["meta"]


def restore_newest_sound(
    directory: str | Path, like: Any = None, check: Callable[[Mapping[str, Any]], None] = lambda meta: None
) -> tuple[int, Any, dict[str, Any], list[CheckpointError]]:
    """Reads the newest step that verifies, passing over damaged ones.

    Args:
        directory: see `restore`.
        like: see `restore`.
        check: see `restore`.

    Returns:
        As `restore`, and the errors of the newer steps that were passed over.

    Raises:
        CheckpointError: no step is sound; the error is that of the newest.
    """
    damaged: list[CheckpointError] = []
    for step in reversed(steps(directory)):
        try:
            verify(Path(directory) / f"{step:08d}")
        except CheckpointError as error:
            damaged.append(error)
            continue
        return (*restore(directory, step, like, check), damaged)
    if damaged:
        raise damaged[0]
    return (*restore(directory, None, like, check), damaged)


def steps(directory: str | Path) -> list[int]:
    """The saved steps, oldest first. Nothing is verified."""
    folder = Path(directory)
    if not folder.is_dir():
        return []
    return sorted(int(p.name) for p in folder.iterdir() if p.name.isdecimal() and p.is_dir())


def prune(directory: str | Path, keep: int) -> None:
    """Removes all but the newest `keep` steps."""
    for step in steps(directory)[: -max(keep, 1)]:
        shutil.rmtree(Path(directory) / f"{step:08d}")


def verify(folder: str | Path) -> None:
    """Reads every file of one step against its manifest.

    Raises:
        CheckpointError: the first thing that is wrong, by name.
    """
    folder = Path(folder)
    manifest = _read_manifest(folder)
    present = {p.relative_to(folder).as_posix(): p for p in _files(folder)}
    present.pop(MANIFEST, None)
    for name in sorted(manifest.keys() - present.keys()):
        raise _damaged(folder, f"the file {name!r} is missing")
    for name in sorted(present.keys() - manifest.keys()):
        raise _damaged(folder, f"the file {name!r} does not belong to it")
    for name, path in sorted(present.items()):
        entry = manifest[name]
        size = path.stat().st_size
        if size != entry["bytes"]:
            raise _damaged(folder, f"the file {name!r} has {size} bytes instead of {entry['bytes']}")
        if _digest(path) != entry["sha256"]:
            raise _damaged(folder, f"the contents of {name!r} have changed")


def _is_sound(folder: Path) -> bool:
    try:
        verify(folder)
    except CheckpointError:
        return False
    return True


def _handler() -> Any:
    """Orbax, writing a folder of plain chunk files for each array."""
    return ocp.PyTreeCheckpointHandler(use_ocdbt=False)


def _as_numpy() -> Any:
    return ocp.RestoreArgs(restore_type=np.ndarray)


def _restore_args(leaf: Any) -> Any:
    sharding = getattr(leaf, "sharding", None)
    return _as_numpy() if sharding is None else ocp.ArrayRestoreArgs(sharding=sharding, dtype=leaf.dtype)


def _describe(tree: Any) -> dict[str, list[Any]]:
    """Path of every array -> [dtype, dimensions...]."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): [str(np.dtype(leaf.dtype)), *np.shape(leaf)]
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _check_like(folder: Path, saved: dict[str, list[Any]], wanted: dict[str, list[Any]]) -> None:
    for name in sorted(saved.keys() | wanted.keys()):
        was, want = _text(saved.get(name)), _text(wanted.get(name))
        if was != want:
            raise CheckpointError(
                f"the checkpoint does not fit this model: {name!r} is {was} in the checkpoint and {want} in the model.",
                where=str(folder),
                way_out="Use the configuration the checkpoint was trained with.",
            )


def _text(described: list[Any] | None) -> str:
    return "absent" if described is None else f"{described[0]}[{','.join(map(str, described[1:]))}]"


def _bytes(leaf: Any) -> int:
    return int(np.prod(np.shape(leaf), dtype=np.int64)) * np.dtype(leaf.dtype).itemsize


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


def _read_manifest(folder: Path) -> dict[str, dict[str, Any]]:
    path = folder / MANIFEST
    try:
        if path.stat().st_size > _LARGEST_MANIFEST:
            raise ValueError("too large")
        manifest = json.loads(path.read_text("utf-8"))
        if manifest["format"] != FORMAT:
            raise ValueError(f"format {manifest['format']!r}")
        files = manifest["files"]
        for entry in files.values():
            if not isinstance(entry["bytes"], int) or not isinstance(entry["sha256"], str):
                raise TypeError("no size or no hash")
    except FileNotFoundError as error:
        raise _damaged(folder, f"the file {MANIFEST!r} is missing") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(folder, f"{MANIFEST!r} cannot be read ({error})") from error
    return dict(files)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False), "utf-8")


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove_leftovers(directory: Path) -> None:
    """Removes what a process that has died was writing."""
    for path in directory.glob(f"{_HIDDEN}*"):
        owner = path.name.rpartition("-")[2]
        if not (owner.isdecimal() and int(owner) != os.getpid() and _alive(int(owner))):
            shutil.rmtree(path, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _says_full(error: BaseException | None) -> bool:
    """Whether the disk is the cause; the array writer reports it as text and not as an `OSError`."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        if any(text in str(error).lower() for text in _FULL_TEXTS):
            return True
        error = error.__cause__ or error.__context__
    return False


def _cannot_write(error: BaseException, directory: Path, step: int, bytes_needed: int) -> CheckpointError:
    if _says_full(error):
        return _full(directory, step, bytes_needed, shutil.disk_usage(directory).free)
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return CheckpointError(
        f"step {step} could not be saved: {reason}.",
        where=str(directory),
        way_out="Name a directory that can be written to.",
    )


def _full(directory: Path, step: int, bytes_needed: int, free: int) -> CheckpointError:
    found = steps(directory)
    kept = f"step {found[-1]} is intact" if found else "there was no earlier step"
    return CheckpointError(
        f"step {step} could not be saved: no space left to write it (disk full, or a limit on file sizes).",
        where=str(directory),
        got=f"needed: about {_mib(bytes_needed + _SPARE)}; free: {_mib(free)}; {kept}, nothing half-written is left",
        way_out="Free some space or name another directory, then resume.",
    )


def _damaged(folder: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint is damaged: {what}.",
        where=str(folder),
        way_out="Remove that folder to go on from an earlier step, or train again.",
    )


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"
