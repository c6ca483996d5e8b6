"""What a per-device program says to other devices, read off its jaxpr: nothing is taken from what it reports."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr

from gshard.core.program import itemsize
from gshard.core.spmd import Collective

KINDS = {
    "psum": "all_reduce",
    "pmax": "all_reduce",
    "pmin": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "psum_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "ppermute": "collective_permute",
}


def emitted(jaxpr: Any, sizes: Mapping[str, int]) -> Counter[str]:
    """Bytes that each device sends in one call, by kind; the bodies of a loop whose end is not known count once.

    Args:
        jaxpr: the program, with its ``shard_map``.
        sizes: the axes of the mesh inside it.
    """
    found: Counter[str] = Counter()
    for kind, sent in _collectives(jaxpr, sizes, 1):
        found[kind] += sent
    return +found


def reported(collectives: Iterable[Collective]) -> Counter[str]:
    """What a program reports of itself, in the same form."""
    found: Counter[str] = Counter()
    for c in collectives:
        found[c.kind] += c.total_bytes
    return +found


def _collectives(jaxpr: Any, sizes: Mapping[str, int], times: int) -> Iterator[tuple[str, int]]:
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        name, params = eqn.primitive.name, eqn.params
        if name in KINDS:
            axes = params.get("axes", params.get("axis_name"))
            axes = axes if isinstance(axes, tuple) else (axes,)
            group = math.prod(sizes[a] for a in axes)
            for var in eqn.invars:
                each = math.prod(var.aval.shape) * itemsize(var.aval.dtype)
                yield KINDS[name], times * sent_bytes(KINDS[name], each, group)
        for value in params.values():
            for body in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(body, (Jaxpr, ClosedJaxpr)):
                    yield from _collectives(body, sizes, times * params["length"] if name == "scan" else times)


def sent_bytes(kind: str, operand: int, group: int) -> int:
    """Bytes that each device of a group sends, by the best known algorithms."""
    if kind == "all_reduce":
        return 2 * operand * (group - 1) // group
    if kind == "all_gather":
        return operand * (group - 1)
    return operand if kind == "collective_permute" else operand * (group - 1) // group
