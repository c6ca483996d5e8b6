"""Finds batch dimensions of primitives without a rule, and proves them by the primitive's vmap rule.

Some dimensions of a primitive P are batch dimensions if P equals the ``vmap`` of P on arrays without these dimensions.
gshard proves this by tracing

    jax.vmap(P on the arrays without the dimensions)(the arrays)

The proof succeeds if the result is exactly one equation, P, with the same operands in the same order, the same
parameters and the same results. Then the dimensions are parallel, and the equation runs on parts of them through
``vmap``, which also handles parameters that contain sizes. gshard replicates every factor of a primitive that has no
vmap rule, has effects, cannot be traced or lowered without the dimensions, or has parameters that cannot be compared.
gshard trusts the vmap rule, as ``jax.vmap`` does.

    f32[8,5,5]      P with the vmap rule "leading dimensions are batches": a b c -> a d e; replicate b c d e
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from gshard.comm.shards import Shards
from gshard.comm.steps import KINDS
from gshard.core.jax_adapter import bind, closed, is_tree_of_operands
from gshard.core.jax_adapter_retracing import as_outside
from gshard.core.rule import Rule, RuleMaker
from gshard.language.call import Call

Shapes = tuple[tuple[int, ...], ...]

# The number of candidate levels tried for one equation. Each needs a trace of about a millisecond.
_MOST_TRIALS = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Level:
    """One batch dimension."""

    # the position of the dimension in each operand, without the dimensions of earlier levels; None for an operand
    # without it
    operands: tuple[int | None, ...]
    results: tuple[int, ...]  # its position in each result, counted in the same way
    size: int  # its size


def batch_rule(call: Call) -> Rule:
    """The default rule of a primitive without a rule: proven batch dimensions are parallel, all others are whole."""
    levels, params = _levels(call)
    make = RuleMaker()
    factors = [make.factor(level.size) for level in levels]
    operands = [_dims(make, s, [level.operands[i] for level in levels], factors) for i, s in enumerate(call.in_shapes)]
    results = [_dims(make, s, [level.results[i] for level in levels], factors) for i, s in enumerate(call.out_shapes)]

    def local(shards: Shards, *arrays: Any) -> list[Any]:
        is_split = any(shards.split.values())
        f = _mapped(call.primitive, params, levels) if is_split else lambda *xs: tuple(shards.bind(*xs))
        return as_outside(f, arrays)

    return make.rule(operands, results, local=local, known=False)


def _dims(
    make: RuleMaker, shape: tuple[int, ...], axes: Sequence[int | None], factors: Sequence[tuple[int, ...]]
) -> list[tuple[int, ...]]:
    """The factors of each dimension of an array: batch dimensions of all levels, and replicated dimensions."""
    remaining = list(range(len(shape)))
    mapped: dict[int, tuple[int, ...]] = {}
    for axis, factor in zip(axes, factors, strict=True):
        if axis is not None:
            mapped[remaining.pop(axis)] = factor
    return [mapped[d] if d in mapped else make.replicate(n) for d, n in enumerate(shape)]


def _levels(call: Call) -> tuple[list[Level], dict[str, Any]]:
    """All proven batch dimensions of an equation, and the parameters of the primitive without them."""
    levels: list[Level] = []
    params = call.params
    if call.primitive is None or call.name in KINDS:  # collectives of a per-device program need no batch dimensions
        return levels, params
    trials = itertools.count()
    shapes = call.in_shapes, call.out_shapes
    while True:
        for level, params_without in _candidates(*shapes, params):
            if next(trials) == _MOST_TRIALS:
                return levels, params
            if _is_proven(call, [*levels, level], params_without):
                levels.append(level)
                params = params_without
                shapes = _without(shapes[0], level.operands), _without(shapes[1], level.results)
                break
        else:
            return levels, params


def _candidates(
    in_shapes: Shapes, out_shapes: Shapes, params: dict[str, Any]
) -> Iterator[tuple[Level, dict[str, Any]]]:
    """Possible batch dimensions, with the parameters without the dimension; levels with most operands come first."""
    for n in dict.fromkeys(n for shape in in_shapes for n in shape if n):
        operand_dims = [[d for d, m in enumerate(shape) if m == n] for shape in in_shapes]
        result_dims = [[d for d, m in enumerate(shape) if m == n] for shape in out_shapes]
        products = itertools.product(*([*dims, None] for dims in operand_dims))
        choices = [
            choice for choice in itertools.islice(products, 4 * _MOST_TRIALS) if any(d is not None for d in choice)
        ]
        for operands in sorted(choices, key=lambda c: (c.count(None), sum(d for d in c if d is not None))):
            first = next(d for d in operands if d is not None)
            for results in itertools.product(*(sorted(dims, key=lambda d: (d != first, d)) for dims in result_dims)):
                level = Level(operands, results, n)
                yield level, params
                shifted = {k: _shifted(k, v, first) for k, v in params.items()}
                if any(shifted[k] is not params[k] for k in params):
                    yield level, shifted


def _shifted(name: str, value: Any, removed: int) -> Any:
    """A parameter without a removed dimension, if the name suggests that it counts dimensions.

    A wrong guess is harmless: the proof fails.
    """
    if not any(word in name for word in ("axis", "axes", "dim")):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return value - 1 if value > removed else value
    if isinstance(value, tuple) and all(isinstance(v, int) for v in value):
        return tuple(v - (v > removed) for v in value)
    return value


def _without(shapes: Shapes, axes: Sequence[int | None]) -> Shapes:
    return tuple(s if axis is None else (*s[:axis], *s[axis + 1 :]) for s, axis in zip(shapes, axes, strict=True))


def _mapped(primitive: Any, params: dict[str, Any], levels: Sequence[Level]) -> Callable[..., tuple[Any, ...]]:
    """The primitive on arrays without the batch dimensions, mapped over all levels."""

    def body(*arrays: Any) -> tuple[Any, ...]:
        return tuple(bind(primitive, params, arrays))

    f: Callable[..., tuple[Any, ...]] = body
    for level in reversed(levels):
        f = jax.vmap(f, in_axes=level.operands, out_axes=level.results)
    return f


def _is_proven(call: Call, levels: Sequence[Level], params: dict[str, Any]) -> bool:
    """Whether the map over these levels is the equation itself."""
    whole = [jax.ShapeDtypeStruct(s, t) for s, t in zip(call.in_shapes, call.in_dtypes, strict=True)]
    shapes_without = call.in_shapes
    for level in levels:
        shapes_without = _without(shapes_without, level.operands)
    smallest = [jax.ShapeDtypeStruct(s, t) for s, t in zip(shapes_without, call.in_dtypes, strict=True)]
    try:
        jaxpr, consts = closed(jax.make_jaxpr(_mapped(call.primitive, params, levels))(*whole))
        body = _mapped(call.primitive, params, ())
        jax.jit(body).lower(*smallest)
    except Exception:  # a primitive may raise anything for arrays of unexpected shapes
        return False
    if len(jaxpr.eqns) != 1 or consts or jaxpr.constvars:
        return False
    (equation,) = jaxpr.eqns
    return (
        equation.primitive is call.primitive
        and not equation.effects
        and _same_variables(equation.invars, jaxpr.invars)
        and _same_variables(equation.outvars, jaxpr.outvars)
        and tuple(tuple(v.aval.shape) for v in equation.outvars) == call.out_shapes
        and same(_without_shardings(equation.params), _without_shardings(call.params))
    )


def _same_variables(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(x is y for x, y in zip(some, others))


def _without_shardings(params: dict[str, Any]) -> dict[str, Any]:
    """The parameters without shardings, which the equations of a program do not have."""
    return {k: v for k, v in params.items() if k not in ("sharding", "out_sharding")}


def same(x: Any, y: Any) -> bool:
    """Whether two parameters are certainly equal; False for values that cannot be compared.

    >>> same((1, "a", np.dtype("f4")), (1, "a", np.dtype("f4"))), same(1, True), same([lambda: 1], [lambda: 1])
    (True, False, False)
    """
    if x is y:
        return True
    if isinstance(x, Jaxpr | ClosedJaxpr) and isinstance(y, Jaxpr | ClosedJaxpr):
        return _same_jaxprs(x, y)
    if type(x) is not type(y):
        return False
    if isinstance(x, tuple | list):
        return len(x) == len(y) and all(map(same, x, y))
    if isinstance(x, dict):
        return list(x) == list(y) and all(same(x[k], y[k]) for k in x)
    if isinstance(x, np.generic | np.ndarray | jax.Array) and not isinstance(x, jax.core.Tracer):
        return _same_arrays(x, y)
    if dataclasses.is_dataclass(x):
        return all(same(getattr(x, f.name), getattr(y, f.name)) for f in dataclasses.fields(x))
    comparable = bool | int | float | complex | str | bytes | np.dtype | jax.core.ShapedArray | jax.tree_util.PyTreeDef
    return (isinstance(x, comparable) or is_tree_of_operands(x)) and bool(x == y)


def _same_arrays(x: Any, y: Any) -> bool:
    """Whether two concrete arrays have the same bits; False for random keys, and for arrays of several processes."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended) or not getattr(x, "is_fully_addressable", True):
        return False
    return (x.shape, x.dtype) == (y.shape, y.dtype) and np.asarray(x).tobytes() == np.asarray(y).tobytes()


def _same_jaxprs(x: Any, y: Any) -> bool:
    """Whether two jaxprs are equal up to the names of variables."""
    x, consts_x = closed(x)
    y, consts_y = closed(y)
    if not same(list(consts_x), list(consts_y)) or x.effects or y.effects:
        return False
    matching: dict[Any, Any] = {}  # the variable of y for each variable of x

    def match(vs: Sequence[Any], ws: Sequence[Any]) -> bool:
        """Matches new variables, and returns whether their types are equal."""
        matching.update(zip(vs, ws))
        return len(vs) == len(ws) and all(v.aval == w.aval for v, w in zip(vs, ws))

    def same_operand(v: Any, w: Any) -> bool:
        if not isinstance(v, Literal):
            return matching[v] is w
        return isinstance(w, Literal) and v.aval == w.aval and same(np.asarray(v.val)[()], np.asarray(w.val)[()])

    def same_operands(vs: Sequence[Any], ws: Sequence[Any]) -> bool:
        return len(vs) == len(ws) and all(map(same_operand, vs, ws))

    if not match((*x.constvars, *x.invars), (*y.constvars, *y.invars)) or len(x.eqns) != len(y.eqns):
        return False
    for e, f in zip(x.eqns, y.eqns):
        if e.primitive is not f.primitive or not same_operands(e.invars, f.invars):
            return False
        if not same(dict(e.params), dict(f.params)) or not match(e.outvars, f.outvars):
            return False
    return same_operands(x.outvars, y.outvars)
