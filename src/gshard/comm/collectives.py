"""Finds the collectives in the jaxpr of a per-device program, and the bytes that each device sends in them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr

from gshard.core.jax_adapter import SENT_OPERANDS
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
    # The bytes of a ragged all-to-all are known at run time only. It counts as an all-to-all of the whole operand.
    **dict.fromkeys(SENT_OPERANDS, "all_to_all"),
    "ppermute": "collective_permute",
}


def collectives_of(jaxpr: Any, sizes: Mapping[str, int], times: int = 1) -> Iterator[tuple[str, Atoms, int, Any]]:
    """Every collective of a per-device jaxpr: kind, axes, bytes that a device sends in all runs, type of the operand.

    Args:
        jaxpr: the program. The body of a loop with an unknown number of iterations counts once.
        sizes: the number of devices along each axis.
        times: the number of runs of the jaxpr.
    """
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        name, params = eqn.primitive.name, eqn.params
        if name in KINDS:
            axes = params.get("axes", params.get("axis_name"))
            axes = tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)
            group = math.prod(sizes[a] for a in axes)
            for var in eqn.invars[: SENT_OPERANDS.get(name)]:
                each = math.prod(var.aval.shape) * itemsize(var.aval.dtype)
                yield KINDS[name], axes, times * sent_bytes(KINDS[name], each, group), var.aval
        times_of_bodies = times * params["length"] if name == "scan" else times
        for value in params.values():
            for body in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(body, (Jaxpr, ClosedJaxpr)):
                    yield from collectives_of(body, sizes, times_of_bodies)


def sent_bytes(kind: str, operand: int, group: int) -> int:
    """Bytes that each device of a group sends with the best known algorithms.

    Args:
        kind: the kind of the collective.
        operand: bytes of one device's operand.
        group: number of devices.
    """
    if kind == "all_reduce":
        return 2 * operand * (group - 1) // group
    if kind == "all_gather":
        return operand * (group - 1)
    return operand if kind == "collective_permute" else operand * (group - 1) // group
