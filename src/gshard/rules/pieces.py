"""Pieces: a concatenation of slices as one equation, so that each element moves once.

Rotations (``jnp.roll``), shifts and borders that wrap around are written as slices that are joined again. Taken one by
one, the slices would be spread evenly over the devices and then spread evenly once more. Together they are an exchange:
part ``i`` of the result takes from each operand the window where its piece and the part overlap. In derivatives a
concatenation is a sum: each piece with zeros in the place of the others.

    concatenate(x[7:], x[:7]) of 8 elements over 4 parts      each part sends one element to its neighbour
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from gshard.core.program import Constant, Equation, Value
from gshard.core.rule import Rule
from gshard.rules.registry import Call, rule, rule_of
from gshard.rules.slicing import joined

pieces_p = Primitive("concatenate_slices")


@pieces_p.def_impl
def _run(*xs: Any, dimension: int, pieces: Sequence[tuple[int, int]], added: bool) -> Any:
    cuts = zip(xs, pieces, strict=True)
    x = lax.concatenate([lax.slice_in_dim(x, start, end, axis=dimension) for x, (start, end) in cuts], dimension)
    return _with_zero(x) if added else x


def _with_zero(x: Any) -> Any:
    """What is left of a sum with zeros: -0.0 + 0.0 is 0.0."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return lax.complex(_with_zero(x.real), _with_zero(x.imag))
    return jnp.where(x == 0, jnp.zeros((), x.dtype), x)


@pieces_p.def_abstract_eval
def _shape(*xs: Any, dimension: int, pieces: Sequence[tuple[int, int]], added: bool) -> Any:
    return jax.core.ShapedArray(
        tuple(sum(b - a for a, b in pieces) if d == dimension else n for d, n in enumerate(xs[0].shape)), xs[0].dtype
    )


mlir.register_lowering(pieces_p, mlir.lower_fun(_run, multiple_results=False))


@rule("concatenate_slices")
def concatenate_slices(call: Call) -> Rule:
    """
    >>> params = {"dimension": 0, "pieces": ((7, 8), (0, 7)), "added": False}
    >>> print(concatenate_slices(Call("concatenate_slices", params, ((8, 2), (8, 2)), ((8, 2),), ("f", "f"))))
    a b, a b -> a b; exchange a
    """
    made = joined(call, call.params["dimension"], call.params["pieces"])
    if not call.params["added"]:
        return made
    join = made.local
    assert join is not None
    ways = tuple(way for way in made.linear if way[0] in ("add", "pick"))
    return dataclasses.replace(made, local=lambda shards, *xs: [*map(_with_zero, join(shards, *xs))], linear=ways)


def join_slices(equations: Iterable[Equation], outputs: Sequence[Value | Constant]) -> list[Equation]:
    """The equations with concatenations of slices as one equation each; slices that nobody else reads are gone."""
    equations = list(equations)
    makers: dict[Any, Equation] = {v: e for e in equations for v in e.outputs}
    joined = {e: new for e in equations if (new := _joined(e, makers)) is not None}
    if not joined:
        return equations
    kept = []
    read: set[Any] = set(outputs)
    for e in reversed([joined.get(e, e) for e in equations]):
        if e.name not in ("slice", "split", "pad") or not read.isdisjoint(e.outputs):
            kept.append(e)
            read.update(e.inputs)
    return kept[::-1]


def _joined(e: Equation, makers: dict[Any, Equation]) -> Equation | None:
    laid = _laid_side_by_side(e, makers)
    if laid is None:
        return None
    axis, values = laid
    cuts = [_cut_from(v, axis, makers) for v in values]
    if e.name == "concatenate" and all(source is v for (source, _), v in zip(cuts, values, strict=True)):
        return None
    sources, pieces = zip(*cuts, strict=True)
    params = {"dimension": axis, "pieces": tuple(pieces), "added": e.name != "concatenate"}
    shapes, dtypes = tuple(x.shape for x in sources), tuple(x.dtype for x in sources)
    call = Call(pieces_p.name, params, shapes, tuple(v.shape for v in e.outputs), dtypes)
    return Equation(pieces_p, params, sources, e.outputs, rule_of(call), e.source_info)


def _laid_side_by_side(e: Equation, makers: dict[Any, Equation]) -> tuple[int, Sequence[Value | Constant]] | None:
    """Along which axis an equation joins which values: a concatenation, or a sum of two that zeros fill up."""
    if e.name == "concatenate":
        return e.params["dimension"], e.inputs
    if e.name not in ("add", "add_any"):
        return None
    filled = []
    for v in e.inputs:
        maker = makers.get(v)
        if maker is None or maker.name != "pad" or not isinstance(maker.inputs[1], Constant):
            return None
        config = [tuple(map(int, c)) for c in maker.params["padding_config"]]
        axes = [d for d, c in enumerate(config) if c != (0, 0, 0)]
        low, high, interior = config[axes[0]] if len(axes) == 1 else (-1, -1, -1)
        if np.any(maker.inputs[1].value) or interior or min(low, high) < 0:
            return None
        filled.append((axes[0], low, high, maker.inputs[0]))
    (axis, low, _, first), (other, high, _, second) = sorted(filled, key=lambda f: f[1])
    entire = low == 0 and high == first.shape[axis] and high + second.shape[axis] == e.outputs[0].shape[axis]
    return (axis, (first, second)) if axis == other and entire else None


def _cut_from(v: Value | Constant, axis: int, makers: dict[Any, Equation]) -> tuple[Value | Constant, tuple[int, int]]:
    """What a value is cut out of along ``axis``, from where to where; or itself, from end to end."""
    maker = makers.get(v) if isinstance(v, Value) else None
    if maker is not None and maker.name == "split" and maker.params["axis"] == axis:
        starts = list(itertools.accumulate(map(int, maker.params["sizes"]), initial=0))
        i = maker.outputs.index(v)
        return maker.inputs[0], (starts[i], starts[i + 1])
    if maker is not None and maker.name == "slice" and all(n == 1 for n in maker.params["strides"] or ()):
        source, p = maker.inputs[0], maker.params
        bounds = [(int(a), int(b)) for a, b in zip(p["start_indices"], p["limit_indices"], strict=True)]
        if all(b == (0, n) for d, (b, n) in enumerate(zip(bounds, source.shape, strict=True)) if d != axis):
            return source, bounds[axis]
    return v, (0, v.shape[axis])
