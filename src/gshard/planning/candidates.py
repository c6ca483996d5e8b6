"""Finds candidates: the splits of an equation that follow from the shardings of its arrays.

Each array in turn leads, and the others add the splits that do not contradict it, largest array first. Atoms on a
dimension that cannot be split may move to one that can. Unreduced operands may pass through an equation that is linear
in them. Last come splits that no array suggests: atoms that could stay move to another dimension of their operand.

Equations of one rule whose arrays have equal shardings have the same candidates, so those of equal layers are computed
once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from gshard.core.mesh import Atoms, Mesh
from gshard.core.planning_tables import tabulated
from gshard.core.program import Equation, Value, itemsize
from gshard.core.rule import PARALLEL, REDUCE, REPLICATE, Dims, Rule
from gshard.core.sharding import Sharding
from gshard.core.split import Split, is_valid, passable, project

_PADDING = 1.0  # the largest padding of a dimension, relative to its size, if no factor divides evenly


class ShardedArray(NamedTuple):
    """An operand or result: its sharding, its global shape and the bytes of one element."""

    sharding: Sharding
    shape: tuple[int, ...]
    itemsize: int

    @property
    def bytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * self.itemsize


# Operands, then results; None for constants.
Arrays = tuple[ShardedArray | None, ...]


def arrays_of(equation: Equation, shardings: Mapping[Value, Sharding]) -> Arrays:
    """The operands and results of an equation with these shardings."""
    return tuple(
        ShardedArray(shardings[v], v.shape, itemsize(v.dtype)) if isinstance(v, Value) else None
        for v in (*equation.inputs, *equation.outputs)
    )


@tabulated(16384)
def candidates(rule: Rule, arrays: Arrays, mesh: Mesh) -> tuple[Split, ...]:
    """Splits worth considering, without duplicates. One of them splits nothing, unless the rule has only one split.

    Splits that the arrays suggest come first, then those in which atoms that could stay move to another dimension.
    """
    if rule.fixed is not None:
        return (rule.fixed(mesh),)
    if rule.manual is not None:
        return (rule.manual.pinned(mesh),)
    claims = _claims(rule, arrays, mesh)
    found: dict[tuple[tuple[int, tuple[str, ...]], ...], Split] = {}

    def note(split: Split) -> None:
        found.setdefault(key_of(split), split)

    for split in _led(rule, claims, mesh):
        note(split)
    for split in list(found.values()) or [{}]:
        for moved in _with_moved_axes(rule, split, arrays, mesh):
            note(moved)
    for split in spread(rule, arrays, mesh):
        for claim in claims:
            split = _extend(split, claim, rule, mesh)
        note(split)
    note({})
    for split in list(found.values()):
        for passed in _passing(rule, split, arrays, mesh):
            note(passed)
    for moved in _with_moved_axes(rule, {}, arrays, mesh):
        for claim in claims:
            moved = _extend(moved, claim, rule, mesh)
        note(moved)
    return tuple(found.values())


def led(rule: Rule, arrays: Arrays, mesh: Mesh) -> list[Split]:
    """The candidates that keep the sharding of some array as far as the equation can be split so."""
    return [] if rule.fixed is not None or rule.manual is not None else _led(rule, _claims(rule, arrays, mesh), mesh)


def key_of(split: Split) -> tuple[tuple[int, Atoms], ...]:
    """A key that is equal for equal splits."""
    return tuple(sorted((f, atoms) for f, atoms in split.items() if atoms))


def _claims(rule: Rule, arrays: Arrays, mesh: Mesh) -> list[Split]:
    """The splits of the factors that each array suggests, the largest array first."""
    tensors = [
        (x.bytes, project(dims, x.sharding.dims, rule.factors, mesh))
        for x, dims in zip(arrays, (*rule.operands, *rule.results), strict=True)
        if x is not None
    ]
    return [claim for _, claim in sorted(tensors, key=lambda t: -t[0]) if claim]


def _led(rule: Rule, claims: Sequence[Split], mesh: Mesh) -> list[Split]:
    leaders = [*claims, *({f: atoms} for claim in claims if len(claim) > 1 for f, atoms in claim.items())]
    found = []
    for leader in leaders:
        split = _extend({}, leader, rule, mesh)
        for claim in claims:
            split = _extend(split, claim, rule, mesh)
        found.append(split)
    return found


def _extend(split: Split, claim: Split, rule: Rule, mesh: Mesh) -> Split:
    """Adds the factors of a claim that do not contradict the split."""
    for f, atoms in claim.items():
        current = split.get(f, ())
        if atoms[: len(current)] != current or len(atoms) == len(current):
            continue
        used = {
            a
            for g, split_atoms in split.items()
            if g != f and rule.component[g] == rule.component[f]
            for a in split_atoms
        }
        extended = {**split, f: atoms}
        if not used & set(atoms) and is_valid(rule, extended, mesh):
            split = extended
    return split


def _passing(rule: Rule, split: Split, arrays: Arrays, mesh: Mesh) -> Iterator[Split]:
    """The split with parts of unreduced operands passing through, where the equation is linear in them."""
    for k, (monoid, operands) in enumerate(rule.linear):
        partial = {
            a: None
            for i in sorted(operands)
            if (x := arrays[i]) is not None
            for a, m in x.sharding.unreduced
            if m == monoid
        }
        atoms = passable(rule, k, tuple(a for a in mesh.atoms if a in partial), mesh)
        if atoms and is_valid(rule, passed := {**split, -1 - k: atoms}, mesh):
            yield passed


def spread(rule: Rule, arrays: Arrays, mesh: Mesh) -> Iterator[Split]:
    """Splits in which atoms of a dimension that becomes the minor one of a product are spread over all of it.

    Parts of a minor dimension are not contiguous where the major one is whole: some of its atoms move there.
    """
    products = [dim for dims in (*rule.operands, *rule.results) for dim in dims if len(dim) > 1]
    for x, dims in zip(arrays, rule.operands if products else (), strict=False):
        for dim, atoms in zip(dims, x.sharding.dims if x is not None else ()):
            for product in products:
                if len(dim) != 1 or len(atoms) < 2 or dim[0] not in product[1:]:
                    continue
                split, left = {}, atoms
                for f in product[: product.index(dim[0])]:
                    k = next((k for k in range(1, len(left)) if mesh.count(left[-k:]) == rule.factors[f].size), None)
                    if k is None:
                        break
                    split[f], left = left[-k:], left[:-k]
                else:
                    if is_valid(rule, split := {**split, dim[0]: left}, mesh):
                        yield split


def _with_moved_axes(rule: Rule, split: Split, arrays: Arrays, mesh: Mesh) -> Iterator[Split]:
    """Splits in which atoms that have to leave a dimension move to a parallel factor: an all-to-all, not a gather."""
    used = {a for atoms in split.values() for a in atoms}
    for x, dims in zip(arrays, rule.operands, strict=False):
        if x is None:
            continue
        for own, atoms in zip(dims, x.sharding.dims, strict=False):
            if not atoms or used & set(atoms):
                continue
            free = [(f, (*split.get(f, ()), *atoms)) for dim in dims for f in dim if rule.factors[f].kind == PARALLEL]
            padded = [_padding(rule.factors[f].size, mesh.count(have)) for f, have in free]
            most = _PADDING if 0 not in padded else 0
            for (f, have), padding in zip(free, padded, strict=True):
                if padding <= most and is_valid(rule, moved := {**split, f: have}, mesh):
                    yield moved
            if most and (shared := _shared(rule, split, own, atoms, dims, mesh)):
                yield shared


def _shared(rule: Rule, split: Split, own: tuple[int, ...], atoms: Atoms, dims: Dims, mesh: Mesh) -> Split | None:
    """The split with the atoms of a dimension dealt out to several factors; None if that is not possible.

    So 8 devices split 4 key heads with 4 query heads each into 4 times 2 parts. Atoms that no other factor takes evenly
    stay: of 256 parts of a sequence, 64 become parts of 64 heads, and 4 remain.
    """
    shared = dict(split)
    for f in (f for dim in dims if dim != own for f in dim if rule.factors[f].kind in (PARALLEL, REDUCE)):
        have, size = shared.get(f, ()), rule.factors[f].size
        most = next((k for k in range(len(atoms), 0, -1) if size % mesh.count((*have, *atoms[-k:])) == 0), 0)
        if most:
            shared[f], atoms = (*have, *atoms[-most:]), atoms[:-most]
    if atoms and len(own) == 1 and len(shared) > len(split) and rule.factors[own[0]].kind != REPLICATE:
        shared[own[0]], atoms = (*shared.get(own[0], ()), *atoms), ()
    return shared if not atoms and is_valid(rule, shared, mesh) else None


def _padding(n: int, parts: int) -> float:
    """How much longer equal parts are together than what they hold, as a part of it."""
    return -(-n // parts) * parts / n - 1 if n else math.inf
