"""Finds the collectives in the jaxpr of a per-device program, and the bytes that each device sends in them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr

from gshard.core.mesh import Atoms
from gshard.core.program import itemsize

KINDS = {
    "psum": "all_reduce",
    "pmax": "all_reduce",
    "pmin": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "psum_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "ragged_all_to_all": "all_to_all",
    "ppermute": "collective_permute",
}


def collectives_of(jaxpr: Any, sizes: Mapping[str, int], times: int = 1) -> Iterator[tuple[str, Atoms, int, Any]]:
    """Every collective of a per-device jaxpr: kind, axes, bytes that a device sends in all runs, operand type."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        name, params = eqn.primitive.name, eqn.params
        if name in KINDS:
            axes = params.get("axes", params.get("axis_name"))
            axes = tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)
            group = math.prod(sizes[a] for a in axes)
            held = [math.prod(var.aval.shape) * itemsize(var.aval.dtype) for var in eqn.invars]
            for size, var in zip(sent_sizes(name, held), eqn.invars, strict=False):
                yield KINDS[name], axes, times * sent_bytes(KINDS[name], size, group), var.aval
        times_of_bodies = times * params["length"] if name == "scan" else times
        for value in params.values():
            for body in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(body, (Jaxpr, ClosedJaxpr)):
                    yield from collectives_of(body, sizes, times_of_bodies)


def sent_sizes(name: str, sizes: Sequence[int]) -> Sequence[int]:
    """The sizes of the arrays that a collective sends.

    The bytes of a ragged all-to-all are known at run time only. It counts as an all-to-all of its operand, or of its
    output if that is smaller: on average, devices send no more than they hold, and receive no more than they have room
    for. They do not send offsets and sizes.
    """
    return [min(sizes[:2])] if name == "ragged_all_to_all" else sizes


def sent_bytes(kind: str, operand: int, group: int) -> int:
    """Bytes that each device of a group sends with the best known algorithms."""
    if kind == "all_reduce":
        return 2 * operand * (group - 1) // group
    if kind == "all_gather":
        return operand * (group - 1)
    return operand if kind == "collective_permute" else operand * (group - 1) // group
