"""Ways: the shardings of a value and the splits of an equation among which search chooses.

Each axis of the mesh is given as a whole: to one dimension (or factor), to none, or, where parts of a sum may stay
unreduced, to the sum. Axes that meet in a dimension stand there in the mesh's order.

    >>> mesh = Mesh.abstract(data=4, model=2)
    >>> [s.format(mesh, (8, 3)) for s in shardings((8, 3), mesh)]
    ['[8,3]', '[8@model,3]', '[8@data,3]', '[8@(data,model),3]']
"""

from __future__ import annotations

import dataclasses
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


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A part of a rule that is split whatever the others are: one operand of a barrier and its result; else all of it.

    Attributes:
        factors: its factors, and the ways in which sums pass it, by their keys in a split.
        operands, results: which of the rule's.
    """

    factors: tuple[int, ...]
    operands: tuple[int, ...]
    results: tuple[int, ...]


@functools.lru_cache(maxsize=4096)
def pieces(rule: Rule) -> tuple[Piece, ...]:
    """The pieces of a rule, in the order of their operands.

    >>> from gshard.core.rule import RuleMaker
    >>> make = RuleMaker()
    >>> arrays = [make.parallel((4, 2)), make.parallel((6,))]
    >>> [piece.factors for piece in pieces(make.rule(arrays, arrays, passes=True))]
    [(0, 1), (2,)]
    """
    first, ways = len(rule.factors), len(rule.linear)
    if rule.fixed is not None or not rule.passes:
        keys = (*range(first), *(-1 - k for k in range(ways)))
        return (Piece(keys, tuple(range(len(rule.operands))), tuple(range(len(rule.results)))),)
    found = []
    for i, dims in enumerate(rule.operands):
        sums = (-1 - k for k, (_, operands) in enumerate(rule.linear) if operands == {i})
        found.append(Piece((*(f for dim in dims for f in dim), *sums), (i,), (i,)))
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def splits(rule: Rule, piece: Piece, mesh: Mesh) -> tuple[Split, ...]:
    """The splits of a piece, the one that splits nothing first; where the rule has no choice, its own."""
    if rule.fixed is not None:
        return (rule.fixed(mesh),)
    factors = [f for f in piece.factors if f >= 0 and rule.factors[f].kind != WHOLE and rule.factors[f].size > 1]
    sums = [way for way in piece.factors if way < 0 and rule.linear[-1 - way][0] == "add"]
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
