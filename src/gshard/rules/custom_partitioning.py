"""Operators that the user partitioned (``custom_partitioning``): split as ``partition`` takes it, and run as it says.

The factors are those of the ``sharding_rule``; without one each dimension has a factor of its own. Which of them can be
split, and which only together, the user's functions tell once there is a mesh: a factor is split in all arrays that
``partition`` wants split with it. Each device runs the program that ``partition`` returns for its parts. Where nothing
is split, it is the function itself.

    i k, k j -> i j     "sharding_rule"; partition refuses k, or its program adds the parts up over the axes of k
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from gshard.comm.collectives import collectives_of
from gshard.comm.shards import Shards
from gshard.core.errors import RuleError
from gshard.core.mesh import Atoms, Mesh
from gshard.core.planning_tables import tabulated
from gshard.core.rule import COMMUNICATE, PARALLEL, REPLICATE, Factor, Rule, RuleMaker
from gshard.core.split import Split, place, project
from gshard.language.per_device import renamed
from gshard.language.registry import Call, rule
from gshard.language.sharding_rule import Factors
from gshard.language.user_partition import Arrays, DeviceProgram, OnMesh, Partitioned

_MOST_TRIALS = 64  # of factors that may have to be split together with one


@rule("custom_partitioning")
def custom_partitioning(call: Call) -> Rule:
    """All dimensions are whole until there is a mesh; then the user's functions tell (``Rule.on_mesh``)."""
    said = Partitioned.of(call.params)
    try:
        hash(said)
    except TypeError:  # a static argument without a hash
        return _without_mesh(said)
    return _shared(said)


@tabulated(1024)
def _shared(said: Partitioned) -> Rule:
    return _without_mesh(said)


def _without_mesh(said: Partitioned) -> Rule:
    make, known = RuleMaker(), dict[Mesh, Rule]()
    arrays = [[make.replicate(n) for n in shape] for shape, _ in said.types]

    def on_mesh(mesh: Mesh) -> Rule:
        if mesh not in known:
            known[mesh] = _OfUser(said, mesh).rule()
        return known[mesh]

    operands = len(said.in_types)
    return make.rule(arrays[:operands], arrays[operands:], local=_whole, on_mesh=on_mesh)


def _whole(shards: Shards, *arrays: Any) -> list[Any]:
    """The function itself, on whole arrays."""
    return renamed(shards.params["call"], {})(*arrays)


class _OfUser:
    """The rule of an equation on a mesh, as the user's functions tell it."""

    def __init__(self, said: Partitioned, mesh: Mesh):
        self.said, self.mesh = said, mesh
        self.user = OnMesh(said, mesh)
        self.factors: Factors = self.user.factors()
        self.table = [
            Factor(n, REPLICATE if f in self.factors.whole or n <= 1 else PARALLEL)
            for f, n in enumerate(self.factors.sizes)
        ]
        self.made = {f for dims in self.factors.dims[len(said.in_types) :] for dim in dims for f in dim}
        self.group = list(range(len(self.table)))  # factors that are split together have the number of the first
        self.kinds: dict[int, str] = {}  # of the groups that can be split

    def rule(self) -> Rule:
        """The factors that can be split, and how the equation runs then."""
        for f, factor in enumerate(self.table):
            if factor.kind != REPLICATE and self.group[f] not in self.kinds:
                self._try(f)
        make, numbers = RuleMaker(), {}
        for f in range(len(self.table)):
            own = [g for g in range(len(self.table)) if self.group[g] == f]
            if own:
                numbers[f] = make.factor(max(self.factors.sizes[g] for g in own), self.kinds.get(f, REPLICATE))[0]
        dims = [[tuple(numbers[self.group[f]] for f in dim) for dim in own] for own in self.factors.dims]
        operands, results = dims[: len(self.said.in_types)], dims[len(self.said.in_types) :]

        def arrays_of(split: Mapping[int, Atoms]) -> Arrays:
            return tuple(place(tuple(own), split) for own in dims)

        def allowed(mesh: Mesh, split: Split) -> bool:
            if not any(split.values()):
                return True
            try:
                program = self.user.program(arrays_of(split))
            except RuleError:
                return False
            made = {f for own in results for dim in own for f in dim}
            return program is not None and all(
                f in made or program.over.issuperset(atoms) for f, atoms in split.items()
            )

        def sends(mesh: Mesh, split: Split) -> int:
            program = self.user.program(arrays_of(split)) if any(split.values()) else None
            return 0 if program is None else program.sent

        def local(shards: Shards, *arrays: Any) -> list[Any]:
            program = self.user.program(arrays_of(shards.split)) if any(shards.split.values()) else None
            return _whole(shards, *arrays) if program is None else _run(program, shards, arrays)

        known = bool(self.kinds) or all(n <= 1 for n in self.factors.sizes)
        return make.rule(operands, results, local=local, sends=sends, allowed=allowed, known=known)

    def _try(self, f: int) -> None:
        """Finds a split of a factor that ``partition`` takes, and what is split with it."""
        for atoms in self._atoms(f):
            for also in self._together(f, atoms):
                start = {g: atoms for g in (*self._members(f), *also)}
                settled = self._settled(start)
                split = None if settled is None else self._projected(settled)
                program = None if settled is None or not split or f not in split else self.user.program(settled)
                if split and program is not None and self._is_complete(split, program):
                    self._note(split, program)
                    return

    def _atoms(self, f: int) -> Iterator[Atoms]:
        """What to try: each axis, or as much of it as divides the factor."""
        for own in self.mesh.atoms_of.values():
            while own and self.factors.sizes[f] % self.mesh.count(own):
                own = own[:-1]
            if own:
                yield own

    def _together(self, f: int, atoms: Atoms) -> Iterator[tuple[int, ...]]:
        """The factors that may have to be split together with one: none first, then most others first.

        A sharding rule need not say it: that of JAX's own attention gives keys and values factors of their own, and its
        ``partition`` refuses them where they are not split as the queries are. Others are dimensions of the same size,
        of each array one, those in the same place first; then such in the same place of any size.
        """
        yield ()
        members = set(self._members(f))
        places = {d for dims in self.factors.dims for d, dim in enumerate(dims) if members & set(dim)}
        parts, tried = self.mesh.count(atoms), {frozenset[int]()}
        others = [dims for dims in self.factors.dims if not members & {g for dim in dims for g in dim}]
        trials = itertools.count()
        for any_size in (False, True):
            choices = []
            for dims in others:
                found = [(d not in places, d, dim[0]) for d, dim in enumerate(dims) if len(dim) == 1]
                found = [
                    (elsewhere, d, g)
                    for elsewhere, d, g in found
                    if self.table[g].kind != REPLICATE
                    and (not elsewhere if any_size else self.factors.sizes[g] == self.factors.sizes[f])
                    and self.factors.sizes[g] % parts == 0
                ]
                choices.append([*(g for _, _, g in sorted(found)), None])
            for chosen in itertools.product(*choices):
                also = frozenset(g for g in chosen if g is not None)
                if also not in tried:
                    tried.add(also)
                    if next(trials) >= _MOST_TRIALS:
                        return
                    yield tuple(sorted({h for g in also for h in self._members(g)}))

    def _settled(self, split: Mapping[int, Atoms]) -> Arrays | None:
        arrays = tuple(place(dims, split) for dims in self.factors.dims)
        if any(len(set(atoms)) != len(atoms) for atoms in (tuple(a for dim in dims for a in dim) for dims in arrays)):
            return None
        if self.made.issuperset(split) and not self._is_read(split):
            arrays = self.user.propagated(arrays)
        return self.user.settled(self.user.inferred(arrays))

    def _is_read(self, split: Mapping[int, Atoms]) -> bool:
        operands = self.factors.dims[: len(self.said.in_types)]
        return any(f in dim for dims in operands for dim in dims for f in split)

    def _projected(self, arrays: Arrays) -> Split | None:
        """The factors' atoms; None if factors cannot say such shardings."""
        split: Split = {}
        for dims, own in zip(self.factors.dims, arrays, strict=True):
            for f, atoms in project(dims, own, self.table, self.mesh).items():
                if split.setdefault(f, atoms) != atoms:
                    return None
        exact = all(place(dims, split) == own for dims, own in zip(self.factors.dims, arrays, strict=True))
        return split if exact else None

    def _is_complete(self, split: Split, program: DeviceProgram) -> bool:
        """Whether parts of what is split in operands only are put together: the program communicates over the axes."""
        made = {atoms for f, atoms in split.items() if f in self.made}
        return all(atoms in made or program.over.issuperset(atoms) for atoms in split.values())

    def _note(self, split: Split, program: DeviceProgram) -> None:
        for atoms in dict.fromkeys(split.values()):
            members = sorted({g for f, own in split.items() if own == atoms for g in self._members(f)})
            if not self._can_be_one(members):
                continue
            kind = PARALLEL
            sizes = {self.factors.sizes[g] for g in members}
            if program.over.intersection(atoms) or len(sizes) > 1 or self.factors.communicated.intersection(members):
                kind = COMMUNICATE
            if not self.made.intersection(members):
                kind = COMMUNICATE
            for g in members:
                self.kinds.pop(self.group[g], None)
                self.group[g] = members[0]
            self.kinds[members[0]] = kind

    def _can_be_one(self, members: Sequence[int]) -> bool:
        """Whether no array has two of these factors, nor a product one of another size."""
        sizes = {self.factors.sizes[g] for g in members}
        for dims in self.factors.dims:
            found = [dim for dim in dims for f in dim if f in members]
            if len(found) > 1 or (len(sizes) > 1 and any(len(dim) > 1 for dim in found)):
                return False
        return True

    def _members(self, f: int) -> tuple[int, ...]:
        return tuple(g for g in range(len(self.table)) if self.group[g] == self.group[f])


def _run(program: DeviceProgram, shards: Shards, arrays: Sequence[Any]) -> list[Any]:
    """The user's program of one device, its collectives noted."""
    made = jax.make_jaxpr(program.run)(*arrays)
    if shards.note is not None:
        for kind, atoms, sent, operand in collectives_of(made, shards.mesh.atom_sizes):
            shards.note(kind, atoms, sent, operand)
    return list(jaxpr_as_fun(made)(*arrays))
