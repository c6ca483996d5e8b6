"""Calls the functions of ``custom_partitioning(f).def_partition`` on a mesh.

    partition(mesh, operands, results) -> mesh, lower_fn, shardings of results, shardings of operands

``partition`` gets types with a ``NamedSharding`` each, over a mesh with the user's axes. It returns the program of one
device (``lower_fn``, with collectives over these axes) and the shardings of that program's operands and results, which
may differ from those that it got. XLA calls it while it compiles, gshard while it plans: a split of an equation is
allowed if ``partition`` keeps it and the program of one device can be traced.

Where an axis is split in part (4 of 8 devices), the mesh that the functions get has the parts of this axis as axes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.custom_partitioning import SdyShardingRule
from jax.extend.core import ClosedJaxpr, Literal
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from gshard.comm.collectives import collectives_of
from gshard.comm.steps import PERMUTE
from gshard.core.errors import GShardError, RuleError
from gshard.core.jax_adapter import closed
from gshard.core.jax_adapter_kernels import as_gspmd, ir_types, read_sharding_rule, spec_on
from gshard.core.mark import Mark, resolve
from gshard.core.mesh import Atoms, Mesh
from gshard.core.partition_spec import entries_of
from gshard.language.per_device import renamed
from gshard.language.sharding_rule import Factors, factors_of, independent

# The sharding of every operand, then of every result: for each dimension its atoms.
Arrays = tuple[tuple[Atoms, ...], ...]
_COMBINES = {"psum": "add", "pmax": "max", "pmin": "min"}
_ROUNDS = 8  # in which shardings are what partition makes of the ones before


@dataclasses.dataclass(frozen=True)
class Partitioned:
    """What an equation of ``custom_partitioning`` holds, apart from the program that it stands for.

    Attributes:
        partition, infer, propagate: the user's functions; the latter two, or one of them, may be None.
        decoded: whether they want ``NamedSharding``.
        static: the static arguments, which come first; ``kinds`` are their types.
        in_tree, out_tree: the structures of operands and results.
        in_types, out_types: shapes and dtypes.
    """

    partition: Callable[..., Any]
    infer: Callable[..., Any] | None
    propagate: Callable[..., Any] | None
    decoded: bool
    sharding_rule: Any
    static: tuple[Any, ...]
    kinds: tuple[type, ...]
    in_tree: Any
    out_tree: Any
    in_types: tuple[tuple[tuple[int, ...], Any], ...]
    out_types: tuple[tuple[tuple[int, ...], Any], ...]

    @staticmethod
    def of(params: Mapping[str, Any]) -> Partitioned:
        """Reads it from the parameters of an equation."""
        body, _ = closed(params["call"])
        static = tuple(params["static_args"])
        return Partitioned(
            params["partition"],
            params["infer_sharding_from_operands"],
            params["propagate_user_sharding"],
            bool(params["decode_shardings"]),
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
        """Those of operands, then of results."""
        return (*self.in_types, *self.out_types)


@dataclasses.dataclass(frozen=True, eq=False)
class DeviceProgram:
    """What each device runs.

    Attributes:
        run: it, on a device's parts, its axes replaced by atoms.
        sent: bytes that each device sends.
        over: the atoms over which it communicates.
        unfinished: the same without the collective that combines its results in the end, if all of them are combined
            over the same atoms.
    """

    run: Callable[..., list[Any]]
    sent: int
    over: frozenset[str]
    unfinished: Unfinished | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Unfinished:
    """A program whose results are still to be combined.

    Attributes:
        program: it.
        monoid: what combines them.
        atoms: over which.
    """

    program: DeviceProgram
    monoid: str
    atoms: frozenset[str]


@dataclasses.dataclass(frozen=True, eq=False)
class _Proposal:
    """What ``partition`` returns for some shardings."""

    axes: tuple[tuple[str, int], ...]
    atoms_of: Mapping[str, Atoms]
    lower: Callable[..., Any]
    arrays: Arrays


class OnMesh:
    """The functions of one equation on a mesh. What they return for some shardings is kept.

    Attributes:
        said: the functions.
        mesh: the devices.
        refusal: why they took no shardings when they were last called in vain; empty if that was never so.
    """

    def __init__(self, said: Partitioned, mesh: Mesh):
        self.said, self.mesh, self.refusal = said, mesh, ""
        self._programs: dict[Arrays, DeviceProgram | None] = {}

    def factors(self) -> Factors:
        """The factors of the sharding rule, which may be a function; one for each dimension where there is none.

        Raises:
            RuleError: it is no sharding rule, or does not fit the arrays.
        """
        rule, operands = self.said.sharding_rule, len(self.said.in_types)
        shapes = [shape for shape, _ in self.said.types]
        if rule is None:
            return independent(shapes)
        if callable(rule):
            types = [jax.ShapeDtypeStruct(*t) for t in self.said.types]
            mesh, _, _ = self._named(tuple(((),) * len(shape) for shape in shapes))
            try:
                rule = rule(*self.said.static, mesh, ir_types(types[:operands]), ir_types(types[operands:]))
                text, details = rule if isinstance(rule, (tuple, list)) and len(rule) == 2 else (rule, {})
                rule = read_sharding_rule(text, **details) if isinstance(text, str) else text
            except Exception as error:
                raise RuleError(
                    f"the sharding_rule of a custom_partitioning failed: {type(error).__name__}: {error}",
                    got=f"sharding_rule: {self.said.sharding_rule}",
                ) from error
        if not isinstance(rule, SdyShardingRule):
            raise RuleError(
                "the sharding_rule of a custom_partitioning is neither text nor an SdyShardingRule.",
                got=f"{type(rule).__name__}: {rule!r}"[:200],
                hint="Give 'i j -> i j', an SdyShardingRule, or a function that returns one of these.",
            )
        return factors_of(rule, shapes[:operands], shapes[operands:])

    def settled(self, arrays: Arrays) -> Arrays | None:
        """The shardings that ``partition`` makes of some, and leaves as they are then; None if there are none.

        Raises:
            RuleError: it returns something that is no mesh, function and shardings.
        """
        for _ in range(_ROUNDS):
            found = self._proposal(arrays)
            if found is None or found.arrays == arrays:
                return None if found is None else arrays
            arrays = found.arrays
        return None

    def inferred(self, arrays: Arrays) -> Arrays:
        """Shardings in which results follow operands, where ``infer_sharding_from_operands`` tells how."""
        if self.said.infer is None:
            return arrays
        return self._following(arrays, self.said.infer, results=True)

    def propagated(self, arrays: Arrays) -> Arrays:
        """Shardings with those of the results as ``propagate_user_sharding`` suggests them."""
        if self.said.propagate is None:
            return arrays
        return self._following(arrays, self.said.propagate, results=False)

    def program(self, arrays: Arrays) -> DeviceProgram | None:
        """The program of one device for these shardings; None if ``partition`` wants others, or it fails."""
        if arrays not in self._programs:
            self._programs[arrays] = self._traced(arrays)
        return self._programs[arrays]

    def _traced(self, arrays: Arrays) -> DeviceProgram | None:
        found = self._proposal(arrays)
        if found is None or found.arrays != arrays:
            return None
        local = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in self._local(arrays)]
        takes, makes = local[: len(self.said.in_types)], local[len(self.said.in_types) :]
        try:
            made = jax.make_jaxpr(found.lower, axis_env=list(found.axes))(*self.said.in_tree.unflatten(takes))
            jaxpr, _ = closed(made)
            made_parts = [(v.aval.shape, v.aval.dtype) for v in jaxpr.outvars]
            if made_parts != [(m.shape, m.dtype) for m in makes]:
                wanted = ", ".join(f"{m.dtype}{list(m.shape)}" for m in makes)
                got = ", ".join(f"{dtype}{list(shape)}" for shape, dtype in made_parts)
                self.refusal = f"the program of one device makes {got} where its shardings say {wanted}"
                return None
            run = renamed(made, found.atoms_of)
            with jax.sharding.use_abstract_mesh(self.mesh.abstract_jax_mesh):
                again = jax.make_jaxpr(run, axis_env=list(self.mesh.atom_sizes.items()))(*takes)
        except Exception as error:  # it is not split so that its program cannot run
            self.refusal = f"the program of one device raises {type(error).__name__}: {error}"
            return None
        sent = list(collectives_of(again, self.mesh.atom_sizes))
        if any(kind == PERMUTE and not self._in_order(atoms) for kind, atoms, _, _ in sent):
            # JAX 0.10 counts the positions of a ppermute in the mesh's order, whatever the order of its axes.
            self.refusal = "the program of one device permutes over axes in another order than the mesh's"
            return None
        return dataclasses.replace(self._program(run, sent), unfinished=self._unfinished(again))

    @staticmethod
    def _program(run: Callable[..., list[Any]], sent: Sequence[tuple[str, Atoms, int, Any]]) -> DeviceProgram:
        return DeviceProgram(
            run, sum(each for _, _, each, _ in sent), frozenset(a for _, own, _, _ in sent for a in own)
        )

    def _unfinished(self, made: Any) -> Unfinished | None:
        """A program over atoms without its last collective; None if none combines all results in the end."""
        body, _ = closed(made)
        last = [e for e in body.eqns if e.primitive.name in _COMBINES and not {*e.outvars}.isdisjoint(body.outvars)]
        parts = {v: x for e in last for v, x in zip(e.outvars, e.invars, strict=True)}
        found = {(e.primitive.name, frozenset(e.params["axes"])) for e in last}
        read = {id(x) for e in body.eqns for x in e.invars}
        if len(found) != 1 or any(e.params["axis_index_groups"] for e in last) or any(id(v) in read for v in parts):
            return None
        if any(isinstance(v, Literal) or v not in parts for v in body.outvars):
            return None
        ((name, atoms),) = found
        body = body.replace(eqns=[e for e in body.eqns if e not in last], outvars=[parts[v] for v in body.outvars])
        jaxpr = ClosedJaxpr(body, closed(made)[1])
        sent = list(collectives_of(jaxpr, self.mesh.atom_sizes))
        run = renamed(jaxpr, {a: (a,) for a in self.mesh.atoms})
        return Unfinished(self._program(run, sent), _COMBINES[name], atoms)

    def _in_order(self, atoms: Atoms) -> bool:
        return [a for a in self.mesh.atoms if a in atoms] == list(atoms)

    def _local(self, arrays: Arrays) -> list[tuple[tuple[int, ...], Any]]:
        count = self.mesh.count
        return [
            (tuple(n // count(atoms) for n, atoms in zip(shape, dims, strict=True)), dtype)
            for (shape, dtype), dims in zip(self.said.types, arrays, strict=True)
        ]

    def _proposal(self, arrays: Arrays) -> _Proposal | None:
        pairs = zip(self.said.types, arrays, strict=True)
        if any(n % self.mesh.count(atoms) for (shape, _), dims in pairs for n, atoms in zip(shape, dims, strict=True)):
            return None  # kernels take no padding
        mesh, atoms_of, given = self._named(arrays)
        takes, makes = self._trees(given)
        try:
            returned = self.said.partition(*self.said.static, mesh, takes, makes)
        except Exception as error:  # it refuses these shardings
            self.refusal = f"partition raises {type(error).__name__}: {error}"
            return None
        try:
            theirs, lower, results, operands = returned
            flat = [*self.said.in_tree.flatten_up_to(operands), *self.said.out_tree.flatten_up_to(results)]
            axes = tuple((str(name), int(size)) for name, size in theirs.shape.items())
        except Exception as error:
            raise RuleError(
                f"the partition of a custom_partitioning returned what is not asked of it: {error}",
                got=f"partition: {self.said.partition}; it returned {type(returned).__name__}",
                hint="Return mesh, lower_fn, the shardings of the results and a tuple of those of the operands.",
            ) from error
        if axes != tuple(mesh.shape.items()):
            atoms_of = self._atoms_of(axes)
        placed = tuple(self._placed(s, len(t[0]), mesh, atoms_of) for s, t in zip(flat, self.said.types, strict=True))
        return _Proposal(axes, atoms_of, lower, placed)

    def _following(self, arrays: Arrays, function: Callable[..., Any], *, results: bool) -> Arrays:
        mesh, atoms_of, given = self._named(arrays)
        takes, makes = self._trees(given)
        operands = len(self.said.in_types)
        plain = self.said.out_tree.unflatten([jax.ShapeDtypeStruct(*t) for t in self.said.out_types])
        try:
            returned = function(*self.said.static, mesh, *((takes, plain) if results else (makes,)))
            flat = self.said.out_tree.flatten_up_to(returned)
            return (
                *arrays[:operands],
                *(self._placed(s, len(t[0]), mesh, atoms_of) for s, t in zip(flat, self.said.out_types)),
            )
        except GShardError:
            raise
        except Exception:  # it has nothing to say of these
            return arrays

    def _trees(self, given: Sequence[Any]) -> tuple[Any, Any]:
        types = [jax.ShapeDtypeStruct(*t, sharding=s) for t, s in zip(self.said.types, given, strict=True)]
        operands = len(self.said.in_types)
        return self.said.in_tree.unflatten(types[:operands]), self.said.out_tree.unflatten(types[operands:])

    def _named(self, arrays: Arrays) -> tuple[Any, Mapping[str, Atoms], list[jax.sharding.Sharding]]:
        """The mesh that the user's functions get, the atoms of its axes, and the shardings over it."""
        cuts = [atoms for dims in arrays for atoms in dims if atoms]
        axes: list[tuple[str, int, Atoms]] = []
        for name, size in self.mesh.axes:
            own = self.mesh.atoms_of[name]
            whole = all(_has_whole(atoms, own) for atoms in cuts)
            axes += [(name, size, own)] if whole else [(a, self.mesh.atom_sizes[a], (a,)) for a in own]
        names, sizes, _ = zip(*axes, strict=True)
        kinds = (AxisType.Auto,) * len(names)
        mesh: Any = jax.sharding.AbstractMesh(sizes, names, axis_types=kinds)
        if self.mesh.devices is not None:
            devices = np.array(self.mesh.devices, dtype=object).reshape(sizes)
            mesh = jax.sharding.Mesh(devices, names, axis_types=kinds)
        first = {own[0]: (name, len(own)) for name, _, own in axes if own}

        def entry(atoms: Atoms) -> Any:
            found, i = [], 0
            while i < len(atoms):
                name, length = first[atoms[i]]
                found.append(name)
                i += length
            return tuple(found) if len(found) > 1 else found[0] if found else None

        given: list[jax.sharding.Sharding] = []
        for dims in arrays:
            sharding = NamedSharding(mesh, PartitionSpec(*map(entry, dims)))
            plain = self.said.decoded or self.mesh.devices is None
            given.append(sharding if plain else as_gspmd(sharding, len(dims), self.mesh.devices or ()))
        return mesh, {name: own for name, _, own in axes}, given

    def _placed(self, sharding: Any, ndim: int, mesh: Any, atoms_of: Mapping[str, Atoms]) -> tuple[Atoms, ...]:
        """The atoms of each dimension, of a sharding that the user returned."""
        if not isinstance(sharding, jax.sharding.Sharding):
            raise RuleError(
                "the functions of a custom_partitioning return shardings.",
                got=f"{type(sharding).__name__}: {sharding!r}"[:200],
                hint="Return a jax.sharding.NamedSharding for each operand and each result.",
            )
        spec, over = (
            (sharding.spec, sharding.mesh)
            if isinstance(sharding, NamedSharding)
            else (spec_on(mesh, sharding, ndim), mesh)
        )
        entries = [None if e is PartitionSpec.UNCONSTRAINED else e for e in entries_of(spec)]
        axes = tuple((str(name), int(size)) for name, size in over.shape.items())
        if axes == tuple((name, self.mesh.count(own)) for name, own in atoms_of.items()):
            names = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries]
            dims = [tuple(a for name in own for a in atoms_of[name]) for own in names]
            if any(dims[ndim:]):
                raise RuleError(
                    "a function of a custom_partitioning returned a sharding of more dimensions than its array has.",
                    got=f"{spec} for an array of {ndim} dimensions",
                    hint="Return a spec with at most one entry for each dimension.",
                )
            return (*dims[:ndim], *((),) * (ndim - len(dims)))
        demand = resolve(Mark("spec", spec=tuple(entries), axes=axes), self.mesh, (self.mesh.size,) * ndim, "")
        return demand.dims

    def _atoms_of(self, axes: tuple[tuple[str, int], ...]) -> Mapping[str, Atoms]:
        """The atoms of each axis of another mesh over the same devices."""
        found = {}
        for name, _ in axes:
            mark = Mark("spec", spec=(name,), axes=axes)
            (found[name],) = resolve(mark, self.mesh, (self.mesh.size,), "").dims
        return found


def _has_whole(atoms: Atoms, own: Atoms) -> bool:
    """Whether atoms have an axis as a whole, in its order, or nothing of it."""
    at = [i for i, a in enumerate(atoms) if a in own]
    return not at or atoms[at[0] : at[0] + len(own)] == own
