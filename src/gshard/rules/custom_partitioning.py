"""Operators that the user partitioned (``custom_partitioning``): split as ``partition`` takes it, and run as it says.

The factors are those of the ``sharding_rule``; without one each dimension has a factor of its own. Which of them can be
split, and which only together, the user's functions tell once there is a mesh: a factor is split in all arrays that
``partition`` wants split with it. Each device runs the program that ``partition`` returns for its parts. Where nothing
is split, it is the function itself.

    i k, k j -> i j     "sharding_rule"; partition refuses k, or its program adds the parts up over the axes of k

Where a program ends by adding its results up over the axes of a factor (``jax.lax.psum``), that is left to the plan:
each device runs the program without it, and the results are parts of sums.
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
from gshard.core.rule import COMMUNICATE, PARALLEL, REDUCE, REPLICATE, Factor, Rule, RuleMaker
from gshard.core.split import Split, place, project
from gshard.language.per_device import renamed
from gshard.language.registry import Call, rule
from gshard.language.sharding_rule import Factors
from gshard.language.user_partition import Arrays, OnMesh
from gshard.language.user_partition_types import DeviceProgram, Partitioned

_MOST_TRIALS = 64  # of factors that may have to be split together with one
_UNEVEN = "no axis of the mesh divides a dimension of it, and gshard gives a kernel no padded parts"


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
        self.monoids: dict[int, str] = {}  # of those over which programs end by combining their results

    def rule(self) -> Rule:
        """The factors that can be split, and how the equation runs then."""
        for f, factor in enumerate(self.table):
            if factor.kind != REPLICATE and self.group[f] not in self.kinds:
                self._try(f)
        make, numbers = RuleMaker(), {}
        for f in range(len(self.table)):
            own = [g for g in range(len(self.table)) if self.group[g] == f]
            if own:
                size = max(self.factors.sizes[g] for g in own)
                numbers[f] = make.factor(size, self.kinds.get(f, REPLICATE), self.monoids.get(f))[0]
        combined = {numbers[f] for f in self.monoids}
        dims = [[tuple(numbers[self.group[f]] for f in dim) for dim in own] for own in self.factors.dims]
        operands, results = dims[: len(self.said.in_types)], dims[len(self.said.in_types) :]

        def arrays_of(split: Mapping[int, Atoms]) -> Arrays:
            return tuple(place(tuple(own), split) for own in dims)

        def program_of(split: Mapping[int, Atoms]) -> DeviceProgram | None:
            """What each device runs: without its last collective, if the plan combines the results."""
            program = self.user.program(arrays_of(split))
            atoms = frozenset(a for f in combined for a in split.get(f, ()))
            if program is None or not atoms:
                return program
            rest = program.unfinished
            return rest.program if rest is not None and rest.atoms == atoms else None

        def allowed(mesh: Mesh, split: Split) -> bool:
            if not any(split.values()):
                return True
            try:
                program = program_of(split)
            except RuleError:
                return False
            made = {f for own in results for dim in own for f in dim} | combined
            return program is not None and all(
                f in made or program.over.issuperset(atoms) for f, atoms in split.items()
            )

        def sends(mesh: Mesh, split: Split) -> int:
            program = program_of(split) if any(split.values()) else None
            return 0 if program is None else program.sent

        def local(shards: Shards, *arrays: Any) -> list[Any]:
            if not any(shards.split.values()):
                return _whole(shards, *arrays)
            program = program_of(shards.split)
            if program is None:
                raise RuleError("partition does not take this split", hint=self.user.refusal or None)
            return _run(program, shards, arrays)

        known = bool(self.kinds) or all(factor.kind == REPLICATE for factor in self.table)
        why = "" if known else " ".join((self.user.refusal or _UNEVEN).split())[:200]
        return make.rule(operands, results, local=local, sends=sends, allowed=allowed, known=known, why=why)

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
        """The factors that may have to be split together with one: none first.

        A sharding rule need not say it: that of JAX's own attention gives keys and values factors of their own, and its
        ``partition`` refuses them where they are not split as the queries are. What has the same size is most likely
        the same: of each other array a dimension in the same place or else another one, all of them first. A dimension
        of another size, as keys of fewer heads have, is in the same place of an array of the same rank; as few as are
        demanded.
        """
        yield ()
        members, parts = set(self._members(f)), self.mesh.count(atoms)
        every = self.factors.dims
        places = {(d, len(dims)) for dims in every for d, dim in enumerate(dims) if members & set(dim)}
        same, other = [], []
        for dims in every:
            if members & {g for dim in dims for g in dim}:
                continue
            fitting = [(d, dim[0]) for d, dim in enumerate(dims) if len(dim) == 1 and self._may_join(dim[0], parts)]
            equal = [(d, g) for d, g in fitting if self.factors.sizes[g] == self.factors.sizes[f]]
            equal.sort(key=lambda found: found[0] not in {d for d, _ in places})
            same += [g for _, g in equal[:1]]
            other += [g for d, g in fitting if not equal and (d, len(dims)) in places]
        same, other = list(dict.fromkeys(same)), list(dict.fromkeys(other))
        # Nothing of another size first, and everything of the same size.
        more = (some for count in range(len(other) + 1) for some in itertools.combinations(other, count))
        left = (some for count in range(len(same), -1, -1) for some in itertools.combinations(same, count))
        for also in itertools.islice(_by_turns(list(itertools.islice(left, _MOST_TRIALS)), more), _MOST_TRIALS):
            if also:
                yield tuple(sorted({h for g in also for h in self._members(g)}))

    def _may_join(self, g: int, parts: int) -> bool:
        """Whether nothing is found of a factor yet, and it can be split in so many parts."""
        open_ = self.table[g].kind != REPLICATE and self.group[g] not in self.kinds
        return open_ and self.factors.sizes[g] % parts == 0

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
            kind, monoid = PARALLEL, None
            sizes = {self.factors.sizes[g] for g in members}
            if program.over.intersection(atoms) or len(sizes) > 1 or self.factors.communicated.intersection(members):
                kind = COMMUNICATE
            if not self.made.intersection(members):
                kind = COMMUNICATE
                rest = program.unfinished
                if rest is not None and rest.atoms == frozenset(atoms) and len(sizes) == 1:
                    kind, monoid = REDUCE, rest.monoid
            for g in members:
                self.kinds.pop(self.group[g], None)
                self.monoids.pop(self.group[g], None)
                self.group[g] = members[0]
            self.kinds[members[0]] = kind
            if monoid is not None:
                self.monoids[members[0]] = monoid

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


def _by_turns(left: Sequence[tuple[int, ...]], more: Iterator[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    """All pairs of both, those that come early in both first."""
    seen: list[tuple[int, ...]] = []
    for n, others in enumerate(more):
        seen.append(others)
        for k in range(n + 1):
            if n - k < len(left):
                yield (*left[n - k], *seen[k])
    for n in range(len(seen), len(seen) + len(left) - 1):
        for k in range(len(seen)):
            if 0 <= n - k < len(left):
                yield (*left[n - k], *seen[k])


def _run(program: DeviceProgram, shards: Shards, arrays: Sequence[Any]) -> list[Any]:
    """The user's program of one device, its collectives noted."""
    made = jax.make_jaxpr(program.run)(*arrays)
    if shards.note is not None:
        for kind, atoms, sent, operand in collectives_of(made, shards.mesh.atom_sizes):
            shards.note(kind, atoms, sent, operand)
    return list(jaxpr_as_fun(made)(*arrays))
