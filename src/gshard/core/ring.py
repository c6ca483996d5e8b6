"""Defines the plan of a collective matmul: a contraction whose parts rotate around a ring of devices.

A contraction that needs a gathered operand, or whose result is reduce-scattered, need not hold the whole array at once.
It computes one part of a factor after the other, while the parts rotate around a ring of devices (figure 4c of the
GShard paper, after Cannon's algorithm). The devices send the same number of bytes, but hold one part instead of the
whole array.

    gathered operand     x[i@x,k] y[k,j@x]: parts of y rotate, each step computes columns of the result
    contracted factor    x[i@x,k] y[k@x,j]: parts of y rotate, each step multiplies by a part of x and adds
    scattered result     x[i,k@x] y[k@x,j] -> [i@x,j]: the sums rotate, each step adds to the present sums
    both operands        x[i@x,k@y] y[k@x,j@y] -> [i@x,j@y]: Cannon's algorithm; both rotate, after a skew
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
    """A factor of a contraction that is computed part by part."""

    factor: int  # the factor. In each step, a device uses the current part of the arrays that do not rotate.
    # the operands that rotate, each with the atoms over which its dimension of the factor is also split
    operands: tuple[tuple[int, Atoms], ...] = ()
    result: Atoms = ()  # the atoms over which the result's dimension of the factor is split in the end, if sums rotate
    both_ways: bool = False  # whether half of every part rotates in each direction
    # whether an iteration of the loop performs two steps. A part arrives while the device uses the previous one, so it
    # needs a second buffer. After two steps the parts are in the first buffer again, and no copy is needed. This takes
    # the memory of another part and of its product.
    two_steps: bool = False
    # the order of the parts around the ring, if one array rotates; () for the order of their numbers. A ring of the
    # network may differ from the order of the devices.
    order: tuple[int, ...] = ()

    @property
    def rotating(self) -> tuple[Atoms, ...]:
        """The atoms of each array that rotates, operands first."""
        return (*(atoms for _, atoms in self.operands), *([self.result] if self.result else []))

    def steps(self, mesh: Mesh) -> int:
        """The number of parts of the factor."""
        return mesh.count(self.rotating[0])

    def atoms_of(self, operand: int) -> Atoms:
        """The atoms over which an operand rotates; () if it does not rotate."""
        return next((atoms for i, atoms in self.operands if i == operand), ())


def entering(rule: Rule, split: Split, ring: Ring | None, i: int) -> Sharding:
    """The sharding with which operand ``i`` enters an equation, with or without a ring."""
    sharding = operand_sharding(rule, i, split)
    atoms = ring.atoms_of(i) if ring is not None else ()
    return _split_further(sharding, rule.operands[i], ring.factor, atoms) if ring is not None and atoms else sharding


def leaving(rule: Rule, split: Split, ring: Ring | None, i: int) -> Sharding:
    """The sharding with which result ``i`` leaves an equation, with or without a ring."""
    sharding = result_sharding(rule, i, split)
    if ring is None or not ring.result:
        return sharding
    finished = sharding.with_unreduced({a: m for a, m in sharding.unreduced if a not in ring.result})
    return _split_further(finished, rule.results[i], ring.factor, ring.result)


def _split_further(sharding: Sharding, dims: Sequence[tuple[int, ...]], factor: int, atoms: Atoms) -> Sharding:
    split_dims = tuple(
        atoms_of_dim + (atoms if factors_of_dim == (factor,) else ())
        for factors_of_dim, atoms_of_dim in zip(dims, sharding.dims, strict=True)
    )
    return Sharding(split_dims, sharding.unreduced)
