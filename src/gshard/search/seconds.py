"""Prices reshards and kernels in seconds on a machine, with the figures of ``device.cost``."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

import numpy as np

from gshard.comm.steps import Step
from gshard.core.mesh import Atoms, Mesh
from gshard.core.plan import local_bytes
from gshard.core.planning_tables import tabulated
from gshard.core.program import Block, Equation, Value, short_dtype
from gshard.core.rule import REDUCE, Rule
from gshard.core.sharding import Sharding
from gshard.core.split import Split
from gshard.device.compiled_kernels import as_compiled
from gshard.device.fusion_model import Kernel, Kernels, is_looked_up, kernels_of
from gshard.device.loop_stacks import stack_slices
from gshard.device.machine import Machine
from gshard.device.machine_kinds import Compiler
from gshard.device.network import interchangeable
from gshard.device.roofline import host_seconds, kernel_roofline, launch_seconds
from gshard.device.step_times import StepTimes
from gshard.language.transfer import changes_memory
from gshard.planning.objective import StackCost, Windows
from gshard.planning.reshard_costs import Moves
from gshard.planning.seed_strategies import operand_shardings, result_shardings
from gshard.planning.strategies import share
from gshard.search.emitted import Emitted, as_kernel, has_own_way, own_ways
from gshard.solver.problem import Floats

# The price of a held byte, as a share of the time to read it: it breaks ties in favour of less memory.
_TIE = 1e-3
# The share of a call during which a loop's stack is held: from the forward pass to the backward pass, or to the end.
_HELD = 0.5
# Seconds for a value whose sharding is not the propagated one: it breaks ties in favour of the marks.
_FOLLOWS = 1e-10


class Seconds(Moves):
    """An objective (``planning.objective``) in seconds on one machine."""

    def __init__(self, mesh: Mesh, machine: Machine, axes: tuple[Atoms, ...], *, joined: bool = False):
        super().__init__(mesh, axes)
        self.machine, self.tie, self.fuses, self.counted = machine, _FOLLOWS, True, f"time on {machine.name}"
        self.held_byte_cost = self.stacked_byte_cost = _TIE / machine.memory_bandwidth
        self.extra_byte_cost = 0.0  # kernels count what they read and write
        self.times = StepTimes(machine, joined)
        # For each axis, its number of atoms in each class of interchangeable atoms.
        classes = interchangeable(mesh, machine)
        self._places = {
            name: tuple(sum(a in axis_atoms for a in atoms_of_class) for atoms_of_class in classes)
            for name, axis_atoms in self.atoms_of.items()
        }
        # What equations cost does not depend on shared messages.
        self._own_ways = own_ways(on_machine(mesh, machine), machine)
        self._costs_of_splits = _costs_of_splits(dataclasses.replace(mesh, times=None), machine)
        self._traces = True  # whether an equation with an own way to run on shards is traced when it needs a price

    def step(self, step: Step, shape: tuple[int, ...], itemsize: int, mesh: Mesh) -> float:
        atoms = tuple(a for name in step.atoms for a in self.atoms_of.get(name, (name,)))
        return self.times.seconds(step, shape, itemsize, mesh, among=(self.mesh, atoms))

    def price_class(self, step: Step) -> Hashable:
        return self.times.price_class(step, self._coarse, self._places)

    def kernels(self, block: Block) -> Iterator[tuple[Kernel, int]]:
        """The kernels after fusion."""
        return _compiled_kernels(block, self.machine.compiler).walk()

    def stack_costs(self, block: Block) -> Iterator[StackCost]:
        """The costs of slices of loops' stacks, in the kernels after fusion (``device.loop_stacks``)."""
        program = _compiled_kernels(block, self.machine.compiler)
        runs_of_kernel = dict(program.walk())
        for moved in stack_slices(program, self.machine.compiler):
            passes = 2 * moved.copied + moved.filled
            start = self.machine.launch if moved.copied else 0.0
            yield StackCost(moved.value, runs_of_kernel[moved.kernel], passes / self.machine.memory_bandwidth, start)

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
        key = self.cost_key(kernel), id(splits)
        if key not in self._costs_of_splits:
            self._costs_of_splits[key] = splits, self._all_seconds(kernel, splits)
        return self._costs_of_splits[key][1]

    def _all_seconds(self, kernel: Kernel, splits: Sequence[Split]) -> Floats:
        rule = kernel.equation.rule
        assert rule is not None
        reads = [operand_shardings(rule, i, splits) for i in range(len(rule.operands))]
        results = [result_shardings(rule, i, splits) for i in range(len(rule.results))]
        return np.array(
            [
                self._split_seconds(kernel, split, [found[k] for found in reads], [found[k] for found in results])
                for k, split in enumerate(splits)
            ]
        )

    def _split_seconds(
        self, kernel: Kernel, split: Split, reads: Sequence[Sharding], results: Sequence[Sharding]
    ) -> float:
        """Seconds of one run of a kernel under a split of its equation, with the shardings of operands and results."""
        e = kernel.equation
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
        is_own_kernel = kernel.spares_rows and _splits_a_row(rule, split)
        spared = frozenset[Value]() if is_own_kernel else kernel.spared
        written = 0 if spared.issuperset(kernel.writes) else result_bytes
        needed = *(x for x in kernel.reads if x not in spared), *kernel.carried
        moved = written + sum(read_bytes.get(x, x.bytes * work_share) for x in needed)
        own_way_seconds = 0.0
        if has_own_way(rule, split):
            emitted = self.emitted_by(e, split)
            alone = _operations(as_kernel(e), work_share)
            plain = self.work(e, *alone, result_bytes + sum(read_bytes.values()))
            own_way = self.work(e, *alone, result_bytes) if emitted is None else emitted.seconds
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

    def windows(self, e: Equation, splits: Sequence[Split]) -> Iterator[tuple[int, Windows]]:
        """The windows of operands that an equation fetches, which other equations may share."""
        for i, split in enumerate(splits):
            if (emitted := self.emitted_by(e, split)) is not None:
                yield from ((i, window) for window in emitted.windows)

    def emitted_by(self, e: Equation, split: Split) -> Emitted | None:
        """The code of an equation that runs on shards in its own way; None for other equations.

        None also for an equation that is not traced yet and may not be (``assuming``). Its lower bound is the time to
        compute and to write the same results.
        """
        return self._own_ways.of(e, split, traces=self._traces)

    def assuming(self) -> Seconds:
        """The same objective, but it traces equations only for the splits that ``price`` gets."""
        found = copy.copy(self)
        found._traces = False
        return found

    def price(self, splits: Mapping[Equation, Split]) -> bool:
        unknown = [
            (e, split) for e, split in splits.items() if e.rule is not None and self.emitted_by(e, split) is None
        ]
        return any([self._own_ways.of(e, split) is not None for e, split in unknown])

    def work(self, e: Equation, products: float, others: float, moved: float, *, returns: bool = False) -> float:
        """Seconds of one kernel on one device."""
        return kernel_roofline(self.machine, e, products, others, moved, returns=returns).seconds


def _splits_a_row(rule: Rule, split: Split) -> bool:
    """Whether a reduced factor is split: then the reduction is a kernel of its own."""
    return any(factor.kind == REDUCE and split.get(f) for f, factor in enumerate(rule.factors))


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
def _costs_of_splits(mesh: Mesh, machine: Machine) -> dict[Hashable, tuple[Sequence[Split], Floats]]:
    """The costs of kernels under lists of splits. Each list keeps its identity, which is in its key, valid."""
    return {}


@tabulated(16)
def _shared_seconds(machine: Machine, joined: bool, mesh: Mesh, axes: tuple[Atoms, ...]) -> Seconds:
    return Seconds(mesh, machine, axes, joined=joined)
