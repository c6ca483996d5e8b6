"""Sinks elementwise operators below a concatenation of slices of one array.

The halves of rotary positions are exchanged, and one of them is negated before. Computed first, a half is an array with
parts of its own. Moved first, the array moves once:

    concatenate(-x[64:], x[:64])        y = concatenate(x[64:], x[:64]);  where(i < 64, -y, y)
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from gshard.core.program import Equation
from gshard.language.traits import names_where, traits_of
from gshard.rewrite.cse import common_key
from gshard.rewrite.driver import at
from gshard.rewrite.element_source import is_zero
from gshard.rewrite.equation_graph import Array, Graph, again
from gshard.rules.concatenate_slices import concatenate_slices_p

_CUTS = ("slice", "split")
_TIMES = 2  # elements that are computed for one that is kept: half of rotary positions changes its sign


@at("concatenate", *names_where(lambda traits: traits.adds))
def sink_elementwise(graph: Graph, e: Equation) -> Sequence[Equation] | None:
    """``concatenate(f(slice), slice)`` becomes ``where(first, f(y), y)`` of ``y = concatenate(slice, slice)``."""
    if (pieces := _pieces(graph, e)) is None:
        return None
    axis, arrays = pieces
    chains: list[list[Equation]] = []
    slices: list[Array] = []
    for x in arrays:
        chain: list[Equation] = []
        while graph.is_read_once(x) and (q := graph.producer(x)) is not None and (i := _computed_of(q)) is not None:
            x = q.inputs[i]
            chain.insert(0, q)
        chains.append(chain)
        slices.append(x)
    cuts = {q.inputs[0] if (q := graph.producer(x, *_CUTS)) is not None else None for x in slices}
    if not any(chains) or None in cuts or len(cuts) > 1:
        return None
    (result,) = e.outputs
    kept = sum(len(chain) * x.shape[axis] for chain, x in zip(chains, slices, strict=True))
    if len({q.primitive for chain in chains for q in chain}) * result.shape[axis] > _TIMES * kept:
        return None
    ends = list(itertools.accumulate(x.shape[axis] for x in slices))
    numbers = [x for chain in chains for q in chain for x in q.inputs if not x.shape]

    def sunk(*given: Any) -> Any:
        known = dict(zip((*slices, *numbers), given, strict=True))
        computed: dict[Any, Any] = {(): lax.concatenate(given[: len(slices)], axis)}
        keys: list[Any] = []  # equal for chains that compute the same
        for chain in chains:
            key: tuple[Any, ...] = ()
            for q in chain:
                alike = common_key(q.primitive, q.params, [result if x.shape else x for x in q.inputs], q.context)
                value, key = computed[key], (*key, alike or id(q))
                computed.setdefault(key, again(q, [value if x.shape else known[x] for x in q.inputs]))
            keys.append(key)
        chosen, last, place = computed[keys[-1]], keys[-1], None
        for end, key in [*zip(ends, keys, strict=True)][-2::-1]:
            if key != last:
                place = lax.broadcasted_iota(np.int32, result.shape, axis) if place is None else place
                chosen, last = lax.select(place < np.int32(end), computed[key], chosen), None
        if e.name == "concatenate":
            return chosen
        # A sum makes 0.0 of -0.0.
        whole = ((0, result.shape[axis]),)
        return concatenate_slices_p.bind(chosen, dimension=axis, slices=whole, added=True)

    return graph.write(sunk, (*slices, *numbers), e.outputs, e)


def _pieces(graph: Graph, e: Equation) -> tuple[int, Sequence[Array]] | None:
    """The dimension and the operands of a concatenation, which in derivatives is a sum of arrays padded with zeros."""
    if e.name == "concatenate":
        return e.params["dimension"], e.inputs
    pads = [q for x in e.inputs if (q := graph.producer(x, "pad")) is not None and is_zero(q.inputs[1])]
    if len(pads) != 2:
        return None
    first, last = sorted(pads, key=lambda q: q.params["padding_config"])
    (x, _), (y, _), low, high = first.inputs, last.inputs, *(q.params["padding_config"] for q in (first, last))
    around = [d for d in range(len(x.shape)) if (low[d], high[d]) != ((0, 0, 0),) * 2]
    if len(around) != 1 or 0 in (*x.shape, *y.shape):
        return None
    (axis,) = around
    if (tuple(low[axis]), tuple(high[axis])) != ((0, y.shape[axis], 0), (x.shape[axis], 0, 0)):
        return None
    return axis, (x, y)


def _computed_of(q: Equation) -> int | None:
    """The only operand of an elementwise equation that is no number, if the result has its shape and dtype."""
    if not traits_of(q.name).computes:
        return None
    arrays = [i for i, x in enumerate(q.inputs) if x.shape]
    alike = [i for i in arrays if (q.inputs[i].shape, q.inputs[i].dtype) == (q.outputs[0].shape, q.outputs[0].dtype)]
    return alike[0] if len(arrays) == len(alike) == 1 else None
