"""Operators with JAX's ``custom_partitioning``: the user's functions determine the splits and the per-device program.

The factors are those of the ``sharding_rule``; without one, every device computes the whole. On a mesh, gshard calls
the user's functions to find out which factors can be split, and which factors only together. Each device runs the
program that ``partition`` returns for its parts. If nothing is split, it runs the original function.

    i k, k j -> i j     "sharding_rule"; partition refuses k, or its program adds the parts over the axes of k
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.experimental.custom_partitioning import BATCHING, SdyShardingRule
from jax.sharding import NamedSharding, PartitionSpec

from gshard.comm.shards import Shards
from gshard.comm.steps import PERMUTE, collectives_of
from gshard.core.errors import RuleError
from gshard.core.jax_adapter import closed
from gshard.core.jax_adapter_kernels import ir_types, read_sharding_rule
from gshard.core.mark import axes_of_entry, entries_of
from gshard.core.mesh import Atoms, Mesh, automatic_mesh
from gshard.core.planning_tables import tabulated
from gshard.core.rule import COMMUNICATE, PARALLEL, REPLICATE, Factor, Rule, RuleMaker, Split, place, project
from gshard.language.custom import Notation
from gshard.language.per_device import renamed
from gshard.language.registry import Call, rule
from gshard.rules.manual import atoms_of_axes, cuts_of

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
    if operator.sharding_rule is None:  # Shardy splits only operators that have one, too
        why = "its custom_partitioning has no sharding_rule"
        return make.rule(arrays[:operands], arrays[operands:], local=_run_whole, known=False, why=why)
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
                factor_of[group] = make.factor(size, kind)[0]
        arrays = [[tuple(factor_of[self.group[f]] for f in dim) for dim in dims] for dims in self.factors.dims]
        operands, results = arrays[: len(self.operator.in_types)], arrays[len(self.operator.in_types) :]

        def program_of(split: Mapping[int, Atoms]) -> DeviceProgram | None:
            return self.user.program(tuple(place(tuple(dims), split) for dims in arrays))

        def allowed(mesh: Mesh, split: Split) -> bool:
            if not any(split.values()):
                return True
            try:
                program = program_of(split)
            except RuleError:
                return False
            if program is None:
                return False
            in_results = {f for dims in results for dim in dims for f in dim}
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
                if program is None:
                    continue
                # A program communicates over the atoms of factors that no result has, or it is not complete.
                in_results = {atoms for g, atoms in split.items() if g in self.in_results}
                if all(atoms in in_results or program.over.issuperset(atoms) for atoms in split.values()):
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
        the dimension at the same place of an array of the same rank is a candidate (keys may have fewer heads).
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
            alone = [(d, dim[0]) for d, dim in enumerate(dims) if len(dim) == 1]
            unsplit = [(d, g) for d, g in alone if self.table[g].kind != REPLICATE and self.group[g] not in self.kinds]
            fitting = [(d, g) for d, g in unsplit if self.factors.sizes[g] % parts == 0]
            equal = [(d, g) for d, g in fitting if self.factors.sizes[g] == self.factors.sizes[f]]
            equal.sort(key=lambda candidate: candidate[0] not in places_in_any)
            same_size += [g for _, g in equal[:1]]
            other_size += [g for d, g in fitting if not equal and (d, len(dims)) in places]
        same_size = [*dict.fromkeys(same_size)]
        sets = itertools.chain(*(itertools.combinations(same_size, n) for n in range(len(same_size), -1, -1)))
        pairs = ((*others, *more) for others in sets for more in dict.fromkeys(((), tuple(other_size))))
        for others in itertools.islice(filter(None, pairs), _MOST_TRIALS):
            yield tuple(sorted({h for g in others for h in self._members(g)}))

    def _settled(self, split: Mapping[int, Atoms]) -> Arrays | None:
        """The shardings that ``partition`` returns for the shardings of a split; None if it refuses."""
        arrays = tuple(place(dims, split) for dims in self.factors.dims)
        for dims in arrays:
            atoms = [a for dim in dims for a in dim]
            if len(set(atoms)) != len(atoms):
                return None
        return self.user.settled(arrays)

    def _projected(self, arrays: Arrays) -> Split | None:
        """The split with these shardings; None if no split has them."""
        split: Split = {}
        for dims, sharding in zip(self.factors.dims, arrays, strict=True):
            for f, atoms in project(dims, sharding, self.table, self.mesh).items():
                if split.setdefault(f, atoms) != atoms:
                    return None
        exact = all(place(dims, split) == sharding for dims, sharding in zip(self.factors.dims, arrays, strict=True))
        return split if exact else None

    def _record(self, split: Split, program: DeviceProgram) -> None:
        """Joins the factors that a split splits together to a group, and notes its kind."""
        for atoms in dict.fromkeys(split.values()):
            members = sorted({g for f, split_over in split.items() if split_over == atoms for g in self._members(f)})
            if not self._can_be_one(members):
                continue
            sizes = {self.factors.sizes[g] for g in members}
            communicates = bool(program.over.intersection(atoms)) or not self.in_results.intersection(members)
            communicates |= len(sizes) > 1 or bool(self.factors.communicated.intersection(members))
            for g in members:
                self.kinds.pop(self.group[g], None)
                self.group[g] = members[0]
            self.kinds[members[0]] = COMMUNICATE if communicates else PARALLEL

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


# Calls the functions and sharding rules of ``custom_partitioning(f).def_partition`` on a mesh of the equation.


@dataclasses.dataclass(frozen=True)
class Partitioned:
    """The parameters of an equation of ``custom_partitioning``, without its jaxpr."""

    # the user's function; like Shardy, gshard does not call the ones that infer or propagate shardings
    partition: Callable[..., Any]
    sharding_rule: Any  # the user's sharding rule, or None
    static: tuple[Any, ...]  # the static arguments, which precede the others
    kinds: tuple[type, ...]  # the types of the static arguments
    in_tree: Any  # in_tree, out_tree: the pytree structures of operands and results
    out_tree: Any
    in_types: tuple[tuple[tuple[int, ...], Any], ...]  # in_types, out_types: shapes and dtypes of operands and results
    out_types: tuple[tuple[tuple[int, ...], Any], ...]

    @staticmethod
    def of(params: Mapping[str, Any]) -> Partitioned:
        """The relevant parameters of an equation."""
        body, _ = closed(params["call"])
        static = tuple(params["static_args"])
        return Partitioned(
            params["partition"],
            params["sharding_rule"],
            static,
            tuple(map(type, static)),
            params["in_tree"],
            params["out_tree"],
            tuple((tuple(v.aval.shape), v.aval.dtype) for v in body.invars),
            tuple((tuple(v.aval.shape), v.aval.dtype) for v in body.outvars),
        )

    @property
    def types(self) -> tuple[tuple[tuple[int, ...], Any], ...]:
        """Shapes and dtypes of operands, then of results."""
        return (*self.in_types, *self.out_types)


@dataclasses.dataclass(frozen=True, eq=False)
class DeviceProgram:
    """The user's per-device program for some shardings."""

    run: Callable[..., list[Any]]  # runs the program on one device's parts, with axes replaced by atoms
    sent: int  # bytes that each device sends
    over: frozenset[str]  # the atoms over which it communicates


# Converts sharding rules of ``jax.experimental.custom_partitioning`` to factors.


@dataclasses.dataclass(frozen=True, slots=True)
class Factors:
    """The factors of an equation."""

    sizes: tuple[int, ...]  # the size of each factor: the largest dimension that it stands for
    # for each dimension of each operand, then of each result, its factors, major to minor
    dims: tuple[tuple[tuple[int, ...], ...], ...]
    whole: frozenset[int]  # the factors that cannot be split
    communicated: frozenset[int]  # the factors along which devices communicate

    @staticmethod
    def of(notation: Notation, call: Call) -> Factors:
        """The factors of a sharding rule, for arrays of these shapes."""
        arrays, size_of = notation.factors(call)
        number_of, sizes = {name: i for i, name in enumerate(size_of)}, [*size_of.values()]
        of_kind = {kind: {number_of[name] for name, (k, _) in notation.kinds.items() if k == kind} for kind in _KINDS}
        dims_of_arrays = []
        for names, shape in zip(arrays, (*call.in_shapes, *call.out_shapes), strict=True):
            dims: list[tuple[int, ...]] = []
            for dim, n in zip(names, shape, strict=True):
                factors = tuple(number_of[name] for name in dim)
                if len(dim) == 1 and n == 1 < sizes[factors[0]]:  # a broadcast dimension stays whole
                    factors = (len(sizes),)
                    of_kind[REPLICATE].add(len(sizes))
                    sizes.append(1)
                dims.append(factors)
            used = [f for factors in dims for f in factors]
            if len(set(used)) != len(used):
                raise RuleError("the sharding_rule of a custom_partitioning names a factor twice.", got=notation.text)
            dims_of_arrays.append(tuple(dims))
        return Factors(tuple(sizes), tuple(dims_of_arrays), *(frozenset(of_kind[kind]) for kind in _KINDS))


_KINDS = (REPLICATE, COMMUNICATE)


def notation_of(rule: SdyShardingRule) -> Notation:
    """A sharding rule of JAX in the form of gshard's rules."""

    def word(name: str) -> str:
        return f"...{name.removeprefix(BATCHING) or '0'}_" if name.startswith(BATCHING) else name

    operands, results = (
        tuple(tuple((word(dim),) if isinstance(dim, str) else tuple(dim) for dim in array) for array in arrays)
        for arrays in (rule.operand_mappings, rule.result_mappings)
    )
    kinds: dict[str, tuple[str, str | None]] = dict.fromkeys(rule.need_replication_factors, (REPLICATE, None))
    kinds |= dict.fromkeys((*rule.reduction_factors, *rule.permutation_factors), (COMMUNICATE, None))
    return Notation(str(rule), operands, results, kinds, rule.factor_sizes, differ=True)


# The sharding of every operand, then of every result: for each dimension its atoms.
Arrays = tuple[tuple[Atoms, ...], ...]
_ROUNDS = 8  # largest number of calls of partition until its shardings no longer change


@dataclasses.dataclass(frozen=True, eq=False)
class _Proposal:
    """The return value of ``partition`` for some shardings, converted to atoms."""

    axes: tuple[tuple[str, int], ...]
    atoms_of: Mapping[str, Atoms]
    lower: Callable[..., Any]
    arrays: Arrays


class OnMesh:
    """Calls the functions of one equation on a mesh, and caches the resulting per-device programs."""

    def __init__(self, parameters: Partitioned, mesh: Mesh):
        self.parameters = parameters  # the parameters of the equation
        self.mesh = mesh  # the mesh
        self.refusal = ""  # the reason of the last refusal of shardings; empty if there was none
        self._programs: dict[Arrays, DeviceProgram | None] = {}

    def factors(self) -> Factors:
        """The factors of the sharding rule."""
        rule = self.parameters.sharding_rule
        operands = len(self.parameters.in_types)
        shapes = tuple(shape for shape, _ in self.parameters.types)
        dtypes = tuple(dtype for _, dtype in self.parameters.in_types)
        call = Call("custom_partitioning", {}, shapes[:operands], shapes[operands:], dtypes)
        if callable(rule):
            types = [jax.ShapeDtypeStruct(*t) for t in self.parameters.types]
            mesh, _, _ = self._named(tuple(((),) * len(shape) for shape in shapes))
            try:
                rule = rule(*self.parameters.static, mesh, ir_types(types[:operands]), ir_types(types[operands:]))
                text, details = rule if isinstance(rule, (tuple, list)) and len(rule) == 2 else (rule, {})
                rule = read_sharding_rule(text, **details) if isinstance(text, str) else text
            except Exception as error:
                raise RuleError(
                    f"the sharding_rule of a custom_partitioning failed: {type(error).__name__}: {error}",
                    got=f"sharding_rule: {self.parameters.sharding_rule}",
                ) from error
        if not isinstance(rule, SdyShardingRule):
            raise RuleError(
                "the sharding_rule of a custom_partitioning is neither text nor an SdyShardingRule.",
                got=f"{type(rule).__name__}: {rule!r}"[:200],
                hint="Give 'i j -> i j', an SdyShardingRule, or a function that returns one of these.",
            )
        return Factors.of(notation_of(rule), call)

    def settled(self, arrays: Arrays) -> Arrays | None:
        """The shardings that ``partition`` finally accepts, starting from some shardings; None if there are none."""
        for _ in range(_ROUNDS):
            proposal = self._proposal(arrays)
            if proposal is None:
                return None
            if proposal.arrays == arrays:
                return arrays
            arrays = proposal.arrays
        return None

    def program(self, arrays: Arrays) -> DeviceProgram | None:
        """The per-device program for these shardings; None if ``partition`` returns others, or if it fails."""
        if arrays not in self._programs:
            self._programs[arrays] = self._traced(arrays)
        return self._programs[arrays]

    def _traced(self, arrays: Arrays) -> DeviceProgram | None:
        proposal = self._proposal(arrays)
        if proposal is None or proposal.arrays != arrays:
            return None
        local = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in self._local(arrays)]
        operands = local[: len(self.parameters.in_types)]
        results = local[len(self.parameters.in_types) :]
        try:
            traced = jax.make_jaxpr(proposal.lower, axis_env=list(proposal.axes))(
                *self.parameters.in_tree.unflatten(operands)
            )
            jaxpr, _ = closed(traced)
            result_types = [(v.aval.shape, v.aval.dtype) for v in jaxpr.outvars]
            if result_types != [(r.shape, r.dtype) for r in results]:
                expected = ", ".join(f"{r.dtype}{list(r.shape)}" for r in results)
                got = ", ".join(f"{dtype}{list(shape)}" for shape, dtype in result_types)
                self.refusal = f"the program of one device makes {got} where its shardings say {expected}"
                return None
            run = renamed(traced, proposal.atoms_of)
            with jax.sharding.use_abstract_mesh(self.mesh.abstract_jax_mesh):
                over_atoms = jax.make_jaxpr(run, axis_env=list(self.mesh.atom_sizes.items()))(*operands)
        except Exception as error:  # a split whose program cannot run is not allowed
            self.refusal = f"the program of one device raises {type(error).__name__}: {error}"
            return None
        sent = list(collectives_of(over_atoms, self.mesh.atom_sizes))
        permuted = [atoms for kind, atoms, _, _ in sent if kind == PERMUTE]
        if any([a for a in self.mesh.atoms if a in atoms] != list(atoms) for atoms in permuted):
            # JAX 0.10 counts the positions of a ppermute in the order of the mesh, for any order of the named axes.
            self.refusal = "the program of one device permutes over axes in another order than the mesh's"
            return None
        total_bytes = sum(sent_bytes for _, _, sent_bytes, _ in sent)
        return DeviceProgram(run, total_bytes, frozenset(a for _, atoms, _, _ in sent for a in atoms))

    def _local(self, arrays: Arrays) -> list[tuple[tuple[int, ...], Any]]:
        count = self.mesh.count
        return [
            (tuple(n // count(atoms) for n, atoms in zip(shape, dims, strict=True)), dtype)
            for (shape, dtype), dims in zip(self.parameters.types, arrays, strict=True)
        ]

    def _proposal(self, arrays: Arrays) -> _Proposal | None:
        pairs = zip(self.parameters.types, arrays, strict=True)
        if any(n % self.mesh.count(atoms) for (shape, _), dims in pairs for n, atoms in zip(shape, dims, strict=True)):
            return None  # the user's functions do not handle padding
        mesh, atoms_of, shardings = self._named(arrays)
        operand_tree, result_tree = self._trees(shardings)
        try:
            returned = self.parameters.partition(*self.parameters.static, mesh, operand_tree, result_tree)
        except Exception as error:  # it refuses these shardings
            self.refusal = f"partition raises {type(error).__name__}: {error}"
            return None
        try:
            returned_mesh, lower, results, operands = returned
            flat = [*self.parameters.in_tree.flatten_up_to(operands), *self.parameters.out_tree.flatten_up_to(results)]
            axes = tuple((str(name), int(size)) for name, size in returned_mesh.shape.items())
        except Exception as error:
            raise RuleError(
                f"the partition of a custom_partitioning returned what is not asked of it: {error}",
                got=f"partition: {self.parameters.partition}; it returned {type(returned).__name__}",
                hint="Return mesh, lower_fn, the shardings of the results and a tuple of those of the operands.",
            ) from error
        if axes != tuple(mesh.shape.items()):
            atoms_of = atoms_of_axes(axes, self.mesh)
        placed = tuple(self._placed(s, len(t[0]), atoms_of) for s, t in zip(flat, self.parameters.types, strict=True))
        return _Proposal(axes, atoms_of, lower, placed)

    def _trees(self, shardings: Sequence[Any]) -> tuple[Any, Any]:
        types = [jax.ShapeDtypeStruct(*t, sharding=s) for t, s in zip(self.parameters.types, shardings, strict=True)]
        operands = len(self.parameters.in_types)
        return self.parameters.in_tree.unflatten(types[:operands]), self.parameters.out_tree.unflatten(types[operands:])

    def _named(self, arrays: Arrays) -> tuple[Any, Mapping[str, Atoms], list[NamedSharding]]:
        """The mesh for the user's functions, the atoms of its axes, and the shardings over this mesh."""
        split_dims = [atoms for dims in arrays for atoms in dims if atoms]
        axes: list[tuple[str, int, Atoms]] = []
        for name, size in self.mesh.axes:
            atoms_of_axis = self.mesh.atoms_of[name]
            if all(_has_whole(atoms, atoms_of_axis) for atoms in split_dims):
                axes.append((name, size, atoms_of_axis))
            else:
                axes += [(a, self.mesh.atom_sizes[a], (a,)) for a in atoms_of_axis]
        mesh = automatic_mesh({name: size for name, size, _ in axes}, self.mesh.devices)
        axis_at_atom = {atoms[0]: (name, len(atoms)) for name, _, atoms in axes if atoms}

        def entry(atoms: Atoms) -> Any:
            names: list[str] = []
            i = 0
            while i < len(atoms):
                name, length = axis_at_atom[atoms[i]]
                names.append(name)
                i += length
            if not names:
                return None
            return tuple(names) if len(names) > 1 else names[0]

        shardings = [NamedSharding(mesh, PartitionSpec(*map(entry, dims))) for dims in arrays]
        return mesh, {name: atoms for name, _, atoms in axes}, shardings

    def _placed(self, sharding: Any, ndim: int, atoms_of: Mapping[str, Atoms]) -> tuple[Atoms, ...]:
        """The atoms of each dimension of a sharding that a user's function has returned."""
        if not isinstance(sharding, NamedSharding):
            raise RuleError(
                "the functions of a custom_partitioning return shardings.",
                got=f"{type(sharding).__name__}: {sharding!r}"[:200],
                hint="Return a jax.sharding.NamedSharding for each operand and each result.",
            )
        spec, mesh_of_spec = sharding.spec, sharding.mesh
        entries = [None if e is PartitionSpec.UNCONSTRAINED else e for e in entries_of(spec)]
        axes = tuple((str(name), int(size)) for name, size in mesh_of_spec.shape.items())
        if axes == tuple((name, self.mesh.count(atoms)) for name, atoms in atoms_of.items()):
            names_of_dims = [axes_of_entry(e) for e in entries]
            dims = [tuple(a for name in names for a in atoms_of[name]) for names in names_of_dims]
            if any(dims[ndim:]):
                raise RuleError(
                    "a function of a custom_partitioning returned a sharding of more dimensions than its array has.",
                    got=f"{spec} for an array of {ndim} dimensions",
                    hint="Return a spec with at most one entry for each dimension.",
                )
            return (*dims[:ndim], *((),) * (ndim - len(dims)))
        return cuts_of(tuple(entries), axes, self.mesh, (self.mesh.size,) * ndim)


def _has_whole(atoms: Atoms, atoms_of_axis: Atoms) -> bool:
    """Whether a dimension is split over all atoms of an axis, in order, or over none of them."""
    positions = [i for i, a in enumerate(atoms) if a in atoms_of_axis]
    return not positions or atoms[positions[0] : positions[0] + len(atoms_of_axis)] == atoms_of_axis
