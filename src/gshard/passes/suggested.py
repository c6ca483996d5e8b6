"""Suggested: shardings over parts of axes, and splits, of which the facts make some worth while."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from gshard.core.mesh import Atoms, Mesh
from gshard.core.program import Equation, Value
from gshard.core.rule import Rule
from gshard.core.sharding import Sharding
from gshard.core.split import Split, operand_sharding, result_sharding
from gshard.passes.candidates import Arrays, arrays_of, candidates
from gshard.passes.facts import Facts
from gshard.passes.kinds import Kinds, kinds_at
from gshard.passes.moves import is_made_of
from gshard.passes.ways import Component, splits


def arrays_as(e: Equation, facts: Facts) -> tuple[Arrays, ...]:
    """The operands and results of an equation as they are sharded; and as they could be, if that is otherwise."""
    known = arrays_of(e, facts.shardings)
    supposed = arrays_of(e, facts.supposed) if facts.moved else known
    return (known,) if supposed == known else (known, supposed)


def in_parts(
    facts: Facts, kinds: Kinds, tied: Collection[Equation], axes: Sequence[Atoms]
) -> dict[Value, dict[Sharding, None]]:
    """Shardings, over parts of axes, in which equations make or take a value where it is sharded as the facts say.

    Args:
        facts: what follows from the marks.
        kinds: of the values, by that.
        tied: equations that have no choice of their own.
        axes: those that move as wholes.
    """
    found: dict[Value, dict[Sharding, None]] = {}
    known: dict[object, list[tuple[int, Sharding]]] = {}
    for e in facts.program.block.walk():
        if e.rule is None or e.rule.fixed is not None or e in tied:
            continue
        key = e.rule, kinds_at(e, kinds)
        if key not in known:
            known[key] = [found for own in arrays_as(e, facts) for found in _of_rule(e.rule, own, facts.mesh, axes)]
        values = (*e.inputs, *e.outputs) if known[key] else ()
        for i, sharding in known[key]:
            if isinstance(v := values[i], Value):
                found.setdefault(v, {})[sharding] = None
    return found


def _of_rule(rule: Rule, arrays: Arrays, mesh: Mesh, axes: Sequence[Atoms]) -> Iterator[tuple[int, Sharding]]:
    for split in candidates(rule, arrays, mesh):
        if any(not is_made_of(atoms, axes) for atoms in split.values()):
            operands = [operand_sharding(rule, i, split) for i in range(len(rule.operands))]
            results = [result_sharding(rule, i, split) for i in range(len(rule.results))]
            yield from enumerate((*operands, *results))


def ways_as(
    rule: Rule,
    component: Component,
    passing: frozenset[int],
    arrays: Sequence[Arrays],
    mesh: Mesh,
    axes: tuple[Atoms, ...],
) -> tuple[tuple[Split, ...], tuple[Split, ...]]:
    """The splits of a component of an equation over whole axes and those that its arrays suggest; the latter alone."""
    near = [s for own in arrays for s in candidates(rule, own, mesh)] if rule.fixed is None else []
    suggested = tuple({f: a for f, a in s.items() if f in component.factors} for s in near)
    cuts = ((f, a, rule.factors[f].size) for s in suggested for f, a in s.items() if f >= 0)
    uneven = frozenset((f, a) for f, a, n in cuts if n % mesh.count(a))
    found = splits(rule, component, mesh, axes, passing, uneven)
    known = {_key(split) for split in found}
    new = {_key(s): s for s in suggested if all(f >= 0 or f in passing for f, a in s.items() if a)}
    return found + tuple(s for own, s in new.items() if own not in known), suggested


def _key(split: Split) -> tuple[tuple[int, Atoms], ...]:
    return tuple(sorted((f, atoms) for f, atoms in split.items() if atoms))
