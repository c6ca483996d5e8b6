"""Kinds: classes of values with one shape and equal propagated shardings, so that equal layers have equal choices."""

from __future__ import annotations

from collections.abc import Mapping

from gshard.core.program import Equation, Program, Value, itemsize
from gshard.planning.propagated import Propagated

Kinds = Mapping[Value, int]


def kinds_of(program: Program, propagated: Propagated | None) -> Kinds:
    """A number for each value, the same for those that are alike."""
    numbers: dict[object, int] = {}
    found: dict[Value, int] = {}
    for v in program.block.values():
        key: tuple[object, ...] = v.shape, itemsize(v.dtype)
        if propagated is not None:
            could = propagated.undecided.get(v)
            undecided = None if could is None else tuple(sorted((d, tuple(sorted(own))) for d, own in could.items()))
            moved = propagated.moved.get(v)
            key = *key, propagated.shardings[v], None if moved is None else moved.dims, undecided
        found[v] = numbers.setdefault(key, len(numbers))
    return found


def kinds_at(e: Equation, kinds: Kinds) -> tuple[int, ...]:
    """The kinds of the operands and results of an equation, -1 for constants."""
    return tuple([kinds[v] if isinstance(v, Value) else -1 for v in (*e.inputs, *e.outputs)])
