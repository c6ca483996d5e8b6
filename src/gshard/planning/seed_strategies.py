"""Suggested: shardings over parts of axes, and splits, that follow from propagated shardings."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterator, Sequence

from gshard.core.mark import Demand
from gshard.core.mesh import Atoms, Mesh
from gshard.core.program import Equation, Value
from gshard.core.rule import Rule
from gshard.core.sharding import Sharding
from gshard.core.split import Split, operand_sharding, result_sharding
from gshard.planning.candidates import Arrays, arrays_of, candidates, key_of, led
from gshard.planning.propagated import Propagated
from gshard.planning.reshard_costs import is_made_of
from gshard.planning.strategies import Component, places_of, shardings, share, splits
from gshard.planning.value_classes import Kinds, kinds_at


def arrays_as(e: Equation, propagated: Propagated) -> tuple[Arrays, ...]:
    """The operands and results of an equation as they are sharded; and as they could be, if that is otherwise."""
    known = arrays_of(e, propagated.shardings)
    supposed = arrays_of(e, propagated.supposed) if propagated.moved else known
    return (known,) if supposed == known else (known, supposed)


def in_parts(
    propagated: Propagated, kinds: Kinds, tied: Collection[Equation], axes: Sequence[Atoms], *, whole: bool
) -> dict[Value, dict[Sharding, None]]:
    """Shardings, over parts of axes, in which equations make or take a value where it is sharded as propagation says.

    Args:
        propagated: what follows from the marks.
        kinds: of the values, by that.
        tied: equations that have no choice of their own.
        axes: those that move as wholes.
        whole: also over whole axes, where not all of these are compared (``planning.nearby``).
    """
    found: dict[Value, dict[Sharding, None]] = {}
    known: dict[object, list[tuple[int, Sharding]]] = {}
    for e in propagated.program.block.walk():
        if e.rule is None or not e.rule.is_free or e in tied:
            continue
        key = e.rule, kinds_at(e, kinds)
        if key not in known:
            arrays, mesh = arrays_as(e, propagated), propagated.mesh
            known[key] = [found for own in arrays for found in _of_rule(e.rule, own, mesh, axes, whole)]
        values = (*e.inputs, *e.outputs) if known[key] else ()
        for i, sharding in known[key]:
            if isinstance(v := values[i], Value):
                found.setdefault(v, {})[sharding] = None
    return found


def _of_rule(
    rule: Rule, arrays: Arrays, mesh: Mesh, axes: Sequence[Atoms], whole: bool
) -> Iterator[tuple[int, Sharding]]:
    for split in candidates(rule, arrays, mesh):
        if whole or any(not is_made_of(atoms, axes) for atoms in split.values()):
            yield from enumerate(met_in(rule, (split,)))


def shardings_as(
    group: Sequence[Value],
    propagated: Propagated | None,
    mesh: Mesh,
    axes: tuple[Atoms, ...],
    monoids: Sequence[str] = (),
    *,
    even: bool = False,
    changes: int | None = None,
) -> tuple[Sharding, ...]:
    """The shardings over whole axes of values that are sharded alike, as they are worth considering by propagation.

    With ``changes``, at most so many axes are elsewhere than it says.
    """
    v, also, near = group[0], frozenset[tuple[int, Atoms]](), None
    if propagated is not None and not even:
        cut = enumerate(zip(v.shape, propagated.shardings[v].dims, strict=True))
        also = frozenset((d, own) for d, (n, own) in cut if n % mesh.count(own))
    if propagated is not None and changes is not None:
        near = tuple(dict.fromkeys(propagated.shardings[u] for u in group))
    find = functools.partial(shardings, v.shape, mesh, axes, even=even, also=also, near=near, changes=changes or 0)
    found = [find(unreduced=m) for m in monoids or ("",)]
    return found[0] if len(found) == 1 else tuple(dict.fromkeys(s for some in found for s in some))


def as_demanded(found: Sequence[Sharding], said: Sequence[Demand], barred: frozenset[str]) -> tuple[Sharding, ...]:
    """Those of some shardings that are as marks ask, and over no barred atoms; what marks ask if none is."""
    found = [s for s in found if barred.isdisjoint(s.atoms)] if barred else found
    for demand in said:
        found = [*filter(demand.allows, found)] or [demand.sharding]  # it names parts of axes, or axes in another order
    return tuple(found)


def met_in(rule: Rule, ways: Sequence[Split]) -> Iterator[Sharding]:
    """How operands and results are sharded where an equation is split so."""
    for split in ways:
        yield from (operand_sharding(rule, i, split) for i in range(len(rule.operands)))
        yield from (result_sharding(rule, i, split) for i in range(len(rule.results)))


def ways_as(
    rule: Rule,
    component: Component,
    passing: frozenset[int],
    arrays: Sequence[Arrays],
    mesh: Mesh,
    axes: tuple[Atoms, ...],
    barred: frozenset[str] = frozenset(),
    pinned: Split | None = None,
    changes: int | None = None,
) -> tuple[tuple[Split, ...], float]:
    """The splits of a component of an equation over whole axes and those that its arrays suggest; what is asked for.

    The latter is the largest share of its work that a device has as the marks ask (``_asked``); ``inf`` if they do not.

    Args:
        rule, component: which.
        passing: the ways in which parts still to be combined may pass.
        arrays: its operands and results.
        mesh: the devices.
        axes: those that move as wholes.
        barred: atoms over which it cannot be split, since they are manual there; no axes either.
        pinned: factors that are split over these all the same, in every way.
        changes: how many axes may be elsewhere than the arrays suggest first; None if all may.
    """
    if rule.manual is not None:
        return splits(rule, component, mesh, axes, passing, pinned=tuple((pinned or {}).items())), math.inf
    near = [s for own in arrays for s in candidates(rule, own, mesh)] if rule.fixed is None else []
    near = [s for s in near if barred.isdisjoint(a for atoms in s.values() for a in atoms)] if barred else near
    suggested = tuple({f: a for f, a in s.items() if f in component.factors} for s in near)
    cuts = ((f, a, rule.factors[f].size) for s in suggested for f, a in s.items() if f >= 0)
    uneven = frozenset((f, a) for f, a, n in cuts if n % mesh.count(a))
    expected = None
    if arrays and changes is not None:
        first = (candidates(rule, own, mesh)[0] for own in arrays)
        own_factors = ({f: atoms for f, atoms in split.items() if f in component.factors} for split in first)
        expected = tuple(dict.fromkeys(places_of(split, axes) for split in own_factors))
    found = splits(rule, component, mesh, axes, passing, uneven, expected, changes or 0)
    known = {key_of(split) for split in found}
    new = {key_of(s): s for s in suggested if all(f >= 0 or f in passing for f, a in s.items() if a)}
    stays = [s for own in arrays for s in led(rule, own, mesh)] if suggested else []
    return found + tuple(s for own, s in new.items() if own not in known), _asked(rule, suggested, stays, mesh)


def _asked(rule: Rule, suggested: Sequence[Split], stays: Sequence[Split], mesh: Mesh) -> float:
    """The largest share of an equation's work that a device has as the marks ask.

    It is that of the suggested splits with most parts. Those of a dimension smaller than the mesh are unequal: most
    devices have one element or none. Where arrays that stay as they are sharded lead to unequal parts, these are what
    is asked for, although another dimension could be cut in equal ones: to cut that one is not worth any price.
    """
    if not suggested:
        return math.inf
    most = max(_parts(split, mesh) for split in suggested)
    unequal = [share(rule, split, mesh) for split in stays if _parts(split, mesh) == most]
    return max(unequal, default=min(share(rule, split, mesh) for split in suggested))


def _parts(split: Split, mesh: Mesh) -> int:
    return math.prod(mesh.count(atoms) for f, atoms in split.items() if f >= 0)
