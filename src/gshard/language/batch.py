"""Finds batch dimensions of primitives without a rule, and proves them by their own vmap rule.

A primitive P on whole arrays is a map over some of their dimensions if it is the ``vmap`` of itself on arrays without
them. What ``vmap`` of an equation is, JAX writes down; so the claim is proven where tracing

    jax.vmap(P on the arrays without the dimensions)(the arrays)

gives exactly one equation, P, with the same operands in the same order, the same parameters and the same results. Then
those dimensions are parallel, and ``vmap`` is also how the equation runs on parts of them: parameters that hold sizes
need no thought. Nothing is guessed: a P that cannot be traced, or lowered, without the dimensions, that has no vmap
rule, has effects, or whose parameters cannot be compared, is replicated in every factor. (A vmap rule that is wrong is
believed, here as by ``jax.vmap``.)

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

from gshard.comm.collectives import KINDS
from gshard.comm.shards import Shards
from gshard.core.jax_adapter import as_outside, bind, closed
from gshard.core.rule import Rule, RuleMaker
from gshard.language.call import Call

Shapes = tuple[tuple[int, ...], ...]

# So many claims are tried for one equation; each costs a trace of it, about a millisecond.
_MOST_TRIALS = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Level:
    """One dimension mapped over: where operands (None: not) and results have it, those of earlier levels taken away."""

    operands: tuple[int | None, ...]
    results: tuple[int, ...]
    size: int


def batch_rule(call: Call) -> Rule:
    """The rule made up for a primitive without one: proven batch dimensions are parallel, all others whole."""
    levels, params = _levels(call)
    make = RuleMaker()
    factors = [make.factor(level.size) for level in levels]
    operands = [_dims(make, s, [level.operands[i] for level in levels], factors) for i, s in enumerate(call.in_shapes)]
    results = [_dims(make, s, [level.results[i] for level in levels], factors) for i, s in enumerate(call.out_shapes)]

    def local(shards: Shards, *arrays: Any) -> list[Any]:
        cut = any(shards.split.values())
        f = _mapped(call.primitive, params, levels) if cut else lambda *xs: tuple(shards.bind(*xs))
        return as_outside(f, arrays)

    return make.rule(operands, results, local=local, known=False)


def _dims(
    make: RuleMaker, shape: tuple[int, ...], axes: Sequence[int | None], factors: Sequence[tuple[int, ...]]
) -> list[tuple[int, ...]]:
    """The dimensions of one array: the mapped ones, level by level, and what is left of it."""
    left = list(range(len(shape)))
    mapped: dict[int, tuple[int, ...]] = {}
    for axis, factor in zip(axes, factors, strict=True):
        if axis is not None:
            mapped[left.pop(axis)] = factor
    return [mapped[d] if d in mapped else make.replicate(n) for d, n in enumerate(shape)]


def _levels(call: Call) -> tuple[list[Level], dict[str, Any]]:
    """All dimensions that the equation is proven to be a map over, and the parameters of the map's body."""
    levels: list[Level] = []
    params = call.params
    if call.primitive is None or call.name in KINDS:  # not needed for a collective of a per-device program
        return levels, params
    trials = itertools.count()
    shapes = call.in_shapes, call.out_shapes
    while True:
        for level, changed in _claims(*shapes, params):
            if next(trials) == _MOST_TRIALS:
                return levels, params
            if _proven(call, [*levels, level], changed):
                levels.append(level)
                params = changed
                shapes = _without(shapes[0], level.operands), _without(shapes[1], level.results)
                break
        else:
            return levels, params


def _claims(in_shapes: Shapes, out_shapes: Shapes, params: dict[str, Any]) -> Iterator[tuple[Level, dict[str, Any]]]:
    """Dimensions of one size that arrays might be mapped over, with the body's parameters: most operands first."""
    for n in dict.fromkeys(n for shape in in_shapes for n in shape if n):
        places = [[d for d, m in enumerate(shape) if m == n] for shape in in_shapes]
        made = [[d for d, m in enumerate(shape) if m == n] for shape in out_shapes]
        choices = itertools.islice(itertools.product(*([*ds, None] for ds in places)), 4 * _MOST_TRIALS)
        claims = [c for c in choices if any(d is not None for d in c)]
        for operands in sorted(claims, key=lambda c: (c.count(None), sum(d for d in c if d is not None))):
            first = next(d for d in operands if d is not None)
            for results in itertools.product(*(sorted(ds, key=lambda d: (d != first, d)) for ds in made)):
                level = Level(operands, results, n)
                yield level, params
                shifted = {k: _shifted(k, v, first) for k, v in params.items()}
                if any(shifted[k] is not params[k] for k in params):
                    yield level, shifted


def _shifted(name: str, value: Any, removed: int) -> Any:
    """A parameter that counts dimensions, for arrays without one of them; a wrong guess only proves nothing."""
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
    """The primitive on the smallest arrays, mapped over every level."""

    def body(*arrays: Any) -> tuple[Any, ...]:
        return tuple(bind(primitive, params, arrays))

    f: Callable[..., tuple[Any, ...]] = body
    for level in reversed(levels):
        f = jax.vmap(f, in_axes=level.operands, out_axes=level.results)
    return f


def _proven(call: Call, levels: Sequence[Level], params: dict[str, Any]) -> bool:
    """Whether the map over these levels is the equation itself."""
    whole = [jax.ShapeDtypeStruct(s, t) for s, t in zip(call.in_shapes, call.in_dtypes, strict=True)]
    smallest = call.in_shapes
    for level in levels:
        smallest = _without(smallest, level.operands)
    try:
        made, consts = closed(jax.make_jaxpr(_mapped(call.primitive, params, levels))(*whole))
        body = _mapped(call.primitive, params, ())
        jax.jit(body).lower(*(jax.ShapeDtypeStruct(s, t) for s, t in zip(smallest, call.in_dtypes, strict=True)))
    except Exception:  # whatever a primitive says to arrays it was not made for, it is no proof
        return False
    if len(made.eqns) != 1 or consts or made.constvars:
        return False
    (equation,) = made.eqns
    return (
        equation.primitive is call.primitive
        and not equation.effects
        and _same_variables(equation.invars, made.invars)
        and _same_variables(equation.outvars, made.outvars)
        and tuple(tuple(v.aval.shape) for v in equation.outvars) == call.out_shapes
        and same(_told(equation.params), _told(call.params))
    )


def _same_variables(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(x is y for x, y in zip(some, others))


def _told(params: dict[str, Any]) -> dict[str, Any]:
    """Parameters without the shardings in which JAX saw arrays: an equation of a program has none of that left."""
    return {k: v for k, v in params.items() if k not in ("sharding", "out_sharding")}


def same(x: Any, y: Any) -> bool:
    """Whether two parameters are certainly the same; False for what cannot be compared.

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
    if isinstance(x, np.generic):
        return x.dtype == y.dtype and x.tobytes() == y.tobytes()
    if dataclasses.is_dataclass(x):
        return all(same(getattr(x, f.name), getattr(y, f.name)) for f in dataclasses.fields(x))
    plain = bool | int | float | complex | str | bytes | np.dtype | jax.core.ShapedArray | jax.tree_util.PyTreeDef
    return isinstance(x, plain) and bool(x == y)


def _same_jaxprs(x: Any, y: Any) -> bool:
    """Whether two jaxprs are the same equations on the same variables, by whatever names."""
    (x, some), (y, others) = closed(x), closed(y)
    if not _same_variables(some, others) or x.effects or y.effects:
        return False
    names: dict[Any, Any] = {}

    def meet(vs: Sequence[Any], ws: Sequence[Any]) -> bool:
        names.update(zip(vs, ws))
        return len(vs) == len(ws) and all(v.aval == w.aval for v, w in zip(vs, ws))

    def read(vs: Sequence[Any], ws: Sequence[Any]) -> bool:
        return len(vs) == len(ws) and all(
            isinstance(w, Literal) and v.aval == w.aval and same(np.asarray(v.val)[()], np.asarray(w.val)[()])
            if isinstance(v, Literal)
            else names[v] is w
            for v, w in zip(vs, ws)
        )

    if not meet((*x.constvars, *x.invars), (*y.constvars, *y.invars)) or len(x.eqns) != len(y.eqns):
        return False
    for e, f in zip(x.eqns, y.eqns):
        alike = e.primitive is f.primitive and read(e.invars, f.invars) and same(dict(e.params), dict(f.params))
        if not alike or not meet(e.outvars, f.outvars):
            return False
    return read(x.outvars, y.outvars)
