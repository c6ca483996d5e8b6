"""Prices reshards and kernels in seconds on a machine, also equations that run on shards in their own way."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

import numpy as np

from gshard.core.jax_adapter import no_mesh_set
from gshard.core.mesh import Atoms, Mesh
from gshard.core.plan import Plan, local_bytes
from gshard.core.planning_tables import tabulated
from gshard.core.program import Block, Equation, Program, Value, short_dtype
from gshard.core.rule import PARALLEL, REDUCE, Rule, Split, operand_sharding, result_sharding
from gshard.core.sharding import Sharding
from gshard.core.time_budget import check_deadline
from gshard.device.cost import kernel_cost
from gshard.device.fusion_model import (
    Kernel,
    Kernels,
    as_compiled,
    as_kernel,
    is_looked_up,
    kernels_of,
    kernels_of_mapped,
)
from gshard.device.machine import Compiler, Machine
from gshard.device.network import StepTimes, interchangeable
from gshard.device.roofline import host_seconds, kernel_roofline, launch_seconds
from gshard.emit.partition import partition
from gshard.language.transfer import changes_memory
from gshard.planning.objective import Objective, StackCost
from gshard.planning.strategies import array_shardings, share
from gshard.solver.problem import Floats

# Prices equations that run on shards in their own way, by tracing each of them alone.


def has_own_way(rule: Rule, split: Split) -> bool:
    """Whether an equation does more on shards than the same operator on smaller arrays."""
    if not rule.is_free or rule.local is None:
        return False
    return any(f >= 0 and atoms and rule.factors[f].kind != PARALLEL for f, atoms in split.items())


class OwnWays:
    """Prices equations that run on shards in their own way, on one machine, each once.

    Splits that take the same time are traced once (``_class_of``).
    """

    def __init__(self, mesh: Mesh, machine: Machine):
        self._mesh, self._machine = mesh, machine
        self._alike = {a: alike for alike in interchangeable(mesh, machine) for a in alike}
        self._known: dict[object, float] = {}
        # the costs of kernels under lists of splits; each list keeps its identity, which is in its key, valid
        self.costs_of_splits: dict[Hashable, tuple[Sequence[Split], Floats]] = {}

    def of(self, e: Equation, split: Split, *, traces: bool = True) -> float | None:
        """Seconds of one run of an equation under a split; None if it runs the same operator on smaller arrays.

        Without ``traces``, also None if it is not traced yet.
        """
        rule = e.rule
        assert rule is not None
        if not has_own_way(rule, split):
            return None
        ordered = sorted((f, atoms) for f, atoms in split.items() if atoms)
        parallel = {f: atoms for f, atoms in ordered if f >= 0 and rule.factors[f].kind == PARALLEL}
        other_factors = self._renamed({f: atoms for f, atoms in ordered if f not in parallel})
        operands = tuple((v.shape, short_dtype(v.dtype)) for v in e.inputs)
        key = rule, tuple(sorted(other_factors.items())), _class_of(rule, parallel, self._mesh), operands
        if key not in self._known and traces:
            check_deadline()
            self._known[key] = emitted_alone(e, self._renamed(dict(ordered)), self._mesh, self._machine)
        return self._known.get(key)

    def _renamed(self, split: Split) -> Split:
        """The split with the atom that represents each: the first ones of each class of interchangeable atoms.

        Interchangeable atoms can take each other's places (``network.interchangeable``).
        """
        representatives: dict[str, str] = {}
        used: dict[Atoms, int] = {}
        for atoms in split.values():
            for a in atoms:
                if a not in representatives:
                    same_class = self._alike[a]
                    representatives[a] = same_class[used.get(same_class, 0)]
                    used[same_class] = used.get(same_class, 0) + 1
        return {f: tuple(representatives[a] for a in atoms) for f, atoms in split.items()}


def _class_of(rule: Rule, split: Split, mesh: Mesh) -> Hashable:
    """A key: splits of parallel factors with equal keys take the same time, with all other factors split equally.

    Nothing is sent over their atoms, so only the sizes of the parts count: the size of each array, and the factors with
    one element left, across which no array is copied into place. Unequal parts are padded, factor by factor.
    """
    sizes = {
        f: -(-factor.size // mesh.count(split.get(f, ())))
        for f, factor in enumerate(rule.factors)
        if factor.kind == PARALLEL
    }
    parts = {f: mesh.count(atoms) for f, atoms in split.items()}
    unequal = tuple(sorted((f, n) for f, n in parts.items() if rule.factors[f].size % n))
    arrays = ([f for dim in dims for f in dim if f in sizes] for dims in (*rule.operands, *rule.results))
    return (
        tuple(math.prod(sizes[f] for f in factor) for factor in arrays),
        tuple(n == 1 for n in sizes.values()),
        unequal,
    )


@no_mesh_set()
def emitted_alone(e: Equation, split: Split, mesh: Mesh, machine: Machine) -> float:
    """Seconds of one run of an equation whose operands are in the shardings of the split."""
    kernels = kernels_of_mapped(partition(_alone(e, split, mesh)).jaxpr).walk()
    return sum(kernel_cost(kernel, times, mesh, machine).total_seconds for kernel, times in kernels)


@tabulated(16)
def own_ways(mesh: Mesh, machine: Machine) -> OwnWays:
    """The prices that all plans share that are made together."""
    return OwnWays(mesh, machine)


def _alone(e: Equation, split: Split, mesh: Mesh) -> Plan:
    """The plan of a program with only this equation."""
    rule = e.operator_rule
    inputs = [dataclasses.replace(v) if isinstance(v, Value) else v for v in e.inputs]
    outputs = [dataclasses.replace(v) for v in e.outputs]
    alone = dataclasses.replace(e, inputs=tuple(inputs), outputs=tuple(outputs))
    shardings = {v: operand_sharding(rule, i, split) for i, v in enumerate(inputs) if isinstance(v, Value)}
    values = tuple(shardings)
    result_shardings = {v: result_sharding(rule, i, split) for i, v in enumerate(outputs)}
    block = Block(values, (alone,), tuple(outputs))
    program = Program(block, (), (None,) * len(values), tuple(f"operand {i}" for i in range(len(values))), None)
    entry, leave = tuple(shardings.values()), tuple(result_shardings.values())
    return Plan(program, mesh, shardings | result_shardings, {alone: split}, {}, entry=entry, leave=leave)


# The price of a held byte, as a share of the time to read it: it breaks ties in favour of less memory.
_TIE = 1e-3
# The share of a call during which a loop's stack is held: from the forward pass to the backward pass, or to the end.
_HELD = 0.5
# Seconds for a value whose sharding is not the propagated one: it breaks ties in favour of the marks.
_FOLLOWS = 1e-10


class Seconds(Objective):
    """An objective (``planning.objective``) in seconds on one machine."""

    def __init__(self, mesh: Mesh, machine: Machine, axes: tuple[Atoms, ...], *, joined: bool = False):
        super().__init__(on_machine(mesh, machine, joined=joined), axes)
        self.machine, self.tie, self.fuses, self.counted = machine, _FOLLOWS, True, f"time on {machine.name}"
        self.held_byte_cost = self.stacked_byte_cost = _TIE / machine.memory_bandwidth
        self.extra_byte_cost = 0.0  # kernels count what they read and write
        self._own_ways = own_ways(on_machine(mesh, machine), machine)
        self._traces = True  # whether an equation with an own way to run on shards is traced when it needs a price

    def kernels(self, block: Block) -> Iterator[tuple[Kernel, int]]:
        """The kernels after fusion."""
        return _compiled_kernels(block, self.machine.compiler).walk()

    def stack_costs(self, block: Block) -> Iterator[StackCost]:
        """The costs of slices of loops' stacks, in the kernels after fusion (``device.fusion_model``)."""
        program = _compiled_kernels(block, self.machine.compiler)
        for kernel, runs in program.walk():
            for piece in kernel.slices:
                passes = 2 * piece.copied + piece.filled
                start = self.machine.launch if piece.copied else 0.0
                yield StackCost(piece.value, runs, passes / self.machine.memory_bandwidth, start)

    def cost_key(self, kernel: Kernel) -> Hashable:
        e = kernel.equation
        arrays = tuple((v.shape, short_dtype(v.dtype)) for v in (*e.inputs, *e.outputs))
        # Kernels with equal equations differ in what is fused with them: what that reads, and its operations.
        numbers: dict[object, int] = {}
        needed = *kernel.reads, *kernel.carried
        same = tuple(numbers.setdefault(v, len(numbers)) for v in (*e.inputs, *needed))
        read = tuple(v.bytes for v in needed)
        spared = tuple(v in kernel.spared for v in (*kernel.reads, *kernel.writes)), kernel.spares_rows
        return e.rule, kernel.kind, arrays, same, read, kernel.vector_flops, kernel.moved, spared, kernel.returns

    def split_costs(self, kernel: Kernel, splits: Sequence[Split], marked_share: float) -> Floats:
        """float64 [splits]: one run of a kernel under each split, including its own way to run on shards."""
        if not self._traces:  # lower bounds
            return self._all_seconds(kernel, splits)
        key, known = (self.cost_key(kernel), id(splits)), self._own_ways.costs_of_splits
        if key not in known:
            known[key] = splits, self._all_seconds(kernel, splits)
        return known[key][1]

    def _all_seconds(self, kernel: Kernel, splits: Sequence[Split]) -> Floats:
        rule = kernel.equation.rule
        assert rule is not None
        arrays = array_shardings(rule, splits)
        under = ([shardings[k] for shardings in arrays] for k in range(len(splits)))
        return np.array([self._split_seconds(kernel, *pair) for pair in zip(splits, under, strict=True)])

    def _split_seconds(self, kernel: Kernel, split: Split, arrays: Sequence[Sharding]) -> float:
        """Seconds of one run of a kernel under a split of its equation, with the shardings of operands and results."""
        e = kernel.equation
        reads, results = arrays[: len(e.inputs)], arrays[len(e.inputs) :]
        rule = e.rule
        assert rule is not None
        work_share = share(rule, split, self.mesh)
        result_bytes = sum(local_bytes(x, s, self.mesh) for x, s in zip(e.outputs, results, strict=True))
        if changes_memory(e) and self.machine.host_link:
            return host_seconds(self.machine, result_bytes) + launch_seconds(self.machine, 2 * result_bytes)
        read_bytes: dict[Value, int] = {}
        for i, x in enumerate(e.inputs):
            if isinstance(x, Value):
                operand_bytes = local_bytes(x, reads[i], self.mesh)
                read_bytes[x] = min(operand_bytes, result_bytes) if is_looked_up(rule, i) else operand_bytes
        # The reduction of a factor that is split is a kernel of its own.
        is_split = any(factor.kind == REDUCE and split.get(f) for f, factor in enumerate(rule.factors))
        is_own_kernel = kernel.spares_rows and is_split
        spared = frozenset[Value]() if is_own_kernel else kernel.spared
        written = 0 if spared.issuperset(kernel.writes) else result_bytes
        needed = *(x for x in kernel.reads if x not in spared), *kernel.carried
        moved = written + sum(read_bytes.get(x, x.bytes * work_share) for x in needed)
        own_way_seconds = 0.0
        if has_own_way(rule, split):
            emitted = self._own_ways.of(e, split, traces=self._traces)
            # Of an equation that is not traced yet, a lower bound: the time to compute and to write the same results.
            alone = _operations(as_kernel(e), work_share)
            plain = self.work(e, *alone, result_bytes + sum(read_bytes.values()))
            own_way = self.work(e, *alone, result_bytes) if emitted is None else emitted
            own_way_seconds = own_way - plain
        # The collective that reduces an unreduced result writes it.
        returns = kernel.returns and written > 0 and not any(s.unreduced for s in results)
        seconds = self.work(e, *_operations(kernel, work_share), moved, returns=returns) + own_way_seconds
        return max(seconds, launch_seconds(self.machine, moved, returns=returns))

    def sharding_costs(self, kernel: Kernel, states: Sequence[Sharding]) -> Floats:
        """float64 [states]: one run of an elementwise kernel whose arrays all have the same sharding."""
        v = kernel.equation.outputs[0]
        parts = [math.prod(s.local_shape(self.mesh, v.shape)) / max(math.prod(v.shape), 1) for s in states]
        e, starts = kernel.equation, [kernel.starts and not s.unreduced for s in states]
        return np.array(
            [
                self.work(e, *_operations(kernel, part), kernel.moved * part, returns=returns)
                for part, returns in zip(parts, starts, strict=True)
            ]
        )

    def assuming(self) -> Seconds:
        """The same objective, but it traces equations only for the splits that ``price`` gets."""
        found = copy.copy(self)
        found._traces = False
        return found

    def price(self, splits: Mapping[Equation, Split]) -> bool:
        ruled = [(e, split) for e, split in splits.items() if e.rule is not None]
        unknown = [of for of in ruled if self._own_ways.of(*of, traces=self._traces) is None]
        return any([self._own_ways.of(*of) is not None for of in unknown])

    def work(self, e: Equation, products: float, others: float, moved: float, *, returns: bool = False) -> float:
        """Seconds of one kernel on one device."""
        return kernel_roofline(self.machine, e, products, others, moved, returns=returns).seconds


def _operations(kernel: Kernel, part: float) -> tuple[float, float]:
    """The operations of products, and all other operations, of a share of a kernel."""
    return kernel.product_flops * part, kernel.vector_flops * part


def seconds_on(
    machine: Machine, *, joined: bool = False, call: float | None = None
) -> Callable[[Mesh, tuple[Atoms, ...]], Seconds]:
    """Makes the objective for meshes of a machine's devices. Plans that are made together share the costs of reshards.

    With ``call``, the approximate seconds of a call, memory has a price: a byte that a loop stacks costs its share of
    the memory, times the seconds for which it is held.
    """

    def objective(mesh: Mesh, axes: tuple[Atoms, ...]) -> Seconds:
        known = copy.copy(_shared_seconds(machine, joined, mesh, axes))
        if call is not None:
            known.stacked_byte_cost = _HELD * call / machine.memory
        return known

    return objective


def on_machine(mesh: Mesh, machine: Machine, *, joined: bool = False) -> Mesh:
    """The mesh with the step times of a machine, so that reshards take the fastest steps."""
    return dataclasses.replace(mesh, times=StepTimes(machine, joined))


@tabulated(4)
def _compiled_kernels(block: Block, compiler: Compiler) -> Kernels:
    """The kernels of a program that is not split yet. The objectives of one machine share them."""
    return as_compiled(kernels_of(block, windows=False), compiler)


@tabulated(16)
def _shared_seconds(machine: Machine, joined: bool, mesh: Mesh, axes: tuple[Atoms, ...]) -> Seconds:
    return Seconds(mesh, machine, axes, joined=joined)
