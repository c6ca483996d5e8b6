"""Lets parts of a sum pass more equations, where the user promises that they are finite.

    gshard.jit(f, mesh=mesh, finite=True)                 of a whole program
    gshard.shard(x, P(None, unreduced={"model"}))         of one value, over some axes, and of what is computed from it

Without that a sum of floats is finished before a product (``language.passing``). The rules tell in which operands an
equation is linear besides (``Rule.finite``). Where this is permitted these ways become ways like all others, and a plan
is free to take them or not. From a mark on they are limited to the axes that it names (``Rule.over``), and follow what
is linear in the marked value, also around a loop and out of it, but not into one: what enters a loop or a branch is
finished.
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
from gshard.language.region import with_edges

Axes = frozenset[str]
_Ways = tuple[tuple[Way, Axes | None], ...]
_SUM = "add"


def permitted(block: Block, *, finite: bool) -> Block:
    """The block with the ways in which the user permits parts to pass.

    Args:
        block: of a whole program. Returned unchanged if nothing is permitted.
        finite: whether the user says so of all sums of floats.

    Raises:
        ShardingError: a mark asks for unreduced values of a dtype that cannot be combined so.
    """
    marks = [e for e in block.walk() if e.mark is not None and e.mark.unreduced]
    if not finite and not marks:
        return block
    for e in marks:
        _check_dtype(e)
    reached = {} if finite else _reached(block)
    made: dict[tuple[Rule, _Ways], Rule] = {}

    def changed(e: Equation) -> Equation:
        blocks = tuple(map(changed_block, e.blocks))
        if any(new is not old for new, old in zip(blocks, e.blocks, strict=True)):
            return with_edges(dataclasses.replace(e, blocks=blocks))
        if e.rule is None:
            return e
        ways = (*_of_mark(e), *(((way, None) for way in e.rule.finite) if finite else _from_marks(e, reached)))
        rule = made.setdefault((e.rule, ways), e.rule.permitting(ways)) if ways else e.rule
        return e if rule is e.rule else dataclasses.replace(e, rule=rule)

    def changed_block(block: Block) -> Block:
        equations = tuple(map(changed, block.equations))
        same = all(new is old for new, old in zip(equations, block.equations, strict=True))
        return block if same else Block(block.inputs, equations, block.outputs)

    return changed_block(block)


def permit_from(first: int, equations: list[Equation], target: Any) -> None:
    """Permits it to the equations from a position on, if the partitioned function that they come from was finite."""
    if getattr(target, "finite", False):
        equations[first:] = permitted(Block((), tuple(equations[first:]), ()), finite=True).equations


def _of_mark(e: Equation) -> _Ways:
    """What is unreduced already where a mark asks for it stays so."""
    if e.mark is None or not e.mark.unreduced:
        return ()
    return (((e.mark.monoid, frozenset({0})), frozenset(e.mark.unreduced)),)


def _from_marks(e: Equation, reached: Mapping[Value, Axes]) -> _Ways:
    assert e.rule is not None
    ways = ((way, _axes_of(e, way, reached)) for way in e.rule.finite)
    return tuple((way, axes) for way, axes in ways if axes)


def _axes_of(e: Equation, way: Way, reached: Mapping[Value, Axes]) -> Axes:
    """The axes over which the operands of a way are permitted to be parts."""
    monoid, operands = way
    if monoid != _SUM:
        return frozenset()
    return frozenset[str]().union(*(reached.get(v, ()) for i in operands if isinstance(v := e.inputs[i], Value)))


def _reached(block: Block) -> dict[Value, Axes]:
    """The values that are linear in one that is marked, and the axes that its mark names."""
    reached: dict[Value, Axes] = {}
    equations = tuple(block.walk())
    around = [edge for e in equations for edge in e.edges if edge.outer not in e.inputs]
    news = True

    def note(v: Value, axes: Axes) -> bool:
        have = reached.get(v, frozenset())
        if axes <= have:
            return False
        reached[v] = have | axes
        return True

    while news:
        news = False
        for e in equations:
            if axes := frozenset[str]().union(*_made(e, reached)):
                news |= any([note(v, axes) for v in e.outputs])
        for edge in around:
            news |= note(edge.outer, reached.get(edge.inner, frozenset()))
        news = news and bool(around)
    return reached


def _made(e: Equation, reached: Mapping[Value, Axes]) -> Iterator[Axes]:
    if e.mark is not None:  # another mark starts again
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
