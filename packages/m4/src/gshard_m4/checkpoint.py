"""Checkpoints: a step is either absent, or complete and verified.

A checkpoint directory holds one folder per saved step:

    run/checkpoints/00000300/
      state/           the arrays, one folder each, written by Orbax
      meta.json        step, configuration, score, and the shape and dtype of every array
      MANIFEST.json    size and SHA-256 of every other file

A step is written under a hidden name, hashed, flushed to the disk, and renamed last, so a crash or a full
disk leaves the earlier steps as they were and nothing that looks like a step. A step is removed by renaming it
first, so no half of one is ever listed. `restore` reads every file against the manifest before it believes a byte of
it: a flipped bit or a missing end is an error that names the file, and arrays are one folder each, so the name says
which array it is. Nothing is pickled.

Shardings are not saved: a state that eight devices wrote is read by one, or by four, as the caller asks. Where several
processes train together, all of them call `begin`, what it returns, and `restore`, on one shared directory: each
writes and reads its own parts, and the first one hashes, renames and verifies.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from gshard_m4 import manifest
from gshard_m4.disk import cannot_write, check_room, says_full
from gshard_m4.errors import CheckpointError as CheckpointError
from gshard_m4.lock import alive
from gshard_m4.manifest import MANIFEST as MANIFEST

META = "meta.json"
STATE = "state"
_SAVING, _REMOVING = ".saving-", ".removing-"
_WAIT = 1200  # seconds that processes wait for each other's parts
_SMALL = 2**20  # bytes of an array that is not worth a file for each device


def save(directory: str | Path, step: int, state: Any, meta: Mapping[str, Any], *, score: float | None = None) -> Path:
    """Writes `state` as step `step` of `directory`, all of it or nothing; see `begin`.

    Returns:
        The folder of the step.
    """
    return begin(directory, step, state, meta, score=score)()


def begin(
    directory: str | Path, step: int, state: Any, meta: Mapping[str, Any], *, score: float | None = None
) -> Callable[[], Path]:
    """Starts to write `state` as step `step`. Once it returns, the memory of `state` may be used for other things.

    Args:
        directory: where the steps lie; created if missing.
        step: the number of the step; one that is there already is not overwritten, unless it is damaged.
        state: a tree of arrays of at least one element; arrays spread over devices are written from there.
        meta: what `restore` gives back beside the arrays; anything JSON can say.
        score: how good it is, such as a held-out loss; lower is better. The best step is kept; see `prune`.

    Returns:
        A function that waits until all arrays are written, then hashes and renames, and returns the folder of the step.
        It may run in another thread, and raises as this one does.

    Raises:
        CheckpointError: the step exists, the directory cannot be written, or the disk is full. The earlier
            steps are intact and no part of this one is left.
    """
    directory = Path(directory)
    target = directory / f"{step:08d}"
    needed = sum(_bytes(leaf) for leaf in jax.tree.leaves(state))
    owner = os.getpid()
    if jax.process_count() > 1:
        owner = int(ocp.multihost.broadcast_one_to_all(np.int32(owner)))
    if jax.process_index() == 0:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            sweep(directory)
        except OSError as error:
            raise cannot_write(error, directory, step, needed, steps(directory)) from error
        if target.exists() and manifest.is_sound(target):
            raise CheckpointError(
                f"step {step} is saved already.",
                where=str(target),
                hint="Save under another step, or remove that folder first.",
            )
        check_room(directory, step, needed, steps(directory))
    _wait_for_all(f"may save {step}")
    described = {"step": step, "meta": dict(meta), "score": score, "arrays": _describe(state)}
    hidden = directory / f"{_SAVING}{step:08d}-{owner}"
    # Folders are made at once: were one refused to Orbax's thread, its others would wait 20 minutes to hear of it.
    writer = ocp.AsyncCheckpointer(
        _handler(), async_options=ocp.options.AsyncOptions(create_directories_asynchronously=False)
    )

    @contextlib.contextmanager
    def whole_or_nothing() -> Iterator[None]:
        try:
            yield
        except Exception as error:
            with contextlib.suppress(Exception):  # what its other threads met is of the same disk
                writer.close()
            shutil.rmtree(hidden, ignore_errors=True)
            if isinstance(error, OSError) or says_full(error):
                raise cannot_write(error, directory, step, needed, steps(directory)) from error
            raise

    def finish() -> Path:
        with whole_or_nothing():
            writer.close()  # waits
            if jax.process_index() == 0:
                manifest.write_json(hidden / META, described)
                manifest.write(hidden)
                if target.exists():
                    remove(target)
                os.rename(hidden, target)
                manifest.flush(directory)
            _wait_for_all(f"saved {target.name}")
        return target

    with whole_or_nothing():
        writer.save(hidden.absolute() / STATE, jax.tree.map(_in_one_file, state))
    return finish


def restore(
    directory: str | Path,
    step: int | None = None,
    like: Any = None,
    check: Callable[[Mapping[str, Any]], None] = lambda meta: None,
    tell: Callable[[CheckpointError], object] = lambda error: None,
) -> tuple[int, Any, dict[str, Any]]:
    """Reads a step back after verifying every file of it.

    Args:
        directory: what `save` was given.
        step: which step; the newest that is sound if None.
        like: a tree of arrays or `jax.ShapeDtypeStruct`, of the structure, shapes and dtypes that are expected. Where
            a leaf has a `sharding`, the array comes back with it, and each device reads its own part only. Without
            one, and without `like`, arrays come back as numpy arrays.
        check: is given what was saved as `meta`, before anything is compared with `like`; may raise.
        tell: is given what is wrong with each newer step that was passed over; of several processes, in the first.

    Returns:
        The step, the state, and what was given as `meta`.

    Raises:
        CheckpointError: there is no such step; a file is missing, truncated, changed or not of the checkpoint (if no
            step is sound, of the newest); or the state differs from `like`, in which case the message names the array
            and both values.
    """
    directory = Path(directory)
    there = steps(directory)
    if not there:
        raise CheckpointError(
            "there is no checkpoint.", where=str(directory), hint="Train first, or name another directory."
        )
    if step not in (None, *there):
        raise CheckpointError(
            f"there is no step {step}.",
            where=str(directory),
            got=f"steps: {', '.join(map(str, there))}",
            hint="Name one of these.",
        )
    asked, found, damaged = (reversed(there) if step is None else [step]), -1, list[CheckpointError]()
    for number in asked if jax.process_index() == 0 else ():
        try:
            verify(directory / f"{number:08d}")
        except CheckpointError as error:
            damaged.append(error)
            continue
        found = number
        break
    if jax.process_count() > 1:
        found = int(ocp.multihost.broadcast_one_to_all(np.int32(found)))
    if found < 0:
        raise damaged[0] if damaged else CheckpointError("the checkpoint is damaged.", where=str(directory))
    for wrong in damaged:
        tell(wrong)
    folder = directory / f"{found:08d}"
    described = _meta(folder)
    check(described["meta"])
    if like is not None:
        _check_like(folder, described["arrays"], _describe(like))
    with ocp.Checkpointer(_handler()) as orbax:
        path = folder.absolute() / STATE
        args = jax.tree.map(_restore_args, orbax.metadata(path).item_metadata if like is None else like)
        state = orbax.restore(path, args=ocp.args.PyTreeRestore(item=like, restore_args=args))
    return found, state, described["meta"]


def steps(directory: str | Path) -> list[int]:
    """The saved steps, oldest first. Nothing is verified."""
    folder = Path(directory)
    if not folder.is_dir():
        return []
    return sorted(int(p.name) for p in folder.iterdir() if p.name.isdecimal() and p.is_dir())


def described(directory: str | Path, step: int) -> dict[str, Any]:
    """What a step was saved with as ``meta``; its arrays are not read.

    Raises:
        DamagedError: it cannot be read.
    """
    folder = Path(directory) / f"{step:08d}"
    try:
        return dict(_meta(folder)["meta"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise manifest.damaged(folder, f"{META!r} cannot be read ({error})") from error


def _meta(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / META).read_text("utf-8"))
    return found


def score(directory: str | Path, step: int) -> float:
    """The score that a step was saved with; NaN if there is none. Nothing is verified."""
    try:
        return float(_meta(Path(directory) / f"{step:08d}")["score"])
    except (OSError, ValueError, KeyError, TypeError):
        return math.nan


def best(directory: str | Path) -> int | None:
    """The saved step with the lowest score; None if no step has one. Nothing is verified."""
    known = [(value, step) for step in steps(directory) if not math.isnan(value := score(directory, step))]
    return min(known)[1] if known else None


def prune(directory: str | Path, keep: int) -> None:
    """Removes all but the newest `keep` steps and the best one."""
    kept = best(directory)
    for step in steps(directory)[: -max(keep, 1)]:
        if step != kept:
            remove(Path(directory) / f"{step:08d}")


def remove(folder: Path) -> None:
    """Removes a step; whatever happens meanwhile, it is listed whole or not at all."""
    gone = folder.with_name(f"{_REMOVING}{folder.name}-{os.getpid()}")
    shutil.rmtree(gone, ignore_errors=True)
    os.rename(folder, gone)
    shutil.rmtree(gone, ignore_errors=True)


def sweep(directory: Path) -> None:
    """Removes what processes that have died were writing or removing."""
    for path in (*directory.glob(f"{_SAVING}*"), *directory.glob(f"{_REMOVING}*")):
        owner = path.name.rpartition("-")[2]
        if not (owner.isdecimal() and int(owner) != os.getpid() and alive(int(owner))):
            shutil.rmtree(path, ignore_errors=True)


def verify(folder: str | Path) -> None:
    """Reads every file of one step against its manifest.

    Raises:
        CheckpointError: the first thing that is wrong, by name.
    """
    manifest.verify(Path(folder))


def _wait_for_all(what: str) -> None:
    if jax.process_count() > 1:
        ocp.multihost.get_barrier_sync_fn()(key=what, timeout_ms=1000 * _WAIT)


def _handler() -> Any:
    """Orbax, writing a folder of plain chunk files for each array."""
    return ocp.PyTreeCheckpointHandler(use_ocdbt=False)


def _in_one_file(leaf: Any) -> Any:
    """A small array as a whole, where this process has all of it; a large one stays in its devices' parts.

    Every part is a file, and a model of some megabytes would have a thousand of them.
    """
    if _bytes(leaf) >= _SMALL or not getattr(leaf, "is_fully_addressable", True):
        return leaf
    return np.asarray(leaf)


def _restore_args(leaf: Any) -> Any:
    if isinstance(sharding := getattr(leaf, "sharding", None), jax.sharding.Sharding):
        return ocp.ArrayRestoreArgs(sharding=sharding, dtype=leaf.dtype)
    return ocp.RestoreArgs(restore_type=np.ndarray)


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
                hint="Use the configuration the checkpoint was trained with.",
            )


def _text(described: list[Any] | None) -> str:
    return "absent" if described is None else f"{described[0]}[{','.join(map(str, described[1:]))}]"


def _bytes(leaf: Any) -> int:
    return int(np.prod(np.shape(leaf), dtype=np.int64)) * np.dtype(leaf.dtype).itemsize
