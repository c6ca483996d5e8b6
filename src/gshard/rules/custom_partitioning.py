"""Operators with JAX's ``custom_partitioning``: the user's functions determine the splits and the per-device program.

The factors are those of the ``sharding_rule``; without one, each dimension has its own factor. On a mesh, gshard calls
the user's functions to find out which factors can be split, and which factors only together. Each device runs the
program that ``partition`` returns for its parts. If nothing is split, it runs the original function.

    i k, k j -> i j     "sharding_rule"; partition refuses k, or its program adds the parts over the axes of k

If a program ends with a sum of its results over the axes of a factor (``jax.lax.psum``), gshard runs the program
without this sum. The results are then parts of sums, and the plan decides where to add them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gshard.comm.shards import Shards
from gshard.core.errors import RuleError
from gshard.core.mesh import Atoms, Mesh
from gshard.core.planning_tables import tabulated
from gshard.core.rule import COMMUNICATE, PARALLEL, REDUCE, REPLICATE, Factor, Rule, RuleMaker, Split, place, project
from gshard.language.per_device import renamed
from gshard.language.registry import Call, rule
from gshard.language.user_partition import Arrays, DeviceProgram, Factors, OnMesh, Partitioned

_MOST_TRIALS = 64  # sets of factors to try to split together with one factor
_UNEVEN = "no axis of the mesh divides a dimension of it, and gshard gives a kernel no padded parts"


@rule("custom_partitioning")
def custom_partitioning(call: Call) -> Rule:
    """Nothing can be split without a mesh. On a mesh, the user's functions determine the rule (``Rule.on_mesh``)."""
    operator = Partitioned.of(call.params)
    try:
        hash(operator)
    except TypeError:  # a static argument without a hash
        return _without_mesh(operator)
    return _shared(operator)


@tabulated(1024)
def _shared(operator: Partitioned) -> Rule:
    return _without_mesh(operator)


def _without_mesh(operator: Partitioned) -> Rule:
    make = RuleMaker()
    arrays = [[make.replicate(n) for n in shape] for shape, _ in operator.types]
    rules: dict[Mesh, Rule] = {}

    def on_mesh(mesh: Mesh) -> Rule:
        if mesh not in rules:
            rules[mesh] = _RuleOnMesh(operator, mesh).rule()
        return rules[mesh]

    operands = len(operator.in_types)
    return make.rule(arrays[:operands], arrays[operands:], local=_run_whole, on_mesh=on_mesh)


def _run_whole(shards: Shards, *arrays: Any) -> list[Any]:
    """Runs the original function on whole arrays."""
    return renamed(shards.params["call"], {})(*arrays)


class _RuleOnMesh:
    """Finds the rule of an equation on a mesh, by calls of the user's functions."""

    def __init__(self, operator: Partitioned, mesh: Mesh):
        self.operator, self.mesh = operator, mesh
        self.user = OnMesh(operator, mesh)
        self.factors: Factors = self.user.factors()
        self.table = [
            Factor(n, REPLICATE if f in self.factors.whole or n <= 1 else PARALLEL)
            for f, n in enumerate(self.factors.sizes)
        ]
        # The factors of results.
        self.in_results = {f for dims in self.factors.dims[len(operator.in_types) :] for dim in dims for f in dim}
        # Factors that must be split together form a group, which has the number of its first factor.
        self.group = list(range(len(self.table)))
        self.kinds: dict[int, str] = {}  # the kinds of the groups that can be split
        self.monoids: dict[int, str] = {}  # the monoids with which programs combine their results, by group

    def rule(self) -> Rule:
        """The rule with the factors that can be split."""
        for f, factor in enumerate(self.table):
            if factor.kind != REPLICATE and self.group[f] not in self.kinds:
                self._find_split(f)
        make = RuleMaker()
        factor_of: dict[int, int] = {}  # the factor of the rule for each group
        for group in range(len(self.table)):
            members = [f for f in range(len(self.table)) if self.group[f] == group]
            if members:
                size = max(self.factors.sizes[f] for f in members)
                kind = self.kinds.get(group, REPLICATE)
                factor_of[group] = make.factor(size, kind, self.monoids.get(group))[0]
        combined = {factor_of[group] for group in self.monoids}
        arrays = [[tuple(factor_of[self.group[f]] for f in dim) for dim in dims] for dims in self.factors.dims]
        operands, results = arrays[: len(self.operator.in_types)], arrays[len(self.operator.in_types) :]

        def shardings_of(split: Mapping[int, Atoms]) -> Arrays:
            return tuple(place(tuple(dims), split) for dims in arrays)

        def program_of(split: Mapping[int, Atoms]) -> DeviceProgram | None:
            """The program of each device, without its last collective if the plan combines the results."""
            program = self.user.program(shardings_of(split))
            atoms = frozenset(a for f in combined for a in split.get(f, ()))
            if program is None or not atoms:
                return program
            unfinished = program.unfinished
            return unfinished.program if unfinished is not None and unfinished.atoms == atoms else None

        def allowed(mesh: Mesh, split: Split) -> bool:
            if not any(split.values()):
                return True
            try:
                program = program_of(split)
            except RuleError:
                return False
            if program is None:
                return False
            in_results = {f for dims in results for dim in dims for f in dim} | combined
            return all(f in in_results or program.over.issuperset(atoms) for f, atoms in split.items())

        def sends(mesh: Mesh, split: Split) -> int:
            program = program_of(split) if any(split.values()) else None
            return 0 if program is None else program.sent

        def local(shards: Shards, *arrays: Any) -> list[Any]:
            if not any(shards.split.values()):
                return _run_whole(shards, *arrays)
            program = program_of(shards.split)
            if program is None:
                raise RuleError("partition does not take this split", hint=self.user.refusal or None)
            return shards.run_program(program.run, arrays)

        known = bool(self.kinds) or all(factor.kind == REPLICATE for factor in self.table)
        why = "" if known else " ".join((self.user.refusal or _UNEVEN).split())[:200]
        return make.rule(operands, results, local=local, sends=sends, allowed=allowed, known=known, why=why)

    def _find_split(self, f: int) -> None:
        """Finds a split of a factor that ``partition`` accepts, and records the factors that are split with it."""
        for atoms in self._atoms_to_try(f):
            for others in self._sets_to_try_with(f, atoms):
                shardings = self._settled({g: atoms for g in (*self._members(f), *others)})
                split = None if shardings is None else self._projected(shardings)
                if shardings is None or not split or f not in split:
                    continue
                program = self.user.program(shardings)
                if program is not None and self._is_complete(split, program):
                    self._record(split, program)
                    return

    def _atoms_to_try(self, f: int) -> Iterator[Atoms]:
        """The atoms of each axis, without the last ones if the axis does not divide the factor."""
        for atoms in self.mesh.atoms_of.values():
            while atoms and self.factors.sizes[f] % self.mesh.count(atoms):
                atoms = atoms[:-1]
            if atoms:
                yield atoms

    def _sets_to_try_with(self, f: int, atoms: Atoms) -> Iterator[tuple[int, ...]]:
        """Sets of factors that may have to be split together with a factor. The first set is empty.

        A sharding rule need not contain this. For example, the rule of JAX's own attention gives keys and values their
        own factors, and its ``partition`` refuses a split of queries alone. In each other array, a dimension of the
        same size is a candidate, preferably at the same place; larger sets of them come first. If an array has none,
        the dimension at the same place of an array of the same rank is a candidate (keys may have fewer heads);
        smaller sets of them come first.
        """
        yield ()
        members, parts = set(self._members(f)), self.mesh.count(atoms)
        arrays = self.factors.dims
        places = {(d, len(dims)) for dims in arrays for d, dim in enumerate(dims) if members & set(dim)}
        places_in_any = {d for d, _ in places}
        same_size: list[int] = []
        other_size: list[int] = []
        for dims in arrays:
            if members & {g for dim in dims for g in dim}:
                continue
            fitting = [(d, dim[0]) for d, dim in enumerate(dims) if len(dim) == 1 and self._may_join(dim[0], parts)]
            equal = [(d, g) for d, g in fitting if self.factors.sizes[g] == self.factors.sizes[f]]
            equal.sort(key=lambda candidate: candidate[0] not in places_in_any)
            same_size += [g for _, g in equal[:1]]
            other_size += [g for d, g in fitting if not equal and (d, len(dims)) in places]
        large_first = itertools.islice(_subsets(same_size, largest_first=True), _MOST_TRIALS)
        small_first = _subsets(other_size, largest_first=False)
        for others in itertools.islice(_diagonally(list(large_first), small_first), _MOST_TRIALS):
            if others:
                yield tuple(sorted({h for g in others for h in self._members(g)}))

    def _may_join(self, g: int, parts: int) -> bool:
        """Whether no split of a factor is found yet, and the number of parts divides its size."""
        is_open = self.table[g].kind != REPLICATE and self.group[g] not in self.kinds
        return is_open and self.factors.sizes[g] % parts == 0

    def _settled(self, split: Mapping[int, Atoms]) -> Arrays | None:
        """The shardings that ``partition`` returns for the shardings of a split; None if it refuses."""
        arrays = tuple(place(dims, split) for dims in self.factors.dims)
        for dims in arrays:
            atoms = [a for dim in dims for a in dim]
            if len(set(atoms)) != len(atoms):
                return None
        if self.in_results.issuperset(split) and not self._is_in_operands(split):
            arrays = self.user.propagated(arrays)
        return self.user.settled(self.user.inferred(arrays))

    def _is_in_operands(self, split: Mapping[int, Atoms]) -> bool:
        operands = self.factors.dims[: len(self.operator.in_types)]
        return any(f in dim for dims in operands for dim in dims for f in split)

    def _projected(self, arrays: Arrays) -> Split | None:
        """The split with these shardings; None if no split has them."""
        split: Split = {}
        for dims, sharding in zip(self.factors.dims, arrays, strict=True):
            for f, atoms in project(dims, sharding, self.table, self.mesh).items():
                if split.setdefault(f, atoms) != atoms:
                    return None
        exact = all(place(dims, split) == sharding for dims, sharding in zip(self.factors.dims, arrays, strict=True))
        return split if exact else None

    def _is_complete(self, split: Split, program: DeviceProgram) -> bool:
        """Whether the program communicates over the atoms of factors that no result has."""
        in_results = {atoms for f, atoms in split.items() if f in self.in_results}
        return all(atoms in in_results or program.over.issuperset(atoms) for atoms in split.values())

    def _record(self, split: Split, program: DeviceProgram) -> None:
        """Joins the factors that a split splits together to a group, and notes its kind."""
        for atoms in dict.fromkeys(split.values()):
            members = sorted({g for f, split_over in split.items() if split_over == atoms for g in self._members(f)})
            if not self._can_be_one(members):
                continue
            kind, monoid = PARALLEL, None
            sizes = {self.factors.sizes[g] for g in members}
            if program.over.intersection(atoms) or len(sizes) > 1 or self.factors.communicated.intersection(members):
                kind = COMMUNICATE
            if not self.in_results.intersection(members):
                kind = COMMUNICATE
                unfinished = program.unfinished
                if unfinished is not None and unfinished.atoms == frozenset(atoms) and len(sizes) == 1:
                    kind, monoid = REDUCE, unfinished.monoid
            for g in members:
                self.kinds.pop(self.group[g], None)
                self.monoids.pop(self.group[g], None)
                self.group[g] = members[0]
            self.kinds[members[0]] = kind
            if monoid is not None:
                self.monoids[members[0]] = monoid

    def _can_be_one(self, members: Sequence[int]) -> bool:
        """Whether one factor may replace these: no array has two of them, and no product has one of another size."""
        sizes = {self.factors.sizes[g] for g in members}
        for dims in self.factors.dims:
            with_member = [dim for dim in dims for f in dim if f in members]
            if len(with_member) > 1 or (len(sizes) > 1 and any(len(dim) > 1 for dim in with_member)):
                return False
        return True

    def _members(self, f: int) -> tuple[int, ...]:
        return tuple(g for g in range(len(self.table)) if self.group[g] == self.group[f])


def _subsets(factors: Sequence[int], *, largest_first: bool) -> Iterator[tuple[int, ...]]:
    distinct = list(dict.fromkeys(factors))
    sizes = range(len(distinct), -1, -1) if largest_first else range(len(distinct) + 1)
    return itertools.chain.from_iterable(itertools.combinations(distinct, size) for size in sizes)


def _diagonally(left: Sequence[tuple[int, ...]], right: Iterator[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    """All concatenations of an item of each, in the order of the sum of their positions."""
    seen: list[tuple[int, ...]] = []
    for n, item in enumerate(right):
        seen.append(item)
        for k in range(n + 1):
            if n - k < len(left):
                yield (*left[n - k], *seen[k])
    for n in range(len(seen), len(seen) + len(left) - 1):
        for k in range(len(seen)):
            if 0 <= n - k < len(left):
                yield (*left[n - k], *seen[k])
