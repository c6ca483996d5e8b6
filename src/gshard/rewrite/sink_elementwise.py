"""Sinks elementwise operators below a concatenation of slices of one array.

Rotary position embeddings exchange the halves of an array, and negate one half before. As a separate array, the negated
half has other parts than the array. If the array moves first, it moves once:

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
_TIMES = 2  # largest ratio of computed and needed elements: rotary embeddings negate half of the elements


@at("concatenate", *names_where(lambda traits: traits.adds))
def sink_elementwise(graph: Graph, e: Equation) -> Sequence[Equation] | None:
    """Replaces ``concatenate(f(slice), slice)`` by ``where(first, f(y), y)`` with ``y = concatenate(slice, slice)``."""
    pieces = _pieces(graph, e)
    if pieces is None:
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

    def sunk(*operands: Any) -> Any:
        array_of = dict(zip((*slices, *numbers), operands, strict=True))
        computed: dict[Any, Any] = {(): lax.concatenate(operands[: len(slices)], axis)}
        keys: list[Any] = []  # equal for chains that compute the same
        for chain in chains:
            key: tuple[Any, ...] = ()
            for q in chain:
                equation_key = common_key(
                    q.primitive, q.params, [result if x.shape else x for x in q.inputs], q.context
                )
                value = computed[key]
                key = (*key, equation_key or id(q))
                computed.setdefault(key, again(q, [value if x.shape else array_of[x] for x in q.inputs]))
            keys.append(key)
        selected, last, position = computed[keys[-1]], keys[-1], None
        for end, key in [*zip(ends, keys, strict=True)][-2::-1]:
            if key != last:
                if position is None:
                    position = lax.broadcasted_iota(np.int32, result.shape, axis)
                selected, last = lax.select(position < np.int32(end), computed[key], selected), None
        if e.name == "concatenate":
            return selected
        # A sum with zeros converts -0.0 to 0.0.
        whole = ((0, result.shape[axis]),)
        return concatenate_slices_p.bind(selected, dimension=axis, slices=whole, added=True)

    return graph.write(sunk, (*slices, *numbers), e.outputs, e)


def _pieces(graph: Graph, e: Equation) -> tuple[int, Sequence[Array]] | None:
    """The dimension and the operands of a concatenation, or of a sum of zero-padded arrays that is a concatenation."""
    if e.name == "concatenate":
        return e.params["dimension"], e.inputs
    pads = [q for x in e.inputs if (q := graph.producer(x, "pad")) is not None and is_zero(q.inputs[1])]
    if len(pads) != 2:
        return None
    first, last = sorted(pads, key=lambda q: q.params["padding_config"])
    x, y = first.inputs[0], last.inputs[0]
    low, high = first.params["padding_config"], last.params["padding_config"]
    padded = [d for d in range(len(x.shape)) if (low[d], high[d]) != ((0, 0, 0),) * 2]
    if len(padded) != 1 or 0 in (*x.shape, *y.shape):
        return None
    (axis,) = padded
    if (tuple(low[axis]), tuple(high[axis])) != ((0, y.shape[axis], 0), (x.shape[axis], 0, 0)):
        return None
    return axis, (x, y)


def _computed_of(q: Equation) -> int | None:
    """The only operand of an elementwise equation that is an array, if the result has its shape and dtype."""
    if not traits_of(q.name).computes:
        return None
    arrays = [i for i, x in enumerate(q.inputs) if x.shape]
    alike = [i for i in arrays if (q.inputs[i].shape, q.inputs[i].dtype) == (q.outputs[0].shape, q.outputs[0].dtype)]
    return alike[0] if len(arrays) == len(alike) == 1 else None
