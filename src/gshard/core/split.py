"""Converts between splits of an equation (atoms of factors) and shardings of arrays (atoms of dimensions).

Two laws apply to a dimension that consists of several factors:

* It is split major factor first: a minor factor may have atoms only if all more major factors are split completely.
  Otherwise the parts of the dimension would not be contiguous.
* All parts are equal: the atoms of a factor must divide its size.

    >>> mesh = Mesh.abstract(x=2, y=3)
    >>> factors = (Factor(2), Factor(6))
    >>> project(((0, 1),), (("x", "y"),), factors, mesh)     # (a b) cut by x then y
    {0: ('x',), 1: ('y',)}
    >>> place(((0, 1),), {0: ("x",), 1: ("y",)})
    (('x', 'y'),)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gshard.core.mesh import Atoms, Mesh
from gshard.core.rule import REDUCE, REPLICATE, Dims, Factor, Rule
from gshard.core.sharding import Sharding

Split = dict[int, Atoms]


def project(dims: Dims, sharding: Sequence[Atoms], factors: Sequence[Factor], mesh: Mesh) -> Split:
    """The atoms that the sharding of an array assigns to each factor, as far as the laws allow."""
    sizes = mesh.atom_sizes
    split: Split = {}
    for dim, atoms in zip(dims, sharding, strict=True):
        if not atoms or not dim:
            continue
        if len(dim) == 1:
            if factors[dim[0]].kind != REPLICATE:
                split[dim[0]] = tuple(atoms)
            continue
        next_atom = 0
        for f in dim:
            if factors[f].kind == REPLICATE:
                break
            local_size = factors[f].size
            atoms_of_factor: list[str] = []
            while next_atom < len(atoms) and local_size > 1 and local_size % sizes[atoms[next_atom]] == 0:
                local_size //= sizes[atoms[next_atom]]
                atoms_of_factor.append(atoms[next_atom])
                next_atom += 1
            if atoms_of_factor:
                split[f] = tuple(atoms_of_factor)
            if local_size > 1:
                break
    return split


def place(dims: Dims, split: Mapping[int, Atoms]) -> tuple[Atoms, ...]:
    """The atoms of each dimension of an array under a split of the equation."""
    return tuple(
        [split.get(dim[0], ()) if len(dim) == 1 else tuple([a for f in dim for a in split.get(f, ())]) for dim in dims]
    )


def operand_sharding(rule: Rule, i: int, split: Mapping[int, Atoms]) -> Sharding:
    """The sharding of operand ``i`` under a split of the equation; it may be unreduced."""
    unreduced = {a: monoid for monoid, operands, atoms in passing(rule, split) if i in operands for a in atoms}
    return Sharding(place(rule.operands[i], split)).with_unreduced(unreduced)


def result_sharding(rule: Rule, i: int, split: Mapping[int, Atoms]) -> Sharding:
    """The sharding of result ``i`` under a split of the equation; it may be unreduced."""
    unreduced = {a: rule.after(monoid) for monoid, _, atoms in passing(rule, split) for a in atoms}
    for f, factor in enumerate(rule.factors):
        if factor.kind == REDUCE and not any(f in dim for dim in rule.results[i]):
            unreduced.update(dict.fromkeys(split.get(f, ()), factor.monoid or "add"))
    return Sharding(place(rule.results[i], split)).with_unreduced(unreduced)


def passing(rule: Rule, split: Mapping[int, Atoms]) -> Iterator[tuple[str, frozenset[int], Atoms]]:
    """The unreduced parts that pass an equation under a split: monoid, operands and atoms."""
    for way, (monoid, operands) in enumerate(rule.linear):
        if atoms := split.get(-1 - way):
            yield monoid, operands, atoms


def parts(split: Mapping[int, Atoms], mesh: Mesh) -> int:
    """The number of parts into which a split divides an equation."""
    return mesh.count([a for f, atoms in split.items() if f >= 0 for a in atoms])


def fits(dims: Dims, split: Mapping[int, Atoms], factors: Sequence[Factor], mesh: Mesh) -> bool:
    """Whether the parts of every dimension of an array are contiguous and equal under a split."""
    for dim in dims:
        if len(dim) < 2:
            continue
        major_is_complete = True  # whether all more major factors are split completely
        for f in dim:
            atoms = split.get(f, ())
            if atoms and (not major_is_complete or factors[f].size % mesh.count(atoms)):
                return False
            major_is_complete = major_is_complete and mesh.count(atoms) == factors[f].size
    return True


def is_valid(rule: Rule, split: Mapping[int, Atoms], mesh: Mesh) -> bool:
    """Whether an equation can run with a split.

    Each atom may occur once, replicated factors may have no atoms, and the split must fit every array. A rule may add
    conditions (``Rule.allowed``), and may limit the axes over which parts pass (``Rule.over``).
    """
    factor_atoms = [(rule.component[f], a) for f, atoms in split.items() if f >= 0 for a in atoms]
    if len(set(factor_atoms)) != len(factor_atoms):
        return False
    if any(split[f] and rule.factors[f].kind == REPLICATE for f in split if f >= 0):
        return False
    passing_atoms = [a for f, atoms in split.items() if f < 0 for a in atoms]
    if len(set(passing_atoms)) != len(passing_atoms) or set(passing_atoms) & {a for _, a in factor_atoms}:
        return False
    for way in range(len(rule.over)):
        atoms_of_way = split.get(-1 - way)
        if atoms_of_way and passable(rule, way, atoms_of_way, mesh) != atoms_of_way:
            return False
    if not all(fits(dims, split, rule.factors, mesh) for dims in (*rule.operands, *rule.results)):
        return False
    return rule.allowed is None or rule.allowed(mesh, split)


def passable(rule: Rule, way: int, atoms: Atoms, mesh: Mesh) -> Atoms:
    """The atoms, of some atoms, over which parts may pass in a way (``Rule.over``)."""
    axes = rule.limit(way)
    if axes is None:
        return atoms
    allowed = {a for axis in axes for a in mesh.atoms_of.get(axis, (axis,))}
    return tuple(a for a in atoms if a in allowed)


def local_size(factor: Factor, atoms: Atoms, mesh: Mesh) -> int:
    """The size of a factor on one device, padding included."""
    return -(-factor.size // mesh.count(atoms))
