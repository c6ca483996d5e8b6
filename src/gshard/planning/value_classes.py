"""Numbers values of one shape with equal propagated shardings alike, so that equal layers get equal choices."""

from __future__ import annotations

from collections.abc import Mapping

from gshard.core.program import Equation, Program, Value, itemsize
from gshard.planning.propagated import Propagated

Kinds = Mapping[Value, int]


def kinds_of(program: Program, propagated: Propagated | None) -> Kinds:
    """A number for each value; equal for values with the same shape, item size and propagation result."""
    numbers: dict[object, int] = {}
    kinds: dict[Value, int] = {}
    for v in program.block.values():
        key: tuple[object, ...] = v.shape, itemsize(v.dtype)
        if propagated is not None:
            open_atoms = propagated.undecided.get(v)
            undecided = (
                None
                if open_atoms is None
                else tuple(sorted((d, tuple(sorted(atoms))) for d, atoms in open_atoms.items()))
            )
            moved = propagated.moved.get(v)
            key = *key, propagated.shardings[v], None if moved is None else moved.dims, undecided
        kinds[v] = numbers.setdefault(key, len(numbers))
    return kinds


def kinds_at(e: Equation, kinds: Kinds) -> tuple[int, ...]:
    """The kinds of the operands and results of an equation, -1 for constants."""
    return tuple([kinds[v] if isinstance(v, Value) else -1 for v in (*e.inputs, *e.outputs)])
