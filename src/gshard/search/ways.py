"""Ways: the shardings of a value and the splits of an equation among which search chooses.

Each axis of the mesh is given as a whole: to one dimension (or factor), to none, or, where parts of a sum may stay
unreduced, to the sum. Axes that meet in a dimension stand there in the mesh's order.

    >>> mesh = Mesh.abstract(data=4, model=2)
    >>> [s.format(mesh, (8, 3)) for s in shardings((8, 3), mesh)]
    ['[8,3]', '[8@model,3]', '[8@data,3]', '[8@(data,model),3]']
"""

from __future__ import annotations

import functools
import itertools
import math

from gshard.core.mesh import Atoms, Mesh
from gshard.core.rule import WHOLE, Rule
from gshard.core.sharding import Sharding
from gshard.core.split import Split, is_valid

# Unequal parts are considered where the devices compute at most this much more for padding.
WASTE = 1.125
_SUM = -1  # in the place of a dimension: parts of a sum


def axes(mesh: Mesh) -> tuple[Atoms, ...]:
    """The atoms of each axis that has more than one device, in the mesh's order."""
    return tuple(own for own in mesh.atoms_of.values() if own)


@functools.lru_cache(maxsize=4096)
def shardings(
    shape: tuple[int, ...], mesh: Mesh, *, unreduced: bool = False, even: bool = False
) -> tuple[Sharding, ...]:
    """The shardings of an array of this shape, the replicated one first.

    Args:
        shape: global.
        mesh: the devices.
        unreduced: whether parts may be those of a sum.
        even: whether all parts must be equal, as at the border of a program.
    """
    found = []
    places = [None, *range(len(shape)), *([_SUM] if unreduced else [])]
    given = axes(mesh)
    for chosen in itertools.product(places, repeat=len(given)):
        dims: list[Atoms] = [()] * len(shape)
        waiting: dict[str, str] = {}
        for place, atoms in zip(chosen, given, strict=True):
            if place == _SUM:
                waiting.update(dict.fromkeys(atoms, "add"))
            elif place is not None:
                dims[place] += atoms
        if all(_is_worth(n, mesh.count(own), even=even) for n, own in zip(shape, dims, strict=True)):
            found.append(Sharding(tuple(dims)).with_unreduced(waiting))
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def splits(rule: Rule, mesh: Mesh) -> tuple[Split, ...]:
    """The splits of an equation, the one that splits nothing first; where the rule has no choice, its own."""
    if rule.fixed is not None:
        return (rule.fixed(mesh),)
    factors = [f for f, factor in enumerate(rule.factors) if factor.kind != WHOLE and factor.size > 1]
    sums = [-1 - k for k, (monoid, _) in enumerate(rule.linear) if monoid == "add"]
    given = axes(mesh)
    found = []
    for chosen in itertools.product([None, *factors, *sums], repeat=len(given)):
        split: Split = {}
        for f, atoms in zip(chosen, given, strict=True):
            if f is not None:
                split[f] = (*split.get(f, ()), *atoms)
        worth = all(_is_worth(rule.factors[f].size, mesh.count(own)) for f, own in split.items() if f >= 0)
        if worth and is_valid(rule, split, mesh):
            found.append(split)
    return tuple(found)


def share(rule: Rule, split: Split, mesh: Mesh) -> float:
    """The share of an equation's work that one device has, padding included."""
    sizes = ((rule.factors[f].size, mesh.count(atoms)) for f, atoms in split.items() if f >= 0 and atoms)
    return math.prod(-(-n // parts) / n for n, parts in sizes if n)


def _is_worth(n: int, parts: int, *, even: bool = False) -> bool:
    if parts == 1 or n % parts == 0:
        return n > 0 or parts == 1
    return not even and -(-n // parts) * parts <= WASTE * n
