"""Pieces: a concatenation of slices as one equation, so that each element moves once.

Rotations (``jnp.roll``), shifts and borders that wrap around are written as slices that are joined again. Taken one by
one, the slices would be spread evenly over the devices and then spread evenly once more. Together they are an exchange:
part ``i`` of the result takes from each operand the window where its piece and the part overlap.

    concatenate(x[7:], x[:7]) of 8 elements over 4 parts      each part sends one element to its neighbour
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from gshard.core.program import Constant, Equation, Value
from gshard.core.rule import Rule
from gshard.rules.registry import Call, rule, rule_of
from gshard.rules.slicing import joined

pieces_p = Primitive("concatenate_slices")


@pieces_p.def_impl
def _run(*xs: Any, dimension: int, pieces: Sequence[tuple[int, int]]) -> Any:
    cuts = zip(xs, pieces, strict=True)
    return lax.concatenate([lax.slice_in_dim(x, start, end, axis=dimension) for x, (start, end) in cuts], dimension)


@pieces_p.def_abstract_eval
def _shape(*xs: Any, dimension: int, pieces: Sequence[tuple[int, int]]) -> Any:
    return jax.core.ShapedArray(
        tuple(sum(b - a for a, b in pieces) if d == dimension else n for d, n in enumerate(xs[0].shape)), xs[0].dtype
    )


mlir.register_lowering(pieces_p, mlir.lower_fun(_run, multiple_results=False))


@rule("concatenate_slices")
def concatenate_slices(call: Call) -> Rule:
    """
    >>> params = {"dimension": 0, "pieces": ((7, 8), (0, 7))}
    >>> print(concatenate_slices(Call("concatenate_slices", params, ((8, 2), (8, 2)), ((8, 2),), ("f", "f"))))
    a b, a b -> a b; exchange a
    """
    return joined(call, call.params["dimension"], call.params["pieces"])


def join_slices(equations: Iterable[Equation], outputs: Sequence[Value | Constant]) -> list[Equation]:
    """The equations with concatenations of slices as one equation each; slices that nobody else reads are gone."""
    equations = list(equations)
    makers: dict[Any, Equation] = {v: e for e in equations for v in e.outputs}
    joined = {e: new for e in equations if (new := _joined(e, makers)) is not None}
    if not joined:
        return equations
    freed = {makers[v] for e in joined for v in e.inputs if v in makers}
    kept = [joined.get(e, e) for e in equations]
    read = {v for e in kept for v in e.inputs if isinstance(v, Value)} | {v for v in outputs if isinstance(v, Value)}
    return [e for e in kept if e not in freed or any(v in read for v in e.outputs)]


def _joined(e: Equation, makers: dict[Any, Equation]) -> Equation | None:
    if e.name != "concatenate":
        return None
    axis = e.params["dimension"]
    cuts = [_cut_from(v, axis, makers) for v in e.inputs]
    if all(source is v for (source, _), v in zip(cuts, e.inputs, strict=True)):
        return None
    sources, pieces = zip(*cuts, strict=True)
    params = {"dimension": axis, "pieces": tuple(pieces)}
    shapes, dtypes = tuple(x.shape for x in sources), tuple(x.dtype for x in sources)
    call = Call(pieces_p.name, params, shapes, tuple(v.shape for v in e.outputs), dtypes)
    return Equation(pieces_p, params, sources, e.outputs, rule_of(call), e.source_info)


def _cut_from(
    v: Value | Constant, axis: int, makers: dict[Any, Equation]
) -> tuple[Value | Constant, tuple[int, int]]:
    """What a value is cut out of along ``axis``, from where to where; or itself, from end to end."""
    maker = makers.get(v) if isinstance(v, Value) else None
    if maker is not None and maker.name == "split" and maker.params["axis"] == axis:
        starts = list(itertools.accumulate(maker.params["sizes"], initial=0))
        i = maker.outputs.index(v)
        return maker.inputs[0], (starts[i], starts[i + 1])
    if maker is not None and maker.name == "slice" and all(n == 1 for n in maker.params["strides"] or ()):
        source, p = maker.inputs[0], maker.params
        bounds = [(int(a), int(b)) for a, b in zip(p["start_indices"], p["limit_indices"], strict=True)]
        if all(b == (0, n) for d, (b, n) in enumerate(zip(bounds, source.shape, strict=True)) if d != axis):
            return source, bounds[axis]
    return v, (0, v.shape[axis])
