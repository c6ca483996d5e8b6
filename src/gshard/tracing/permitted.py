"""Permits parts of a sum to pass more equations, if the user states that they are finite.

    gshard.jit(f, mesh=mesh, finite=True)                 for a whole program
    gshard.shard(x, P(None, unreduced={"model"}))         for a value, over some axes, and for values computed from it

Without this statement gshard reduces a sum of floats before a product (``language.traits``). ``Rule.finite`` lists the
further ways in which an equation is linear. If they are permitted, they are added to ``Rule.linear``, and a plan may
use them. From a mark on they are limited to the axes of the mark (``Rule.over``). They apply to all values that are
linear in the marked value, also across the iterations of a loop and after the loop. They do not apply inside a loop or
a branch to values from outside, which gshard reduces before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gshard.core.errors import ShardingError
from gshard.core.program import Block, Equation, Value
from gshard.core.rule import Rule, Way
from gshard.rewrite.equation_graph import with_others

Axes = frozenset[str]
_Ways = tuple[tuple[Way, Axes | None], ...]
_SUM = "add"


def permitted(block: Block, *, finite: bool) -> Block:
    """The block with rules that contain the permitted ways."""
    marks = [e for e in block.walk() if e.mark is not None and e.mark.unreduced]
    if not finite and not marks:
        return block
    for e in marks:
        _check_dtype(e)
    reached = {} if finite else _reached(block)
    rules: dict[tuple[Rule, _Ways], Rule] = {}  # equal rules stay one object

    def changed(e: Equation) -> tuple[Equation] | None:
        if e.rule is None:
            return None
        ways = tuple((way, None if finite else _axes_of(e, way, reached)) for way in e.rule.finite)
        ways = (*_of_mark(e), *(pair for pair in ways if pair[1] != frozenset()))
        rule = rules.setdefault((e.rule, ways), e.rule.permitting(ways)) if ways else e.rule
        return None if rule is e.rule else (dataclasses.replace(e, rule=rule),)

    return with_others(block, changed)


def permit_from(first: int, equations: list[Equation], target: Any) -> None:
    """Permits all ways for the equations from position ``first`` on, if the function has ``finite=True``."""
    if getattr(target, "finite", False):
        equations[first:] = permitted(Block((), tuple(equations[first:]), ()), finite=True).equations


def _of_mark(e: Equation) -> _Ways:
    """The way of a mark that requires unreduced values: a value that is already unreduced may pass it."""
    if e.mark is None or not e.mark.unreduced:
        return ()
    return (((e.mark.monoid, frozenset({0})), frozenset(e.mark.unreduced)),)


def _axes_of(e: Equation, way: Way, reached: Mapping[Value, Axes]) -> Axes:
    """The axes over which the operands of a way may be unreduced."""
    monoid, operands = way
    if monoid != _SUM:
        return frozenset()
    return frozenset[str]().union(*(reached.get(v, ()) for i in operands if isinstance(v := e.inputs[i], Value)))


def _reached(block: Block) -> dict[Value, Axes]:
    """The values that are linear in a marked value, each with the axes of the mark."""
    reached: dict[Value, Axes] = {}
    equations = tuple(block.walk())
    edges_out = [edge for e in equations for edge in e.edges if edge.outer not in e.inputs]
    changed = True

    def add(v: Value, axes: Axes) -> bool:
        """Adds axes of a value; returns whether any is new."""
        axes_before = reached.get(v, frozenset())
        if axes <= axes_before:
            return False
        reached[v] = axes_before | axes
        return True

    while changed:
        changed = False
        for e in equations:
            if axes := frozenset[str]().union(*_axes_of_results(e, reached)):
                changed |= any([add(v, axes) for v in e.outputs])
        for edge in edges_out:
            changed |= add(edge.outer, reached.get(edge.inner, frozenset()))
        changed = changed and bool(edges_out)
    return reached


def _axes_of_results(e: Equation, reached: Mapping[Value, Axes]) -> Iterator[Axes]:
    if e.mark is not None:  # only the axes of this mark apply after it
        yield frozenset(e.mark.unreduced if e.mark.monoid == _SUM else ())
    elif e.rule is not None:
        yield from (_axes_of(e, way, reached) for way in (*e.rule.linear, *e.rule.finite))


_DTYPES: Mapping[str, tuple[Sequence[Any], str]] = {
    _SUM: ((jnp.number,), "numbers are added up"),
    "max": ((jnp.floating, jnp.integer), "real numbers have a largest"),
    "min": ((jnp.floating, jnp.integer), "real numbers have a smallest"),
}


def _check_dtype(e: Equation) -> None:
    mark, (value,) = e.mark, e.outputs
    assert mark is not None
    kinds, why = _DTYPES[mark.monoid]
    if not any(jax.dtypes.issubdtype(value.dtype, kind) for kind in kinds):
        raise ShardingError(
            f"an array of {value.dtype_name} cannot be unreduced: {why}.",
            e.line,
            f"{value.dtype_name}[{','.join(map(str, value.shape))}], {mark}",
            "Leave unreduced= out of the mark.",
        )
