"""Seconds: prices reshards and work in seconds on a machine, with the figures of ``device.cost``."""

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
from gshard.core.split import Split, operand_sharding, result_sharding
from gshard.device.compiled_kernels import as_compiled
from gshard.device.fusion_model import Kernel, is_looked_up, kernels_of
from gshard.device.machine import Machine
from gshard.device.network import interchangeable
from gshard.device.roofline import dtype_of, launch_seconds, roofline
from gshard.device.step_times import StepTimes
from gshard.planning.objective import Windows
from gshard.planning.reshard_costs import Moves, has_many
from gshard.planning.strategies import share
from gshard.search.emitted import Emitted, as_kernel, has_own_way, own_ways
from gshard.solver.problem import Floats

# Of the time that a state's bytes take to read: among equals the one that takes less memory.
_TIE = 1e-3
# Of a call, how long a loop's stack is there: from the forward pass to the backward pass, or from there to the end.
_HELD = 0.5
# Seconds that a value takes which is sharded otherwise than the marks say: among equals what they say.
_FOLLOWS = 1e-10


class Seconds(Moves):
    """Seconds on one machine: an objective (``planning.objective``).

    Args:
        mesh: the devices.
        machine: as many.
        axes: those that move as wholes.
        joined: whether what may be sent in one message with others counts as if it were (``StepTimes``).
    """

    def __init__(self, mesh: Mesh, machine: Machine, axes: tuple[Atoms, ...], *, joined: bool = False):
        super().__init__(mesh, axes)
        self.machine, self.tie, self.fuses, self.counted = machine, _FOLLOWS, True, f"time on {machine.name}"
        self.held_byte_cost = self.stacked_byte_cost = _TIE / machine.memory_bandwidth
        self.extra_byte_cost = 0.0  # kernels count what they read and write
        self.times = StepTimes(machine, joined)
        # How many of each of the atoms that can take each other's places an axis has.
        alike = interchangeable(mesh, machine)
        self._places = {
            name: tuple(sum(a in own for a in some) for some in alike) for name, own in self.atoms_of.items()
        }
        self._own_ways = own_ways(on_machine(mesh, machine), machine)  # what messages share changes nothing of it
        self._traces = True  # an equation that runs in a way of its own, when its cost is needed first

    def step(self, step: Step, shape: tuple[int, ...], itemsize: int, mesh: Mesh) -> float:
        atoms = tuple(a for name in step.atoms for a in self.atoms_of.get(name, (name,)))
        return self.times.seconds(step, shape, itemsize, mesh, among=(self.mesh, atoms))

    def price_class(self, step: Step) -> Hashable:
        return self.times.price_class(step, self._coarse, self._places)

    def kernels(self, block: Block) -> Iterator[tuple[Kernel, int]]:
        """Equations as they are fused."""
        return as_compiled(kernels_of(block, windows=False), self.machine.compiler).walk()

    def cost_key(self, kernel: Kernel) -> Hashable:
        e = kernel.equation
        arrays = tuple((v.shape, short_dtype(v.dtype)) for v in (*e.inputs, *e.outputs))
        # What else is fused with it differs: by what that reads, and by its operations.
        numbers: dict[object, int] = {}
        needed = *kernel.reads, *kernel.carried
        same = tuple(numbers.setdefault(v, len(numbers)) for v in (*e.inputs, *needed))
        read = tuple(v.bytes for v in needed)
        spared = tuple(v in kernel.spared for v in (*kernel.reads, *kernel.writes)), kernel.spares_rows
        return e.rule, kernel.kind, arrays, same, read, kernel.vector_flops, kernel.moved, spared, kernel.returns

    def split_costs(self, kernel: Kernel, splits: Sequence[Split], marked_share: float) -> Floats:
        """float64 [ways]: one run of a kernel, its equation split so, and what its own way to run on shards takes."""
        e = kernel.equation
        rule = e.rule
        assert rule is not None
        taken = []
        for split in splits:
            part = share(rule, split, self.mesh)
            results = [result_sharding(rule, i, split) for i in range(len(e.outputs))]
            made = sum(local_bytes(x, s, self.mesh) for x, s in zip(e.outputs, results, strict=True))
            read = {}
            for i, x in enumerate(e.inputs):
                if isinstance(x, Value):
                    own = local_bytes(x, operand_sharding(rule, i, split), self.mesh)
                    read[x] = min(own, made) if is_looked_up(rule, i) else own
            alone = kernel.spares_rows and _splits_a_row(rule, split)
            spared = frozenset[Value]() if alone else kernel.spared
            written = 0 if spared.issuperset(kernel.writes) else made
            reads = (*(x for x in kernel.reads if x not in spared), *kernel.carried)
            moved = written + sum(read.get(x, x.bytes * part) for x in reads)
            more = 0.0
            if has_own_way(rule, split):
                emitted, alone_kernel = self.own(e, split), _of(as_kernel(e), part)
                least = self.work(e, *alone_kernel, made) if emitted is None else emitted.seconds
                more = least - self.work(e, *alone_kernel, made + sum(read.values()))
            # A result in parts is written by the collective that combines them.
            returns = kernel.returns and written > 0 and not any(s.unreduced for s in results)
            start = launch_seconds(self.machine, moved, returns=returns)
            taken.append(max(self.work(e, *_of(kernel, part), moved, returns=returns) + more, start))
        return np.array(taken)

    def sharding_costs(self, kernel: Kernel, states: Sequence[Sharding]) -> Floats:
        """float64 [states]: one run of an elementwise kernel, all of whose arrays are sharded so."""
        v = kernel.equation.outputs[0]
        parts = [math.prod(s.local_shape(self.mesh, v.shape)) / max(math.prod(v.shape), 1) for s in states]
        e, starts = kernel.equation, [kernel.starts and not s.unreduced for s in states]
        return np.array(
            [
                self.work(e, *_of(kernel, part), kernel.moved * part, returns=returns)
                for part, returns in zip(parts, starts, strict=True)
            ]
        )

    def windows(self, e: Equation, splits: Sequence[Split]) -> Iterator[tuple[int, Windows]]:
        """What an equation fetches of its operands, that others may share."""
        for i, split in enumerate(splits):
            if (emitted := self.own(e, split)) is not None:
                yield from ((i, own) for own in emitted.windows)

    def own(self, e: Equation, split: Split) -> Emitted | None:
        """What is emitted for an equation that runs on shards in a way of its own; None for others.

        None also for one that has not been traced yet, and is not (``assuming``). It takes at least what it takes to
        compute and to write the same results.
        """
        return self._own_ways.of(e, split, traces=self._traces)

    def assuming(self) -> Seconds:
        """The same, but equations are traced for the splits that ``price`` is given only."""
        found = copy.copy(self)
        found._traces = False
        return found

    def price(self, splits: Mapping[Equation, Split]) -> bool:
        unknown = [(e, split) for e, split in splits.items() if e.rule is not None and self.own(e, split) is None]
        return any([self._own_ways.of(e, split) is not None for e, split in unknown])

    def work(self, e: Equation, products: float, others: float, moved: float, *, returns: bool = False) -> float:
        """Of one kernel on one device.

        Args:
            e: its equation.
            products: operations of products, of the device's share.
            others: all other operations.
            moved: bytes that it reads and writes.
            returns: whether it writes a result of the program.
        """
        return roofline(self.machine, dtype_of(e), products, others, moved, returns=returns).seconds


def _splits_a_row(rule: Rule, split: Split) -> bool:
    """Whether devices share what is reduced: then the reduction is a kernel of its own."""
    return any(factor.kind == REDUCE and split.get(f) for f, factor in enumerate(rule.factors))


def _of(kernel: Kernel, part: float) -> tuple[float, float]:
    """The operations of products, and all others, in a part of a kernel."""
    return kernel.product_flops * part, kernel.vector_flops * part


def seconds_on(
    machine: Machine, *, joined: bool = False, call: float | None = None
) -> Callable[[Mesh, tuple[Atoms, ...]], Seconds]:
    """The objective for meshes of a machine's devices; plans that are made together share what moves cost.

    With ``call``, the approximate seconds of a call, memory has a price. A byte that a loop stacks costs its share of
    the memory, times the seconds for which it is held.
    """

    def objective(mesh: Mesh, axes: tuple[Atoms, ...]) -> Seconds:
        if has_many(mesh, axes):  # moves lead over the shardings of one plan only
            known = Seconds(mesh, machine, axes, joined=joined)
        else:
            known = copy.copy(_shared_seconds(machine, joined, mesh, axes))
        if call is not None:
            known.stacked_byte_cost = _HELD * call / machine.memory
        return known

    return objective


def on_machine(mesh: Mesh, machine: Machine, *, joined: bool = False) -> Mesh:
    """The mesh on which arrays are moved in the fastest way for a machine."""
    return dataclasses.replace(mesh, times=StepTimes(machine, joined))


@tabulated(16)
def _shared_seconds(machine: Machine, joined: bool, mesh: Mesh, axes: tuple[Atoms, ...]) -> Seconds:
    found = Seconds(mesh, machine, axes, joined=joined)
    if joined:  # what messages share changes what steps take, but not which of them take the same
        found.share_steps(_shared_seconds(machine, False, on_machine(mesh, machine), axes))
    return found
