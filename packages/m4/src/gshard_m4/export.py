"""Export: the parameters of a checkpoint as one safetensors file, which other frameworks read.

Layers that are stacked in the checkpoint become arrays of their own: ``encoder.blocks.sparse.experts.wi`` [layers,
experts, M, H] is written as ``encoder.blocks.0.sparse.experts.wi`` [experts, M, H], ``encoder.blocks.1...`` and so on.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from gshard_m4 import checkpoint
from gshard_m4.config import Run
from gshard_m4.errors import CheckpointError

STACK = "blocks"
"""The key under which every array has a leading dimension of layers."""


def export(run: Run, target: Path, step: int | None = None) -> int:
    """Writes the parameters of a step; what stood in `target` is replaced in the end, or stays.

    Args:
        run: the run.
        target: the file, conventionally ``*.safetensors``.
        step: which step; the newest sound one if None.

    Returns:
        The step.

    Raises:
        CheckpointError: there is no such step, it is damaged, or the file cannot be written.
    """
    found, state, meta = checkpoint.restore(run.checkpoints, step)
    # safetensors keeps texts only beside the arrays.
    described = {"step": str(found), **{name: json.dumps(value, sort_keys=True) for name, value in meta.items()}}
    hidden = target.with_name(f".{target.name}-{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        save_file(flat(state["params"]), hidden, described)
        os.replace(hidden, target)
    except OSError as error:
        raise CheckpointError(
            f"the parameters could not be written: {error.strerror or error}.",
            where=str(target),
            hint="Name a file that can be written, on a disk with room.",
        ) from error
    finally:
        with contextlib.suppress(OSError):
            hidden.unlink()
    return found


def flat(params: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Parameters by dotted names, stacks of layers taken apart.

    >>> sorted(flat({"encoder": {"blocks": {"w": np.zeros((2, 3))}, "norm": np.zeros(4)}}))
    ['encoder.blocks.0.w', 'encoder.blocks.1.w', 'encoder.norm']
    """
    arrays: dict[str, np.ndarray] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        keys = [str(key.key) for key in path]
        array = np.asarray(leaf)
        if STACK not in keys:
            arrays[".".join(keys)] = array
            continue
        at = keys.index(STACK) + 1
        for layer in range(array.shape[0]):
            arrays[".".join([*keys[:at], str(layer), *keys[at:]])] = np.ascontiguousarray(array[layer])
    return arrays
