"""Emits the per-device program of a plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from gshard.comm.reshard import plan_reshard
from gshard.comm.rotation import collective_matmul
from gshard.comm.shards import Fetched, Note, Shards
from gshard.comm.steps import ALL_GATHER, LOCAL, PERMUTE, run, step_collectives
from gshard.comm.steps import permutation as moves_of
from gshard.core.errors import GShardError, RuleError
from gshard.core.jax_adapter import as_if_at, as_weak, no_mesh_set, of_no_mesh
from gshard.core.jax_adapter_context import in_context, wide_enough_for
from gshard.core.mark import Order, permutation
from gshard.core.memory_kinds import is_host_kind, is_on_host, shape_in_memory
from gshard.core.mesh import Atoms, Mesh
from gshard.core.phases import collected_seldom
from gshard.core.plan import ManualAxes, Plan, Ring, entering, leaving, manual_axes
from gshard.core.planning_tables import with_tables
from gshard.core.program import NO_CONTEXT, Block, Constant, Equation, Value, itemsize, type_text
from gshard.core.rule import operand_sharding, result_sharding
from gshard.core.sharding import Sharding, padded_shape
from gshard.core.spmd import Collective, SpmdProgram
from gshard.core.xla_workarounds import ppermute
from gshard.language.per_device import apart, moved_over
from gshard.language.region import REGIONS, Interpreter
from gshard.language.transfer import in_memory_of, is_handed_on, transferred

# Finds the branches and loops that not all devices run.

_Atoms = frozenset[str]
_NONE: _Atoms = frozenset()


def diverging(block: Block, mesh: Mesh) -> frozenset[Equation]:
    """The branches and loops of a program that some devices run, or run more often than others."""
    manual = manual_axes(block, mesh)
    if not manual.inside:
        return frozenset()
    found = _Varying(manual)
    found.run(block)
    return frozenset(e for e in block.walk() if e.blocks and found.of(REGIONS[e.name].decided(e)))


class _Varying:
    """For each value, the manual atoms along which it differs; grows until nothing changes."""

    def __init__(self, manual: ManualAxes):
        self._manual, self._along = manual, dict[Value, _Atoms]()

    def of(self, values: Iterable[Value | Constant]) -> _Atoms:
        return _NONE.union(*(self._along.get(v, _NONE) for v in values if isinstance(v, Value)))

    def run(self, block: Block) -> bool:
        """Visits a block once. True if anything changed."""
        changed = False
        for e in block.equations:
            changed |= self._region(e) if e.blocks else self._add(e.outputs, self._atoms_of(e))
        return changed

    def _atoms_of(self, e: Equation) -> _Atoms:
        here, mesh = self.of(e.inputs), self._manual.mesh
        if "callback" in e.name:
            return here | self._manual.at(e)  # each position makes its own call
        if e.rule is None or (manual := e.rule.manual) is None:
            return here
        here = (here | manual.differ(mesh)) - manual.equal(mesh)
        return here - manual.atoms(mesh) if manual.step == "leave" else here

    def _region(self, e: Equation) -> bool:
        changed, changed_now = False, True
        while changed_now:
            changed_now = self._add(e.outputs, self.of(REGIONS[e.name].decided(e)))
            for edge in e.edges:
                changed_now |= self._add([edge.inner], self.of([edge.outer]))
                if edge.outer not in e.inputs:  # an output, or a value passed to the next iteration
                    changed_now |= self._add([edge.outer], self.of([edge.inner]))
            for body in e.blocks:
                changed_now |= self.run(body)
            changed |= changed_now
        return changed

    def _add(self, values: Iterable[Value], atoms: _Atoms) -> bool:
        new = [v for v in values if atoms - self._along.get(v, _NONE)]
        for v in new:
            self._along[v] = self._along.get(v, _NONE) | atoms
        return bool(new)


@no_mesh_set()
@in_context(NO_CONTEXT)
@collected_seldom()
@with_tables
def partition(plan: Plan) -> SpmdProgram:
    """Emits the per-device program of a plan."""
    mesh, block, entry, leave = plan.mesh, plan.program.block, plan.entry, plan.leave
    producers = {v: e for e in block.equations for v in e.outputs}
    users = {v: e for e in reversed(block.equations) for v in e.inputs}
    read, orders = {*users, *block.outputs}, plan.orders

    def ordered(values: Sequence[Any], shardings: Sequence[Sharding]) -> dict[int, Order]:
        """The orders of marks.

        A value that a mark splits and the boundary replicates has the mesh's order, and so does one that nothing reads.
        """
        pairs = enumerate(zip(values, shardings, strict=True))
        marked = ((i, v, s) for i, (v, s) in pairs if v in orders and v in read)
        return {i: orders[v] for i, v, s in marked if any(s.dims) or not any(plan.sharding(v).dims)}

    in_orders, out_orders = ordered(block.inputs, entry), ordered(block.outputs, leave)
    emitter = _Emitter(plan, manual_axes(block, mesh), diverging(block, mesh))

    def program(*arrays: Any) -> list[Any]:
        emitter.collectives.clear()  # the records of an earlier trace of the same program
        inputs, results = [], []
        for i, (x, v, source) in enumerate(zip(arrays, block.inputs, entry, strict=True)):
            with emitter.in_place_of(users.get(v)):
                x = in_memory_of(v, x)
                if i in in_orders:
                    x = emitter.reorder(x, v, source, in_orders[i], leaving=False)
                inputs.append(emitter.step_to(x, v, source, plan.sharding(v), "uneven argument", users.get(v)))
        for i, (x, result, target) in enumerate(zip(emitter.run(block, inputs), block.outputs, leave, strict=True)):
            producer = producers.get(result) if isinstance(result, Value) else None
            with emitter.in_place_of(producer):
                x = emitter.step_to(x, result, plan.sharding(result), target, "program result", producer)
                x = emitter.reorder(x, result, target, out_orders[i], leaving=True) if i in out_orders else x
                results.append(transferred(x, is_host_kind(plan.program.output_memory(i))))
        return [as_weak(x, weak) for x, weak in zip(results, plan.program.weak or [False] * len(results), strict=True)]

    mapped = jax.shard_map(
        program,
        mesh=mesh.jax_mesh,
        in_specs=tuple(spec(s) for s in entry),
        out_specs=[spec(s) for s in leave],
        check_vma=False,
    )
    wide = wide_enough_for(v.dtype for v in block.values())
    with jax.sharding.use_abstract_mesh(mesh.abstract_jax_mesh), wide:
        shapes = (padded_shape(s, mesh, v.shape) for v, s in zip(block.inputs, entry, strict=True))
        argument_shapes = (
            shape_in_memory(s, v.dtype, on_host=is_host_kind(plan.program.input_memory(i)), weak_type=v.weak)
            for i, (v, s) in enumerate(zip(block.inputs, shapes, strict=True))
        )
        jaxpr = jax.make_jaxpr(mapped)(*argument_shapes)
    return SpmdProgram(jaxpr, mesh, entry, leave, tuple(emitter.collectives), plan.program, in_orders, out_orders)


def spec(sharding: Sharding) -> PartitionSpec:
    """A sharding as JAX's ``PartitionSpec`` over the atoms."""
    return PartitionSpec(*(None if not atoms else atoms[0] if len(atoms) == 1 else atoms for atoms in sharding.dims))


@dataclasses.dataclass(slots=True)
class _Local:
    """The local arrays of a value, which moves to its planned sharding at its first use."""

    source: Sharding  # the sharding in which it was computed
    arrays: dict[Sharding, Any]  # the local array in every sharding so far, so that two users share one collective
    why: str = ""  # the reason that is recorded for the move to the planned sharding
    cause: Equation | None = None  # the equation that computed it, which is recorded too
    marked: bool = False  # whether a mark gives its sharding, so that no user reads it in another one first


# A moved value (None for other arrays), its shardings before and after, and the sharding before the first step.
_Moved = tuple[Value | None, Sharding | None, Sharding | None, Sharding | None]
_NOTHING: _Moved = (None, None, None, None)


@dataclasses.dataclass
class _Emitter(Interpreter):
    """Replays blocks on local arrays and records every collective."""

    plan: Plan
    manual: ManualAxes
    diverging: frozenset[Equation]
    collectives: list[Collective] = dataclasses.field(default_factory=list)
    trip_count: int = 1
    here: Equation | None = None
    gathers: bool = False  # instead of permuting (``language.per_device``)

    def __post_init__(self) -> None:
        self.devices = self.plan.mesh.devices

    @contextmanager
    def _having(self, **attributes: Any) -> Iterator[None]:
        """Changes attributes of the emitter inside."""
        before = {name: getattr(self, name) for name in attributes}
        vars(self).update(attributes)
        try:
            yield
        finally:
            vars(self).update(before)

    @contextmanager
    def in_place_of(self, e: Equation | None) -> Iterator[None]:
        """Gives everything emitted inside the source line and named scopes of an equation; None changes nothing."""
        if e is None:
            yield
            return
        with self._having(here=e), as_if_at(e.source_info):
            yield

    def sharding(self, value: Value | Constant) -> Sharding:
        """The planned sharding of a value."""
        return self.plan.sharding(value)

    def run(self, block: Block, arrays: Sequence[Any], trip_count: int = 1) -> list[Any]:
        """Runs a block on local arrays in the shardings of its inputs."""
        with self._having(trip_count=self.trip_count * trip_count), in_context(NO_CONTEXT):
            env = {
                v: _Local(self.sharding(v), {self.sharding(v): x}) for v, x in zip(block.inputs, arrays, strict=True)
            }
            fetched: Fetched = {}
            read = {v for e in block.equations for v in e.inputs} | set(block.outputs)
            for equation in block.equations:
                unread = frozenset(i for i, v in enumerate(equation.outputs) if v not in read)
                with self.in_place_of(equation), jax.named_scope(equation.name):
                    self._equation(equation, env, unread, fetched)
            results = []
            for v in block.outputs:
                with self.in_place_of(env[v].cause if isinstance(v, Value) else None):
                    results.append(in_memory_of(v, self._read(env, v, self.sharding(v), None, "result")))
            return results

    def _equation(self, e: Equation, env: dict[Value, _Local], unread: frozenset[int], fetched: Fetched) -> None:
        if e.rule is None:
            region = REGIONS[e.name]
            entry = region.entry(e, self.sharding)
            arrays = [
                in_memory_of(v, self._read(env, v, s, e, f"operand {i} of {e.name}"))
                for i, (v, s) in enumerate(zip(e.inputs, entry, strict=True))
            ]
            with in_context(e.context):
                if e in self.diverging:
                    with self._having(gathers=True):
                        results = apart(lambda *xs: region.emit(e, self, xs), arrays, self.manual.at(e))
                else:
                    results = list(region.emit(e, self, arrays))
            leave = region.leave(e, self.sharding)
        else:
            split, ring = self.plan.splits[e], self.plan.rings.get(e)
            mesh = self.plan.mesh if e.rule.manual else self.manual.mesh_without(self.manual.at(e))
            shards = Shards(e, split, mesh, self._noting(e, ring), unread, fetched)
            read = self._read if is_handed_on(e, split) else self._fetch
            arrays = [
                read(env, v, entering(e.rule, split, ring, i), e, f"operand {i} of {e.name}")
                for i, v in enumerate(e.inputs)
            ]
            if ring is not None:
                with in_context(e.context):
                    results = [collective_matmul(ring, shards, arrays)]
            else:
                if not e.rule.masks_itself:
                    arrays = [shards.masked(x, i) for i, x in enumerate(arrays)]
                results = self._local(e, shards, arrays)
            leave = [leaving(e.rule, split, ring, i) for i in range(len(e.outputs))]
        for i, (value, x, source) in enumerate(zip(e.outputs, results, leave, strict=True)):
            why, planned = f"result {i} of {e.name}", self.sharding(value)
            if value.on_host:  # moves between devices come before the move to the host
                x, source = in_memory_of(value, self.step_to(x, value, source, planned, why, e)), planned
            env[value] = _Local(source, {source: x}, why, e, e.mark is not None)

    def _local(self, e: Equation, shards: Shards, arrays: list[Any]) -> list[Any]:
        try:
            with in_context(e.context):
                local = e.operator_rule.local
                results = shards.bind(*arrays) if local is None else list(local(shards, *arrays))
        except GShardError:
            raise
        except Exception as error:
            raise RuleError(
                f"the rule of '{e.name}' failed on shards: {error}", e.line, f"{e.rule}; split {shards.split}"
            ) from error
        # A literal that the operator returns unchanged becomes an array here.
        results = [x if hasattr(x, "shape") else jnp.asarray(x, v.dtype) for x, v in zip(results, e.outputs)]
        for i, (x, value) in enumerate(zip(results, e.outputs, strict=True)):
            if tuple(x.shape) != shards.out_shape(i) or x.dtype != value.dtype:
                raise RuleError(
                    f"the rule of '{e.name}' made a part of shape {tuple(x.shape)} and {x.dtype} "
                    f"where {shards.out_shape(i)} and {value.dtype} belongs.",
                    e.line,
                    f"{e.rule}; split {shards.split}",
                )
        return results

    def _noting(self, e: Equation, ring: Ring | None) -> Note:
        """Records the messages of an equation that communicates in its own way, or as a collective matmul."""
        why, moved = f"inside {e.name}", _NOTHING
        if ring is not None:
            rule, split, i = e.operator_rule, self.plan.splits[e], ring.operand
            why, value = f"collective matmul of {e.name}", e.outputs[0] if i is None else e.inputs[i]
            before = result_sharding(rule, 0, split) if i is None else entering(rule, split, ring, i)
            after = leaving(rule, split, ring, 0) if i is None else operand_sharding(rule, i, split)
            moved = (value if isinstance(value, Value) else None, before, after, before)

        def note(kind: str, atoms: tuple[str, ...], sent: int, x: Any, times: int = 1) -> None:
            self._note(kind, atoms, sent, self.trip_count * times, type_text(x), why, e, moved)

        return note

    def _note(
        self,
        kind: str,
        atoms: Atoms,
        sent: int,
        times: int,
        shape: str,
        why: str,
        cause: Equation | None,
        moved: _Moved = _NOTHING,
    ) -> None:
        """Records a collective that is emitted here."""
        if not times:
            return
        position = self.here or cause
        if self.gathers and kind == PERMUTE and position is not None and self.manual.at(position).isdisjoint(atoms):
            kind, sent = ALL_GATHER, sent * (self.plan.mesh.count(atoms) - 1)
        cause = cause if cause is not None and cause.line else self.here  # a barrier of JAX's has no line
        line = "" if cause is None else cause.line
        collective = Collective(kind, atoms, sent, times, shape, line, why, *moved, cause, self.here or cause)
        self.collectives.append(collective)

    def _read(
        self, env: dict[Value, _Local], value: Value | Constant, target: Sharding, user: Equation | None, why: str
    ) -> Any:
        if isinstance(value, Constant):
            sharding = self.sharding(value)
            x = of_no_mesh(value.value)
            x = x if value.shape == () and sharding == target else jnp.asarray(x)
            return self.step_to(x, value, sharding, target, why, user)
        local, planned = env[value], self.sharding(value)
        if target == local.source and not target.unreduced and not local.marked:
            return local.arrays[target]
        if planned not in local.arrays:
            x = local.arrays[local.source]
            local.arrays[planned] = self.step_to(x, value, local.source, planned, local.why, local.cause)
        if target not in local.arrays:
            read_sharding = self.plan.shared_reshards.get(value, planned)
            if read_sharding not in local.arrays:
                local.arrays[read_sharding] = self.step_to(
                    local.arrays[planned], value, planned, read_sharding, why, user
                )
            if target not in local.arrays:
                local.arrays[target] = self.step_to(
                    local.arrays[read_sharding], value, read_sharding, target, why, user
                )
        return local.arrays[target]

    def _fetch(
        self, env: dict[Value, _Local], value: Value | Constant, target: Sharding, user: Equation | None, why: str
    ) -> Any:
        """As ``_read``, in device memory: an array in host memory is fetched first, then resharded."""
        if not isinstance(value, Value) or not value.on_host:
            return self._read(env, value, target, user, why)
        local, planned = env[value], self.sharding(value)
        present = next((s for s in (target, planned) if s in local.arrays), local.source)
        return self.step_to(transferred(local.arrays[present], False), value, present, target, why, user)

    def move(
        self, value: Value | Constant, array: Any, target: Sharding, equation: Equation, trip_count: int = 1
    ) -> Any:
        """Moves an array in the sharding of ``value`` to another sharding."""
        with self._having(trip_count=self.trip_count * trip_count):
            why = f"value carried by {equation.name}"
            return self.step_to(array, value, self.sharding(value), target, why, equation)

    def combine(self, flag: Any, monoid: str, atoms: Atoms, equation: Equation) -> Any:
        """Combines a flag of each device into one flag on all devices."""
        each = Sharding((), tuple(sorted((atom, monoid) for atom in atoms)))
        why = f"whether {equation.name} goes on"
        return self.step_to(flag, Constant(np.False_), each, Sharding(()), why, equation)

    @in_context(NO_CONTEXT)
    def reorder(self, x: Any, value: Value | Constant, sharding: Sharding, order: Order, *, leaving: bool) -> Any:
        """Moves the parts of an array from another order of devices to the mesh's; if ``leaving``, the other way."""
        mesh = self.plan.mesh
        pairs = permutation(sharding.dims, order, mesh)
        if all(a == b for a, b in pairs) or not x.size:
            return x
        local = type_text(value, x.shape)
        why = f"{'result' if leaving else 'argument'} in the order of devices {','.join(map(str, order))}"
        sent = x.size * itemsize(value.dtype)
        self._note(PERMUTE, mesh.atoms, sent, self.trip_count, local, why, self.here)
        return ppermute(x, mesh.atoms, [(b, a) for a, b in pairs] if leaving else pairs)

    def step_to(
        self,
        x: Any,
        value: Value | Constant,
        source: Sharding,
        target: Sharding,
        why: str,
        cause: Equation | None,
    ) -> Any:
        """Moves a local array from one sharding to another, step by step, and records its messages."""
        if source == target:
            return x
        if is_on_host(x):  # collectives do not read host memory
            return transferred(self.step_to(transferred(x, False), value, source, target, why, cause), True)
        # A value that is manual over some axes moves among the devices of each position along these.
        mesh, shape, size = self.manual.mesh_without(self.manual.of(value)), value.shape, itemsize(value.dtype)
        for step in plan_reshard(source, target, shape, size, mesh):
            if step.kind not in LOCAL and x.size:
                local = type_text(value, x.shape)
                what: _Moved = (value if isinstance(value, Value) else None, step.before, step.after, source)
                over = step.atoms
                if self.gathers and step.kind == PERMUTE:
                    over = moved_over(moves_of(step.before, step.after, mesh), mesh.atom_sizes)
                for kind, sent in step_collectives(step, shape, value.dtype, size, mesh):
                    self._note(kind, over, sent, self.trip_count, local, why, cause, what)
            x = run(step, x, shape, mesh)
        return x
