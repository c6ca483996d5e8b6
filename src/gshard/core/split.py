"""Splits: assignments of atoms to the factors of an equation, and the shardings that follow.

All arithmetic between dimensions and factors lives here. Two laws hold it together:

* a dimension made of several factors is cut major factor first: a minor factor may have atoms only if every
  more major one is split completely, because otherwise the parts of the dimension are not contiguous;
* inside such a dimension parts are equal: atoms that do not divide a factor evenly do not fit it.

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
    """The atoms that a sharding of one array gives to each factor, as far as factors can take them."""
    sizes = mesh.atom_sizes
    split: Split = {}
    for dim, atoms in zip(dims, sharding, strict=True):
        if not atoms or not dim:
            continue
        if len(dim) == 1:
            if factors[dim[0]].kind != REPLICATE:
                split[dim[0]] = tuple(atoms)
            continue
        at = 0
        for f in dim:
            if factors[f].kind == REPLICATE:
                break
            room, taken = factors[f].size, []
            while at < len(atoms) and room > 1 and room % sizes[atoms[at]] == 0:
                room //= sizes[atoms[at]]
                taken.append(atoms[at])
                at += 1
            if taken:
                split[f] = tuple(taken)
            if room > 1:
                break
    return split


def place(dims: Dims, split: Mapping[int, Atoms]) -> tuple[Atoms, ...]:
    """The sharding of an array's dimensions when the equation is split this way."""
    return tuple(
        [split.get(dim[0], ()) if len(dim) == 1 else tuple([a for f in dim for a in split.get(f, ())]) for dim in dims]
    )


def operand_sharding(rule: Rule, i: int, split: Mapping[int, Atoms]) -> Sharding:
    """How operand ``i`` enters when the equation is split this way: perhaps with parts still to be combined."""
    unreduced = {a: monoid for monoid, operands, atoms in passing(rule, split) if i in operands for a in atoms}
    return Sharding(place(rule.operands[i], split)).with_unreduced(unreduced)


def result_sharding(rule: Rule, i: int, split: Mapping[int, Atoms]) -> Sharding:
    """The sharding of result ``i`` when the equation has run so split: perhaps with parts still to be combined."""
    unreduced = {a: rule.after(monoid) for monoid, _, atoms in passing(rule, split) for a in atoms}
    for f, factor in enumerate(rule.factors):
        if factor.kind == REDUCE and not any(f in dim for dim in rule.results[i]):
            unreduced.update(dict.fromkeys(split.get(f, ()), factor.monoid or "add"))
    return Sharding(place(rule.results[i], split)).with_unreduced(unreduced)


def passing(rule: Rule, split: Mapping[int, Atoms]) -> Iterator[tuple[str, frozenset[int], Atoms]]:
    """What passes an equation without being combined: monoid, operands and atoms."""
    for k, (monoid, operands) in enumerate(rule.linear):
        if atoms := split.get(-1 - k):
            yield monoid, operands, atoms


def parts(split: Mapping[int, Atoms], mesh: Mesh) -> int:
    """In how many parts an equation runs."""
    return mesh.count([a for f, atoms in split.items() if f >= 0 for a in atoms])


def fits(dims: Dims, split: Mapping[int, Atoms], factors: Sequence[Factor], mesh: Mesh) -> bool:
    """Whether the parts of every dimension of an array are contiguous and equal under this split."""
    for dim in dims:
        if len(dim) < 2:
            continue
        full = True
        for f in dim:
            atoms = split.get(f, ())
            if atoms and (not full or factors[f].size % mesh.count(atoms)):
                return False
            full = full and mesh.count(atoms) == factors[f].size
    return True


def is_valid(rule: Rule, split: Mapping[int, Atoms], mesh: Mesh) -> bool:
    """Whether an equation may be split this way: atoms used once, replicated factors unsplit, every array fits.

    A rule may have conditions of its own (``Rule.allowed``). Parts of sums pass over those axes only that it allows
    (``Rule.over``).
    """
    atoms = [(rule.component[f], a) for f, own in split.items() if f >= 0 for a in own]
    combined = [a for f, own in split.items() if f < 0 for a in own]
    if len(set(atoms)) != len(atoms) or any(split[f] and rule.factors[f].kind == REPLICATE for f in split if f >= 0):
        return False
    if len(set(combined)) != len(combined) or set(combined) & {a for _, a in atoms}:
        return False
    if rule.over and any(
        passable(rule, k, own, mesh) != own for k in range(len(rule.over)) if (own := split.get(-1 - k))
    ):
        return False
    if not all(fits(dims, split, rule.factors, mesh) for dims in (*rule.operands, *rule.results)):
        return False
    return rule.allowed is None or rule.allowed(mesh, split)


def passable(rule: Rule, way: int, atoms: Atoms, mesh: Mesh) -> Atoms:
    """Those of some atoms over which parts may pass in a way (``Rule.over``)."""
    axes = rule.limit(way)
    if axes is None:
        return atoms
    allowed = {a for axis in axes for a in mesh.atoms_of.get(axis, (axis,))}
    return tuple(a for a in atoms if a in allowed)


def local_size(factor: Factor, atoms: Atoms, mesh: Mesh) -> int:
    """The size of a factor on one device, padding included."""
    return -(-factor.size // mesh.count(atoms))
