"""Rings: the plan of a collective matmul, a contraction in parts that rotate among the devices.

A contraction whose operand would be gathered, or whose result would be reduce-scattered, can do without ever holding
the whole: a factor is taken one part after another, and each part comes by on its way around a ring of devices (figure
4c of the GShard paper, after Cannon's algorithm). The same bytes are sent; a part's place takes the whole array's.

    gathered operand     x[i@x,k] y[k,j@x]: parts of y rotate, each step writes the columns that it makes
    contracted factor    x[i@x,k] y[k@x,j]: parts of y rotate, each step takes its part of x and adds
    scattered result     x[i,k@x] y[k@x,j] -> [i@x,j]: the sums rotate, each step adds to those at hand
    two at once          x[i@x,k@y] y[k@x,j@y] -> [i@x,j@y]: Cannon's algorithm; both rotate, after a skew
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from gshard.core.mesh import Atoms, Mesh
from gshard.core.rule import Rule
from gshard.core.sharding import Sharding
from gshard.core.split import Split, operand_sharding, result_sharding


@dataclasses.dataclass(frozen=True, slots=True)
class Ring:
    """One factor of a contraction, taken part by part.

    Attributes:
        factor: the factor; of everything but what rotates each device uses the part whose turn it is.
        operands: those that rotate, each with the atoms over which its dimension of the factor is cut further.
        result: the atoms over which the result's dimension of the factor comes to be split, if sums rotate.
        both_ways: whether half of every part rotates in each direction.
        two_steps: whether two steps are one round of the loop. A part arrives while the one before is used, so it is in
            another place; after two steps it is back in the first, and nothing is copied. That takes the room of
            another part, and of what is made of it.
        order: of one array that rotates, its parts as they stand around the ring; none for that in which they are
            counted. What is a ring for the network need not be in the order of the devices.
    """

    factor: int
    operands: tuple[tuple[int, Atoms], ...] = ()
    result: Atoms = ()
    both_ways: bool = False
    two_steps: bool = False
    order: tuple[int, ...] = ()

    @property
    def rotating(self) -> tuple[Atoms, ...]:
        """The atoms of each array that rotates, operands first."""
        return (*(atoms for _, atoms in self.operands), *([self.result] if self.result else []))

    def steps(self, mesh: Mesh) -> int:
        """In how many parts the factor is taken."""
        return mesh.count(self.rotating[0])

    def atoms_of(self, operand: int) -> Atoms:
        """The atoms over which an operand rotates; none if it stays."""
        return next((atoms for i, atoms in self.operands if i == operand), ())


def entering(rule: Rule, split: Split, ring: Ring | None, i: int) -> Sharding:
    """How operand ``i`` enters an equation that is split like this, with or without a ring."""
    sharding = operand_sharding(rule, i, split)
    atoms = ring.atoms_of(i) if ring is not None else ()
    return _split_further(sharding, rule.operands[i], ring.factor, atoms) if ring is not None and atoms else sharding


def leaving(rule: Rule, split: Split, ring: Ring | None, i: int) -> Sharding:
    """How result ``i`` leaves it."""
    sharding = result_sharding(rule, i, split)
    if ring is None or not ring.result:
        return sharding
    finished = sharding.with_unreduced({a: m for a, m in sharding.unreduced if a not in ring.result})
    return _split_further(finished, rule.results[i], ring.factor, ring.result)


def _split_further(sharding: Sharding, dims: Sequence[tuple[int, ...]], factor: int, atoms: Atoms) -> Sharding:
    further = (have + (atoms if f == (factor,) else ()) for f, have in zip(dims, sharding.dims, strict=True))
    return Sharding(tuple(further), sharding.unreduced)
