"""Derives the shardings and splits that propagated shardings suggest, over whole axes and over parts of axes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator, Sequence

from gshard.core.mark import Demand
from gshard.core.mesh import Atoms, Mesh
from gshard.core.planning_tables import tabulated
from gshard.core.program import Equation, Value
from gshard.core.rule import Rule
from gshard.core.sharding import Sharding
from gshard.core.split import Split, operand_sharding, result_sharding
from gshard.planning.candidates import Arrays, arrays_of, candidates, key_of, led
from gshard.planning.nearby import Runs
from gshard.planning.propagated import Propagated
from gshard.planning.reshard_costs import is_made_of
from gshard.planning.strategies import Component, Places, places_of, shardings, share, splits
from gshard.planning.value_classes import Kinds, kinds_at


def propagated_arrays(e: Equation, propagated: Propagated, axes: tuple[Atoms, ...]) -> tuple[Arrays, ...]:
    """The operands and results of an equation: with propagated shardings, then ``supposed`` and ``opened`` ones."""
    values = {v for v in (*e.inputs, *e.outputs) if isinstance(v, Value)}
    found = [arrays_of(e, propagated.shardings)]
    if not values.isdisjoint(propagated.moved):
        found.append(arrays_of(e, propagated.supposed))
    if not values.isdisjoint(propagated.undecided):
        found.append(arrays_of(e, {v: opened(v, propagated, axes) for v in values}))
    return tuple(dict.fromkeys(found))


def opened(v: Value, propagated: Propagated, axes: tuple[Atoms, ...]) -> Sharding:
    """The sharding of a value with every atom that its dimensions could get where arrays disagree, if parts are equal.

    Otherwise a disagreement would make devices along an axis repeat the work.
    """
    sharding, could = propagated.shardings[v], propagated.could(v)
    dims, used = list(sharding.dims), set(sharding.atoms)
    for d, open_atoms in sorted(could.items()):
        more = tuple(a for axis in axes for a in axis if a in open_atoms - used)
        if v.shape[d] % propagated.mesh.count((*dims[d], *more)) == 0:
            dims[d] += more
            used.update(more)
    return Sharding(tuple(dims), sharding.unreduced)


def suggested_shardings(
    propagated: Propagated, kinds: Kinds, tied: Collection[Equation], axes: tuple[Atoms, ...], *, whole_axes: bool
) -> dict[Value, dict[Sharding, None]]:
    """Shardings over parts of axes in which equations read or make a value that is sharded as propagation found."""
    suggested: dict[Value, dict[Sharding, None]] = {}
    by_key: dict[object, list[tuple[int, Sharding]]] = {}
    for e in propagated.program.block.walk():
        if e.rule is None or not e.rule.is_free or e in tied:
            continue
        key = e.rule, kinds_at(e, kinds)
        if key not in by_key:
            by_key[key] = [
                found
                for arrays in propagated_arrays(e, propagated, axes)
                for found in _suggested_by(e.rule, arrays, propagated.mesh, axes, whole_axes)
            ]
        values = (*e.inputs, *e.outputs) if by_key[key] else ()
        for i, sharding in by_key[key]:
            if isinstance(v := values[i], Value):
                suggested.setdefault(v, {})[sharding] = None
    return suggested


@tabulated(16384)
def _suggested_by(
    rule: Rule, arrays: Arrays, mesh: Mesh, axes: tuple[Atoms, ...], whole_axes: bool
) -> tuple[tuple[int, Sharding], ...]:
    found: list[tuple[int, Sharding]] = []
    for split in candidates(rule, arrays, mesh):
        if whole_axes or any(not is_made_of(atoms, axes) for atoms in split.values()):
            read = (operand_sharding(rule, i, split) for i in range(len(rule.operands)))
            found += enumerate((*read, *(result_sharding(rule, i, split) for i in range(len(rule.results)))))
    return tuple(found)


def group_shardings(
    group: Sequence[Value],
    propagated: Propagated | None,
    mesh: Mesh,
    axes: tuple[Atoms, ...],
    monoids: Sequence[str] = (),
    *,
    even: bool = False,
    near: tuple[Sharding, ...] = (),
    runs: Runs | None = None,
) -> tuple[Sharding, ...]:
    """The shardings over whole axes to compare for values that have one sharding.

    With ``runs``, these are near the shardings ``near``, by default the propagated ones (``strategies.places_for``).
    """
    v = group[0]
    uneven_cuts: frozenset[tuple[int, Atoms]] = frozenset()
    if propagated is not None and not even:
        dims = enumerate(zip(v.shape, propagated.shardings[v].dims, strict=True))
        uneven_cuts = frozenset((d, atoms) for d, (n, atoms) in dims if n % mesh.count(atoms))
    if not near and propagated is not None and runs is not None:
        near = tuple(dict.fromkeys(propagated.shardings[u] for u in group))
    find = functools.partial(shardings, v.shape, mesh, axes, even=even, also=uneven_cuts, near=near, runs=runs)
    by_monoid = [find(unreduced=monoid) for monoid in monoids or ("",)]
    if len(by_monoid) == 1:
        return by_monoid[0]
    return tuple(dict.fromkeys(s for found in by_monoid for s in found))


def allowed_by_marks(
    shardings: Sequence[Sharding], demands: Sequence[Demand], barred: frozenset[str]
) -> tuple[Sharding, ...]:
    """The shardings that all demands allow and that use no barred atoms; if none is left, those of the demands."""
    allowed = [s for s in shardings if barred.isdisjoint(s.atoms)]
    for demand in demands:
        # A mark may name parts of axes, or axes in another order: then no sharding over whole axes fits.
        allowed = [*filter(demand.allows, allowed)] or [demand.sharding]
    return tuple(allowed)


def array_shardings(rule: Rule, splits: Sequence[Split]) -> Iterator[tuple[Sharding, ...]]:
    """For each operand and result of an equation, its sharding under each split."""
    yield from (operand_shardings(rule, i, splits) for i in range(len(rule.operands)))
    yield from (result_shardings(rule, i, splits) for i in range(len(rule.results)))


def operand_shardings(rule: Rule, i: int, splits: Sequence[Split]) -> tuple[Sharding, ...]:
    """The shardings in which an equation reads an operand under each split. All objectives share them."""
    return _under_splits(operand_sharding, rule, i, splits)


def result_shardings(rule: Rule, i: int, splits: Sequence[Split]) -> tuple[Sharding, ...]:
    """The shardings in which an equation makes a result under each split. All objectives share them."""
    return _under_splits(result_sharding, rule, i, splits)


def _under_splits(
    sharding_of: Callable[[Rule, int, Split], Sharding], rule: Rule, i: int, splits: Sequence[Split]
) -> tuple[Sharding, ...]:
    known, key = _known_shardings(), (sharding_of, rule, i, id(splits))
    if key not in known:
        known[key] = splits, tuple(sharding_of(rule, i, split) for split in splits)
    return known[key][1]


@tabulated(1)
def _known_shardings() -> dict[object, tuple[Sequence[Split], tuple[Sharding, ...]]]:
    """The results of ``_under_splits``. Each list of splits keeps its identity, which is in its key, valid."""
    return {}


@tabulated(16384)
def component_splits(
    rule: Rule,
    component: Component,
    passing: frozenset[int],
    arrays: tuple[Arrays, ...],
    mesh: Mesh,
    axes: tuple[Atoms, ...],
    barred: frozenset[str] = frozenset(),
    pinned: tuple[tuple[int, Atoms], ...] = (),
    near_split: tuple[tuple[int, Atoms], ...] | None = None,
    runs: Runs | None = None,
) -> tuple[tuple[Split, ...], float]:
    """The splits of a component of an equation: over whole axes, and those that its arrays suggest."""
    if rule.manual is not None:
        return splits(rule, component, mesh, axes, passing, pinned=pinned), math.inf
    near = [split for known in arrays for split in candidates(rule, known, mesh)] if rule.fixed is None else []
    if barred:
        near = [split for split in near if barred.isdisjoint(a for atoms in split.values() for a in atoms)]
    suggested = tuple(_of_component(split, component) for split in near)
    if near_split is not None:
        suggested = (dict(near_split),)
    cuts = ((f, atoms) for split in suggested for f, atoms in split.items() if f >= 0)
    uneven = frozenset((f, atoms) for f, atoms in cuts if rule.factors[f].size % mesh.count(atoms))
    expected: tuple[Places, ...] = ()
    if near_split is not None:
        expected = (places_of(dict(near_split), axes),)
    elif arrays and runs is not None:
        first = (_of_component(candidates(rule, known, mesh)[0], component) for known in arrays)
        expected = tuple(dict.fromkeys(places_of(split, axes) for split in first))
    over_axes = splits(rule, component, mesh, axes, passing, uneven, expected, runs)
    known_keys = {key_of(split) for split in over_axes}
    possible = (split for split in suggested if all(f >= 0 or f in passing for f, atoms in split.items() if atoms))
    more = {key_of(split): split for split in possible}
    unmoved = [split for known in arrays for split in led(rule, known, mesh)] if suggested else []
    found = over_axes + tuple(split for key, split in more.items() if key not in known_keys)
    return found, _marked_share(rule, suggested, unmoved, mesh) if near_split is None else math.inf


def _of_component(split: Split, component: Component) -> Split:
    """The part of a split that concerns a component."""
    return {f: atoms for f, atoms in split.items() if f in component.factors}


def _marked_share(rule: Rule, suggested: Sequence[Split], unmoved: Sequence[Split], mesh: Mesh) -> float:
    """The largest share of an equation's work that a device has under the marks.

    It is the share of the suggested splits with the most parts. Parts of a dimension smaller than the mesh are unequal:
    most devices have one element or none. If arrays that keep their sharding lead to unequal parts, the share is that
    of the busiest device, although another dimension has equal parts: to split that dimension is not worth any price.
    """
    if not suggested:
        return math.inf
    most = max(_parts(split, mesh) for split in suggested)
    unequal = [share(rule, split, mesh) for split in unmoved if _parts(split, mesh) == most]
    return max(unequal, default=min(share(rule, split, mesh) for split in suggested))


def _parts(split: Split, mesh: Mesh) -> int:
    """Into how many parts a split divides the work of an equation."""
    return math.prod(mesh.count(atoms) for f, atoms in split.items() if f >= 0)
