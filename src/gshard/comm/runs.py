"""Determines whether the parts of an array are contiguous in memory, or must be copied into place."""

from __future__ import annotations

import math

from gshard.comm.steps import ALL_GATHER, REDUCE_SCATTER, Step
from gshard.core.mesh import Mesh


def is_strided(shape: tuple[int, ...], dim: int) -> bool:
    """Whether a part of an array along a dimension consists of several runs of elements."""
    return any(n > 1 for n in shape[:dim])


def is_turned(shape: tuple[int, ...], cut: int, joined: int) -> bool:
    """Whether received parts, which are consecutive, must be interleaved."""
    return any(n > 1 for n in shape[min(cut, joined) : max(cut, joined)])


def laid_out(step: Step, shape: tuple[int, ...], mesh: Mesh) -> tuple[int, ...]:
    """The elements of a device's part before and after a gather or reduce-scatter of strided parts; () otherwise."""
    if step.kind not in (ALL_GATHER, REDUCE_SCATTER):
        return ()
    before, after = (s.local_shape(mesh, shape) for s in (step.before, step.after))
    return (math.prod(before), math.prod(after)) if is_strided(tuple(map(min, before, after)), step.dim) else ()
