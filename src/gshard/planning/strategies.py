"""Ways: enumerates the shardings of values and the splits of equations that the planner compares.

Each axis (``moves.axes_of``) is given as a whole: to one dimension (or factor), to none, or, where parts of a sum may
stay unreduced, to the sum. Axes that meet in a dimension stand there in the mesh's order.

    >>> mesh = Mesh.abstract(data=4, model=2)
    >>> [s.format(mesh, (8, 3)) for s in shardings((8, 3), mesh, tuple(mesh.atoms_of.values()))]
    ['[8,3]', '[8@model,3]', '[8@data,3]', '[8@(data,model),3]']
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from gshard.core.mesh import Atoms, Mesh
from gshard.core.planning_tables import tabulated
from gshard.core.rule import REPLICATE, Rule
from gshard.core.sharding import Sharding
from gshard.core.split import Split, is_valid
from gshard.planning.nearby import LARGE_PROGRAM, MANY_AXES
from gshard.planning.reshard_costs import are_together, is_considered, parts_of

# Unequal parts are considered where the devices compute at most this much more for padding.
WASTE = 1.125
_SUM = -1  # in the place of a dimension: parts of a sum
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
    near: tuple[Sharding, ...] | None = None,
    changes: int = MANY_AXES,
) -> tuple[Sharding, ...]:
    """The shardings of an array of this shape, the replicated one first.

    Args:
        shape: global.
        mesh: the devices.
        given: the axes.
        unreduced: the monoid by which parts may still have to be combined; "" for none.
        even: whether all parts must be equal, as at the boundary of a program.
        also: dimensions and what may cut them, however unequal the parts are.
        near: what propagation says of it; None if nothing is known.
        changes: how many axes may be elsewhere.
    """
    found = []
    bases = None if near is None else [places_of(dict(enumerate(s.dims)), given) for s in near]
    places = [None, *range(len(shape)), *([_SUM] if unreduced else [])]
    for chosen in places_for(places, mesh, given, bases, changes):
        dims: list[Atoms] = [()] * len(shape)
        partial: dict[str, str] = {}
        for place, atoms in zip(chosen, given, strict=True):
            if place == _SUM:
                partial.update(dict.fromkeys(atoms, unreduced))
            elif place is not None:
                dims[place] += atoms
        pairs = zip(shape, dims, strict=True)
        if all(_is_worth(n, mesh.count(own), even=even) or (d, own) in also for d, (n, own) in enumerate(pairs)):
            found.append(Sharding(tuple(dims)).with_unreduced(partial))
    return tuple(found)


Place = int | None
Places = tuple[Place, ...]


def places_for(
    places: Sequence[Place],
    mesh: Mesh,
    given: tuple[Atoms, ...],
    near: Sequence[Places] | None = None,
    changes: int = MANY_AXES,
) -> Iterable[Places]:
    """A place for each axis; of the parts of an axis only what ``moves.is_considered`` allows.

    Where it is known ``near`` what they are expected to be, at most so many axes are elsewhere than there, or than in
    no place (``planning.nearby``); if there is only one axis more, all may be. If it is one axis, its parts that are
    elsewhere are together.
    """
    parts = parts_of(mesh, given)
    each = [[c for c in itertools.product(places, repeat=len(own)) if is_considered(c)] for own in parts]
    ends = list(itertools.accumulate(map(len, parts), initial=0))
    bases = [[base[a:b] for a, b in itertools.pairwise(ends)] for base in ((None,) * len(given), *(near or ()))]
    if near is not None and changes == LARGE_PROGRAM:
        each = [[c for c in own if any(are_together(c, base[k]) for base in bases)] for k, own in enumerate(each)]
    if near is None or sum(map(bool, parts)) <= changes + 1:
        return (tuple(itertools.chain(*chosen)) for chosen in itertools.product(*each))
    found: dict[Places, None] = {}
    for base in bases:
        own = [[c] for c in base]
        for some in itertools.combinations(range(len(each)), changes):
            ways = (each[k] if k in some else own[k] for k in range(len(each)))
            found.update((tuple(itertools.chain(*chosen)), None) for chosen in itertools.product(*ways))
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class Component:
    """A part of a rule that is split whatever the others are: one operand of a barrier and its result; else all of it.

    Attributes:
        factors: its factors, and the ways in which sums pass it, by their keys in a split.
        operands, results: which of the rule's.
    """

    factors: tuple[int, ...]
    operands: tuple[int, ...]
    results: tuple[int, ...]


@tabulated(4096)
def components(rule: Rule) -> tuple[Component, ...]:
    """The components of a rule, in the order of their operands.

    >>> from gshard.core.rule import RuleMaker
    >>> make = RuleMaker()
    >>> arrays = [make.parallel((4, 2)), make.parallel((6,))]
    >>> [component.factors for component in components(make.rule(arrays, arrays, passes=True))]
    [(0, 1), (2,)]
    """
    first, ways = len(rule.factors), len(rule.linear)
    if rule.fixed is not None or not rule.passes:
        keys = (*range(first), *(-1 - k for k in range(ways)))
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
    near: tuple[Places, ...] | None = None,
    changes: int = MANY_AXES,
    pinned: tuple[tuple[int, Atoms], ...] = (),
) -> tuple[Split, ...]:
    """The splits of a component, the one that splits nothing first; where the rule has no choice, its own.

    Args:
        rule, component: which.
        mesh: the devices.
        given: the axes.
        passing: the ways, by their keys in a split, in which parts still to be combined may pass.
        also: factors and what may split them, however unequal the parts are.
        near: what propagation says of it; None if nothing is known.
        changes: how many axes may be elsewhere.
        pinned: factors whose atoms are given, and part of every split.
    """
    if rule.fixed is not None:
        return (rule.fixed(mesh),)
    given_already = dict(pinned)
    factors = [
        f
        for f in component.factors
        if f >= 0 and rule.factors[f].kind != REPLICATE and rule.factors[f].size > 1 and f not in given_already
    ]
    sums = [way for way in component.factors if way < 0 and way in passing]
    found = []
    for chosen in places_for([None, *factors, *sums], mesh, given, near, changes):
        split: Split = dict(given_already)
        for f, atoms in zip(chosen, given, strict=True):
            if f is not None:
                split[f] = (*split.get(f, ()), *atoms)
        own = ((f, rule.factors[f].size, atoms) for f, atoms in split.items() if f >= 0)
        worth = all(_is_worth(n, mesh.count(atoms)) or (f, atoms) in also for f, n, atoms in own)
        if worth and is_valid(rule, split, mesh):
            found.append(split)
    return tuple(found)


def places_of(split: Mapping[int, Atoms], given: tuple[Atoms, ...]) -> Places:
    """Where each axis is as a whole, of dimensions or factors."""
    place = {a: f for f, atoms in split.items() for a in atoms}
    found = [{place.get(a) for a in own} for own in given]
    return tuple(own.pop() if len(own) == 1 else None for own in found)


def share(rule: Rule, split: Split, mesh: Mesh) -> float:
    """The share of an equation's work that one device has, padding included."""
    sizes = ((rule.factors[f].size, mesh.count(atoms)) for f, atoms in split.items() if f >= 0 and atoms)
    return math.prod(-(-n // parts) / n for n, parts in sizes if n)


def _is_worth(n: int, parts: int, *, even: bool = False) -> bool:
    if parts == 1 or n % parts == 0:
        return n > 0 or parts == 1
    return not even and -(-n // parts) * parts <= WASTE * n
