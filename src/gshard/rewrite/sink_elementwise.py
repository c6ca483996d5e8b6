"""Moved first: what is computed of slices that are laid side by side is computed once they lie there.

The halves of rotary positions change places, and one of them changes its sign on the way. Computed first, a half is an
array of its own, cut in parts of its own. Moved first, it is one array that is moved once:

    concatenate(-x[64:], x[:64])        y = concatenate(x[64:], x[:64]);  where(i < 64, -y, y)
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from jax import lax

from gshard.core.program import Constant, Equation, Value
from gshard.rewrite.cse import common_key, is_repeatable
from gshard.rewrite.dce import without_unread
from gshard.rewrite.element_source import is_zero
from gshard.rules.concatenate_slices import concatenate_slices_p
from gshard.rules.elementwise import COMPUTED

Array = Value | Constant

_CUTS = ("slice", "split")
_TIMES = 2  # elements that are computed for one that is kept: half of rotary positions changes its sign


def moved_first(
    equations: Iterable[Equation],
    outputs: Sequence[Array],
    fresh: Callable[[tuple[int, ...], Any], Value],
    equation: Callable[..., Equation],
) -> list[Equation]:
    """The equations with elementwise ones after the concatenations that they stood before; nobody reads those left out.

    Args:
        equations: of one block.
        outputs: the block's results.
        fresh: a new value of a shape and a dtype.
        equation: an equation of a primitive, its parameters, operands, results, and the source that it is blamed on.
    """
    equations = list(equations)
    if not any(e.name in ("concatenate", "pad") for e in equations):
        return equations
    producers = {v: e for e in equations for v in e.outputs if e.mark is None}
    read = Counter(x for e in equations for x in e.inputs) + Counter(outputs)
    made: list[Equation] = []
    changed = False
    for e in equations:
        pieces = _pieces(e, producers)
        new = None if pieces is None else _after(e, *pieces, producers, read, fresh, equation)
        made += new or [e]
        changed |= new is not None
    return without_unread(made, outputs, is_repeatable) if changed else equations


def _pieces(e: Equation, producers: dict[Any, Equation]) -> tuple[int, Sequence[Array]] | None:
    """Along which dimension an equation lays what side by side: in derivatives, by adding what zeros are put to."""
    if e.name == "concatenate":
        return e.params["dimension"], e.inputs
    pads = [producers.get(x) for x in e.inputs] if e.name in ("add", "add_any") else []
    if len(pads) != 2 or any(q is None or q.name != "pad" or not is_zero(q.inputs[1]) for q in pads):
        return None
    found = sorted((q.params["padding_config"], i) for i, q in enumerate(pads) if q is not None)
    (first, i), (last, k) = found
    x, y = (q.inputs[0] for q in (pads[i], pads[k]) if q is not None)
    around = [d for d in range(len(x.shape)) if (first[d], last[d]) != ((0, 0, 0),) * 2]
    if len(around) != 1 or 0 in (*x.shape, *y.shape):
        return None
    (axis,) = around
    if (tuple(first[axis]), tuple(last[axis])) != ((0, y.shape[axis], 0), (x.shape[axis], 0, 0)):
        return None
    return axis, (x, y)


def _computed_of(q: Equation) -> int | None:
    """Which operand an equation computes something of, element by element and of the same type, with numbers."""
    if q.name not in COMPUTED:
        return None
    arrays = [i for i, x in enumerate(q.inputs) if x.shape]
    alike = [i for i in arrays if (q.inputs[i].shape, q.inputs[i].dtype) == (q.outputs[0].shape, q.outputs[0].dtype)]
    return alike[0] if len(arrays) == len(alike) == 1 else None


def _after(
    e: Equation,
    axis: int,
    pieces: Sequence[Array],
    producers: dict[Any, Equation],
    read: Counter[Any],
    fresh: Callable[..., Value],
    equation: Callable[..., Equation],
) -> list[Equation] | None:
    """The equations that stand for a concatenation of what is computed of slices of one array."""
    (result,) = e.outputs
    chains: list[list[Equation]] = []
    slices: list[Array] = []
    for x in pieces:
        chain: list[Equation] = []
        while read[x] == 1 and (q := producers.get(x)) is not None and (at := _computed_of(q)) is not None:
            x = q.inputs[at]
            chain.insert(0, q)
        chains.append(chain)
        slices.append(x)
    cuts = [producers.get(x) for x in slices]
    if not any(chains) or any(q is None or q.name not in _CUTS for q in cuts):
        return None
    if len({q.inputs[0] for q in cuts if q is not None}) > 1:
        return None
    kept = sum(len(chain) * x.shape[axis] for chain, x in zip(chains, slices, strict=True))
    if len({q.primitive for chain in chains for q in chain}) * result.shape[axis] > _TIMES * kept:
        return None
    out: list[Equation] = []

    def add(primitive: Any, params: dict[str, Any], inputs: Sequence[Array], dtype: Any, of: Equation) -> Value:
        value = fresh(result.shape, dtype)
        out.append(equation(primitive, params, tuple(inputs), (value,), of.source_info))
        return value

    moved = add(lax.concatenate_p, {"dimension": axis}, slices, result.dtype, e)
    computed: dict[Any, Value] = {}
    ends = list(itertools.accumulate(x.shape[axis] for x in slices))
    runs: list[tuple[int, Value]] = []
    for chain, end in zip(chains, ends, strict=True):
        value = moved
        for q in chain:
            inputs = [value if x.shape else x for x in q.inputs]
            key = common_key(q.primitive, q.params, inputs, q.context) or id(q)
            if key not in computed:
                computed[key] = add(q.primitive, q.params, inputs, result.dtype, q)
            value = computed[key]
        runs.append((end, value))
    chosen = runs[-1][1]
    place: Value | None = None
    for end, value in reversed(runs[:-1]):
        if value is chosen:
            continue
        if place is None:
            params = {"dtype": np.dtype(np.int32), "shape": result.shape, "dimension": axis, "sharding": None}
            place = add(lax.iota_p, params, (), np.dtype(np.int32), e)
        before = add(lax.lt_p, {}, (place, Constant(np.int32(end))), np.dtype(bool), e)
        chosen = add(lax.select_n_p, {}, (before, chosen, value), result.dtype, e)
    if e.name != "concatenate":  # -0.0 + 0.0 is 0.0
        params = {"dimension": axis, "slices": ((0, result.shape[axis]),), "added": True}
        add(concatenate_slices_p, params, (chosen,), result.dtype, e)
    last = out.pop()
    out.append(equation(last.primitive, last.params, last.inputs, (result,), last.source_info))
    return out
