"""Determines whether the parts of an array are contiguous in memory, or must be copied into place."""

from __future__ import annotations

import math

from gshard.comm.steps import ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER, Step, is_of_tiles
from gshard.comm.tiles import turns
from gshard.core.mesh import Mesh


def is_strided(shape: tuple[int, ...], dim: int) -> bool:
    """Whether a part of an array along a dimension consists of several runs of elements."""
    return any(n > 1 for n in shape[:dim])


def is_turned(shape: tuple[int, ...], cut: int, joined: int) -> bool:
    """Whether received parts, which are consecutive, must be interleaved.

    Args:
        shape: the shape of a part.
        cut, joined: the dimension that was split, and the dimension along which parts are joined.
    """
    return any(n > 1 for n in shape[min(cut, joined) : max(cut, joined)])


def laid_out(step: Step, shape: tuple[int, ...], mesh: Mesh) -> tuple[int, ...]:
    """The elements of a device's part before and after a gather or reduce-scatter of strided parts; () otherwise."""
    if step.kind not in (ALL_GATHER, REDUCE_SCATTER):
        return ()
    before, after = (s.local_shape(mesh, shape) for s in (step.before, step.after))
    return (math.prod(before), math.prod(after)) if is_strided(tuple(map(min, before, after)), step.dim) else ()


def layout(step: Step, shape: tuple[int, ...], mesh: Mesh) -> tuple[bool, ...]:
    """Whether the parts of a step must be copied into place: before it, after it, or at all."""
    before, after = (s.local_shape(mesh, shape) for s in (step.before, step.after))
    if is_of_tiles(step):
        return turns(before, step.before.dims, step.after.dims, mesh)
    part = tuple(map(min, before, after))
    if step.kind == ALL_TO_ALL:
        return (is_turned(part, step.to, step.dim),)
    return (step.kind in (ALL_GATHER, REDUCE_SCATTER) and is_strided(part, step.dim),)
