"""Enumerates the shardings of values and the splits of equations that the planner compares."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from gshard.comm.reshard import FEW, has_many, parts_of
from gshard.core.mark import Demand
from gshard.core.mesh import Atoms, Mesh
from gshard.core.planning_tables import tabulated
from gshard.core.program import Equation, Program, Value, itemsize
from gshard.core.rule import REPLICATE, Rule, Split, is_valid, operand_sharding, result_sharding
from gshard.core.sharding import Sharding
from gshard.planning.propagated import Arrays, Propagated, arrays_of, candidates, key_of, led

# Limits how many axes may differ from the propagated places, if there are too many choices to compare all.

FEW_PARTS = 2  # up to so many parts of one axis may be in any places
LARGE = 2e6  # entries of all tables: such a problem takes some seconds to build and solve
Runs = tuple[Atoms, ...]


def is_limited(program: Program, mesh: Mesh, axes: tuple[Atoms, ...]) -> bool:
    """Whether a program has too many choices to compare all."""
    parts = parts_of(mesh, axes)
    has_several = len(parts) >= FEW or any(len(part) > FEW_PARTS for part in parts)
    return has_many(mesh, axes) or (has_several and estimated_entries(program, mesh, axes) > LARGE)


def runs_of(axes: tuple[Atoms, ...], known: Iterable[Sharding]) -> Runs:
    """The atoms that split a dimension of some known sharding, if they are several axes."""
    rows = dict.fromkeys(atoms for sharding in known for atoms in sharding.dims)
    return tuple(atoms for atoms in rows if sum(set(axis) <= set(atoms) for axis in axes) > 1)


@tabulated(16)
def estimated_entries(program: Program, mesh: Mesh, axes: tuple[Atoms, ...]) -> float:
    """An estimate of the entries of all tables between values and equations, without the limit for large programs.

    Each axis has one dimension of a value, or none, and one factor of an equation, or none. With many axes, one of them
    has any place, and the others have the propagated one.
    """
    parts = [len(part) for part in parts_of(mesh, axes)]
    most = 1 if has_many(mesh, axes) else len(parts)

    def choices(places: int) -> int:
        """The number of choices. Of an axis in several parts, the first parts have one place, the others another."""
        options, count_of = places + 1, [1] + [0] * most  # for each number of axes that differ, the number of choices
        for n in parts:
            others = (options**n if n <= FEW_PARTS else options + (n - 1) * options * places) - 1
            count_of = [count + others * fewer for count, fewer in zip(count_of, [0, *count_of], strict=False)]
        return sum(count_of)

    entries = 0.0
    for e in program.block.walk():
        if e.rule is not None:
            factors = sum(f.kind != REPLICATE and f.size > 1 for f in e.rule.factors)
            ranks = [sum(n > 1 for n in v.shape) for v in (*e.inputs, *e.outputs) if isinstance(v, Value)]
            entries += choices(factors) * sum(map(choices, ranks))
    return entries


def is_considered(places: Sequence[object]) -> bool:
    """Whether the planner considers these places for the parts of one axis (None: no place).

    Two parts may be anywhere. Of more parts, the first or the last ones have one place, and the others have another
    place or none. Without this rule, a mark on each gradient could divide an axis of 2,048 devices into five parts,
    with thousands of choices.

    >>> is_considered([0, 1]), is_considered([0, 0, 1, 1]), is_considered([None, None, None, 1])
    (True, True, True)
    >>> is_considered([0, None, 1]), is_considered([0, 1, 1, 0]), is_considered([0, 1, None, None])
    (False, False, False)
    """
    return len(places) <= FEW_PARTS or sum(a != b for a, b in itertools.pairwise(places)) <= 1


def are_together(places: Sequence[object], base: Sequence[object]) -> bool:
    """Whether the parts of one axis that differ from a base have one place. Two parts may be anywhere.

    >>> are_together([1, 1, None], [0, 0, 0]), are_together([1, 1, 2], [1, 1, None]), are_together([1, 2], [0, 0])
    (False, True, True)
    """
    return len(places) <= FEW_PARTS or len({a for a, b in zip(places, base, strict=True) if a != b}) <= 1


# The planner considers unequal parts if padding makes the devices compute at most this much more.
WASTE = 1.125
_SUM = -1  # the place of an axis over which a value is unreduced, instead of a dimension
Cuts = frozenset[tuple[int, Atoms]]


@tabulated(4096)
def shardings(
    shape: tuple[int, ...],
    mesh: Mesh,
    given: tuple[Atoms, ...],
    *,
    unreduced: str = "",
    even: bool = False,
    also: Cuts = frozenset(),
    near: tuple[Sharding, ...] = (),
    runs: Runs | None = None,
) -> tuple[Sharding, ...]:
    """The shardings of an array of this shape, the replicated one first."""
    found = []
    bases = [places_of(dict(enumerate(s.dims)), given) for s in near]
    places = [None, *range(len(shape)), *([_SUM] if unreduced else [])]
    for chosen in places_for(places, mesh, given, bases, runs):
        dims: list[Atoms] = [()] * len(shape)
        partial: dict[str, str] = {}
        for place, atoms in zip(chosen, given, strict=True):
            if place == _SUM:
                partial.update(dict.fromkeys(atoms, unreduced))
            elif place is not None:
                dims[place] += atoms
        pairs = zip(shape, dims, strict=True)
        if all(
            _is_worth(n, mesh.count(axis_atoms), even=even) or (d, axis_atoms) in also
            for d, (n, axis_atoms) in enumerate(pairs)
        ):
            found.append(Sharding(tuple(dims)).with_unreduced(partial))
    return tuple(found)


Place = int | None
Places = tuple[Place, ...]


def places_for(
    places: Sequence[Place],
    mesh: Mesh,
    given: tuple[Atoms, ...],
    near: Sequence[Places] = (),
    runs: Runs | None = None,
) -> Iterable[Places]:
    """Assigns a place to each axis, for parts of one axis as ``is_considered`` allows.

    With ``runs``, one axis differs from one of the assignments ``near``, or from the one without places, and the parts
    of it that differ have one place; or the axes of a run differ and have one place. If there are
    two axes, with those of a run as one, both may differ.
    """
    parts = parts_of(mesh, given)
    options_of_axis = [
        [option for option in itertools.product(places, repeat=len(part)) if is_considered(option)] for part in parts
    ]
    if runs is None:
        return (tuple(itertools.chain(*chosen)) for chosen in itertools.product(*options_of_axis))
    spans = [*itertools.pairwise(itertools.accumulate(map(len, parts), initial=0))]
    bases = [(None,) * len(given), *near]
    options_of_axis = [
        [option for option in options if any(are_together(option, base[a:b]) for base in bases)]
        for (a, b), options in zip(spans, options_of_axis, strict=True)
    ]
    if len(parts) <= 2:
        return (tuple(itertools.chain(*chosen)) for chosen in itertools.product(*options_of_axis))
    changes = [[*zip(range(a, b), some)] for (a, b), own in zip(spans, options_of_axis, strict=True) for some in own]
    for atoms in runs:
        in_run = [i for i, axis in enumerate(given) if {*axis} <= {*atoms}]
        together = [[(i, place) for i in in_run] for place in places] if len(in_run) > 1 else []
        rest = [k for k, (a, _) in enumerate(spans) if a not in in_run]
        if len(rest) == 1:  # with the axes of the run as one there are two, and both may differ
            (a, b), options = spans[rest[0]], options_of_axis[rest[0]]
            together = [[*own, *zip(range(a, b), option)] for own in together for option in options]
        changes += together
    assignments = dict.fromkeys(
        tuple((dict(enumerate(base)) | dict(change)).values()) for base in bases for change in changes
    )
    return [some for some in assignments if all(is_considered(some[a:b]) for a, b in spans)]


@dataclasses.dataclass(frozen=True, slots=True)
class Component:
    """A part of a rule that is split independently of the others: a barrier's operand and result, or else all of it."""

    factors: tuple[int, ...]  # keys in a split: its factors, and the sums (below zero) that may pass it
    operands: tuple[int, ...]  # indices of its operands
    results: tuple[int, ...]  # indices of its results


@tabulated(4096)
def components(rule: Rule) -> tuple[Component, ...]:
    """The components of a rule, in the order of their operands.

    >>> from gshard.core.rule import RuleMaker
    >>> make = RuleMaker()
    >>> arrays = [make.parallel((4, 2)), make.parallel((6,))]
    >>> [component.factors for component in components(make.rule(arrays, arrays, passes=True))]
    [(0, 1), (2,)]
    """
    if rule.fixed is not None or not rule.passes:
        keys = (*range(len(rule.factors)), *(-1 - k for k in range(len(rule.linear))))
        return (Component(keys, tuple(range(len(rule.operands))), tuple(range(len(rule.results)))),)
    found = []
    for i, dims in enumerate(rule.operands):
        sums = (-1 - k for k, (_, operands) in enumerate(rule.linear) if operands == {i})
        found.append(Component((*(f for dim in dims for f in dim), *sums), (i,), (i,)))
    return tuple(found)


@tabulated(4096)
def splits(
    rule: Rule,
    component: Component,
    mesh: Mesh,
    given: tuple[Atoms, ...],
    passing: frozenset[int] = frozenset(),
    also: Cuts = frozenset(),
    near: tuple[Places, ...] = (),
    runs: Runs | None = None,
    pinned: tuple[tuple[int, Atoms], ...] = (),
) -> tuple[Split, ...]:
    """The splits of a component, the one that splits nothing first. If the rule has only one split, that one."""
    if rule.fixed is not None:
        return (rule.fixed(mesh),)
    pinned_split = dict(pinned)
    factors = [
        f
        for f in component.factors
        if f >= 0 and rule.factors[f].kind != REPLICATE and rule.factors[f].size > 1 and f not in pinned_split
    ]
    passing_sums = [key for key in component.factors if key < 0 and key in passing]
    found = []
    for chosen in places_for([None, *factors, *passing_sums], mesh, given, near, runs):
        split: Split = dict(pinned_split)
        for f, atoms in zip(chosen, given, strict=True):
            if f is not None:
                split[f] = (*split.get(f, ()), *atoms)
        sized_factors = ((f, rule.factors[f].size, atoms) for f, atoms in split.items() if f >= 0)
        is_worth = all(_is_worth(n, mesh.count(atoms)) or (f, atoms) in also for f, n, atoms in sized_factors)
        if is_worth and is_valid(rule, split, mesh):
            found.append(split)
    return tuple(found)


def places_of(split: Mapping[int, Atoms], given: tuple[Atoms, ...]) -> Places:
    """For each axis, the dimension (or factor) that has all of it; None if none has."""
    place_of_atom = {a: f for f, atoms in split.items() for a in atoms}
    places_of_axes = [{place_of_atom.get(a) for a in places} for places in given]
    return tuple(places.pop() if len(places) == 1 else None for places in places_of_axes)


def share(rule: Rule, split: Split, mesh: Mesh) -> float:
    """The share of an equation's work on one device, padding included."""
    sizes = ((rule.factors[f].size, mesh.count(atoms)) for f, atoms in split.items() if f >= 0 and atoms)
    return math.prod(-(-n // parts) / n for n, parts in sizes if n)


def _is_worth(n: int, parts: int, *, even: bool = False) -> bool:
    if parts == 1 or n % parts == 0:
        return n > 0 or parts == 1
    return not even and -(-n // parts) * parts <= WASTE * n


# Numbers values of one shape with equal propagated shardings alike, so that equal layers get equal choices.

Kinds = Mapping[Value, int]


def kinds_of(program: Program, propagated: Propagated | None) -> Kinds:
    """A number for each value; equal for values with the same shape, item size and propagation result."""
    numbers: dict[object, int] = {}
    kinds: dict[Value, int] = {}
    for v in program.block.values():
        key: tuple[object, ...] = v.shape, itemsize(v.dtype)
        if propagated is not None:
            moved = propagated.moved.get(v)
            undecided = frozenset(propagated.could(v).items())
            key = *key, propagated.shardings[v], None if moved is None else moved.dims, undecided
        kinds[v] = numbers.setdefault(key, len(numbers))
    return kinds


def kinds_at(e: Equation, kinds: Kinds) -> tuple[int, ...]:
    """The kinds of the operands and results of an equation, -1 for constants."""
    return tuple([kinds[v] if isinstance(v, Value) else -1 for v in (*e.inputs, *e.outputs)])


# Derives the shardings and splits that propagated shardings suggest, over whole axes and over parts of axes.


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
    propagated: Propagated, kinds: Kinds, tied: Collection[Equation], axes: tuple[Atoms, ...]
) -> dict[Value, dict[Sharding, None]]:
    """Shardings in which equations read or make a value that is sharded as propagation found."""
    suggested: dict[Value, dict[Sharding, None]] = {}
    by_key: dict[object, tuple[tuple[int, Sharding], ...]] = {}
    for e in propagated.program.block.walk():
        if e.rule is None or not e.rule.is_free or e in tied:
            continue
        key = e.rule, kinds_at(e, kinds)
        if key not in by_key:
            some = (_suggested_by(e.rule, arrays, propagated.mesh) for arrays in propagated_arrays(e, propagated, axes))
            by_key[key] = tuple(itertools.chain(*some))
        values = (*e.inputs, *e.outputs) if by_key[key] else ()
        for i, sharding in by_key[key]:
            if isinstance(v := values[i], Value):
                suggested.setdefault(v, {})[sharding] = None
    return suggested


@tabulated(16384)
def _suggested_by(rule: Rule, arrays: Arrays, mesh: Mesh) -> tuple[tuple[int, Sharding], ...]:
    found: list[tuple[int, Sharding]] = []
    for split in candidates(rule, arrays, mesh):
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
    runs: Runs | None = None,
) -> tuple[Sharding, ...]:
    """The shardings over whole axes to compare for values of one sharding; with ``runs``, near propagated ones."""
    v = group[0]
    uneven_cuts: frozenset[tuple[int, Atoms]] = frozenset()
    if propagated is not None and not even:
        dims = enumerate(zip(v.shape, propagated.shardings[v].dims, strict=True))
        uneven_cuts = frozenset((d, atoms) for d, (n, atoms) in dims if n % mesh.count(atoms))
    near: tuple[Sharding, ...] = ()
    if propagated is not None and runs is not None:
        near = tuple(dict.fromkeys(propagated.shardings[u] for u in group))
    find = functools.partial(shardings, v.shape, mesh, axes, even=even, also=uneven_cuts, near=near, runs=runs)
    return tuple(dict.fromkeys(s for monoid in monoids or ("",) for s in find(unreduced=monoid)))


def allowed_by_marks(
    shardings: Sequence[Sharding], demands: Sequence[Demand], barred: frozenset[str]
) -> tuple[Sharding, ...]:
    """The shardings that all demands allow and that use no barred atoms; if none is left, those of the demands."""
    allowed = [s for s in shardings if barred.isdisjoint(s.atoms)]
    for demand in demands:
        # A mark may name parts of axes, or axes in another order: then no sharding over whole axes fits.
        allowed = [*filter(demand.allows, allowed)] or [demand.sharding]
    return tuple(allowed)


def array_shardings(rule: Rule, splits: Sequence[Split]) -> tuple[tuple[Sharding, ...], ...]:
    """For each operand and result of an equation, its sharding under each split. All objectives share them."""
    known, key = _known_shardings(), (rule, id(splits))
    if key not in known:
        read = (tuple(operand_sharding(rule, i, split) for split in splits) for i in range(len(rule.operands)))
        made = (tuple(result_sharding(rule, i, split) for split in splits) for i in range(len(rule.results)))
        known[key] = splits, (*read, *made)
    return known[key][1]


@tabulated(1)
def _known_shardings() -> dict[object, tuple[Sequence[Split], tuple[tuple[Sharding, ...], ...]]]:
    """The results of ``array_shardings``. Each list of splits keeps its identity, which is in its key, valid."""
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
    runs: Runs | None = None,
) -> tuple[tuple[Split, ...], float]:
    """The splits of a component of an equation: over whole axes, and those that its arrays suggest."""
    if rule.manual is not None:
        return splits(rule, component, mesh, axes, passing, pinned=pinned), math.inf
    near = [split for known in arrays for split in candidates(rule, known, mesh)] if rule.fixed is None else []
    if barred:
        near = [split for split in near if barred.isdisjoint(a for atoms in split.values() for a in atoms)]
    suggested = tuple(_of_component(split, component) for split in near)
    cuts = ((f, atoms) for split in suggested for f, atoms in split.items() if f >= 0)
    uneven = frozenset((f, atoms) for f, atoms in cuts if rule.factors[f].size % mesh.count(atoms))
    expected: tuple[Places, ...] = ()
    if arrays and runs is not None:
        first = (_of_component(candidates(rule, known, mesh)[0], component) for known in arrays)
        expected = tuple(dict.fromkeys(places_of(split, axes) for split in first))
    over_axes = splits(rule, component, mesh, axes, passing, uneven, expected, runs)
    known_keys = {key_of(split) for split in over_axes}
    possible = (split for split in suggested if all(f >= 0 or f in passing for f, atoms in split.items() if atoms))
    more = {key_of(split): split for split in possible}
    unmoved = [split for known in arrays for split in led(rule, known, mesh)] if suggested else []
    found = over_axes + tuple(split for key, split in more.items() if key not in known_keys)
    return found, _marked_share(rule, suggested, unmoved, mesh)


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
