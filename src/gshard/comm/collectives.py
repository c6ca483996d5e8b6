"""The collectives of a per-device program and what each device sends in them, read off its jaxpr."""

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
    # How much a ragged one sends is known when it runs: it counts as if all of it went, to all alike.
    **dict.fromkeys(SENT_OPERANDS, "all_to_all"),
    "ppermute": "collective_permute",
}


def collectives_of(jaxpr: Any, sizes: Mapping[str, int], times: int = 1) -> Iterator[tuple[str, Atoms, int, Any]]:
    """Every collective of a per-device jaxpr: kind, axes, bytes that each device sends in all its runs, operand.

    Args:
        jaxpr: the program; the body of a loop whose end is not known counts once.
        sizes: the devices along each axis.
        times: how often all of it runs.
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
        again = times * params["length"] if name == "scan" else times
        for value in params.values():
            for body in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(body, (Jaxpr, ClosedJaxpr)):
                    yield from collectives_of(body, sizes, again)


def sent_bytes(kind: str, operand: int, group: int) -> int:
    """Bytes that each device of a group sends, by the best known algorithms."""
    if kind == "all_reduce":
        return 2 * operand * (group - 1) // group
    if kind == "all_gather":
        return operand * (group - 1)
    return operand if kind == "collective_permute" else operand * (group - 1) // group
