"""Enumerates the shardings of values and the splits of equations that the planner compares.

Each axis (``reshard_costs.axes_of``) goes as a whole to one dimension (or factor), to none, or to the sum where a value
may be unreduced. Axes of one dimension stand in the mesh's order.

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
from gshard.planning.axis_steps import is_considered, parts_of
from gshard.planning.nearby import Runs
from gshard.planning.reshard_costs import are_together

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
    """Assigns a place to each axis, for parts of one axis as ``axis_steps.is_considered`` allows.

    With ``runs``, one axis differs from one of the assignments ``near``, or from the one without places, and the parts
    of it that differ have one place; or the axes of a run differ and have one place (``planning.nearby``). If there are
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
