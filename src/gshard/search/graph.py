"""Graph: a program as a problem: what is to be chosen, and what each choice takes on a machine.

    bundle      values with one sharding; its states are shardings             (``search.bundles``)
    option      an equation (or a piece of one) that is no part of a bundle; its states are splits  (``search.ways``)
    reading     how several readers take a value: moved there once, from there each goes its own way

Between a bundle, its readings and the options that read or make it are moves (``comm.reshard``), between a value
outside and inside of a loop as well. All costs are seconds, those of bodies as often as they run. Marks, and shardings
of arguments, leave a bundle only the states that they allow.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from gshard.analysis.device_program import (
    PASSING,
    PRODUCT,
    REGION,
    Kernel,
    Kernels,
    flops,
    is_looked_up,
    kernels_of,
)
from gshard.analysis.machine import Machine
from gshard.core.mark import Demand
from gshard.core.mesh import Mesh
from gshard.core.plan import local_bytes
from gshard.core.program import Block, Equation, Program, Value, itemsize
from gshard.core.rule import Rule
from gshard.core.sharding import Sharding
from gshard.core.split import Split, operand_sharding, result_sharding
from gshard.passes.propagate import demands
from gshard.rules.region import REGIONS, Crossing
from gshard.search.bundles import Bundles, bundles_of
from gshard.search.emitted import as_kernel
from gshard.search.problem import Floats, Ints, Problem
from gshard.search.seconds import Seconds
from gshard.search.ways import Piece, pieces, shardings, share, splits

_Options = Mapping[tuple[Equation, Piece], Sequence[Split]]
_Window = tuple[Value, Sharding, object]  # of what, as it is read, which: in one block such are fetched once
_TIE = 1e-3  # of the time that a state's bytes take to read: among equals the one that takes less memory


@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
    """A program as a problem.

    Attributes:
        program: the program.
        mesh: what it is for.
        problem: nodes, tables and loads, without a limit; bundles come first, then options, then readings.
        bundles: the values of each bundle.
        states: of each bundle, its shardings.
    """

    program: Program
    mesh: Mesh
    problem: Problem
    bundles: Bundles
    states: tuple[tuple[Sharding, ...], ...]

    def shardings(self, chosen: Sequence[int] | Ints) -> dict[Value, Sharding]:
        """The sharding of every value, where these states are chosen."""
        return {v: self.states[k][chosen[k]] for v, k in self.bundles.of.items()}


def graph_of(program: Program, mesh: Mesh, machine: Machine, *, donated: Iterable[int] = ()) -> Graph:
    """The problem of a program on a mesh of a machine.

    Args:
        program: with the user's marks.
        mesh: the devices.
        machine: as many.
        donated: inputs of the program (captured arrays counted) whose memory results of the same kind take. Such a
            result has its argument's sharding.

    Raises:
        ShardingError: a mark does not fit its value or the mesh.
    """
    return _Builder(program, mesh, machine).graph(list(donated))


class _Builder:
    def __init__(self, program: Program, mesh: Mesh, machine: Machine):
        self.program, self.mesh, self.machine = program, mesh, machine
        self.seconds = Seconds(mesh, machine)
        self.kernels = kernels_of(program.block)
        self.times = dict(_times(program.block, 1))
        self.block_of = dict(_blocks(program.block))
        said: dict[Value, list[Demand]] = {}
        for v, demand, _ in demands(program, mesh):
            said.setdefault(v, []).append(demand)
        self.said = said
        self.crossings = [(e, c) for e in program.block.walk() if e.rule is None for c in REGIONS[e.name].crossings(e)]
        self.inner = {v for e in program.block.walk() for body in e.blocks for v in body.inputs}
        results = {v for v in program.block.outputs if isinstance(v, Value)}
        self.border = {*program.block.inputs, *results}
        self.bundles = bundles_of(program, {*program.block.inputs, *said, *self.inner})
        self.states = tuple(map(self._states, range(len(self.bundles.members))))
        self.costs: list[Floats] = [np.zeros(len(states)) for states in self.states]
        self.edges: list[tuple[int, int, Floats]] = []
        self.names = [_name_of_bundle(group, program) for group in self.bundles.members]
        self.tables: dict[object, Floats] = {}
        self.windows: dict[_Window, dict[tuple[int, int], float]] = {}
        self.held: list[tuple[int, Equation, list[int]]] = []  # nodes that hold bytes while a region runs

    def graph(self, donated: list[int]) -> Graph:
        equations = [e for e in self.program.block.walk() if e.rule is not None and e not in self.bundles.tied]
        options = {(e, piece): self._options(e, piece) for e in equations for piece in pieces(_rule(e))}
        first = len(self.states)
        number = {option: first + i for i, option in enumerate(options)}
        self.costs += [np.zeros(len(ways)) for ways in options.values()]
        self.names += [f"{e.name} at {e.line}" for e, _ in options]
        for kernel, times in self.kernels.walk():
            self._work(kernel, times, options, number)
        for (e, piece), ways in options.items():
            for i in piece.results:
                self.edges.append((self.bundles.of[e.outputs[i]], number[e, piece], self._making(e, ways, i)))
        self._shared_windows()
        self._readings(options, number)
        for e, crossing in self.crossings:
            self._crossing(e, crossing)
        loads = self._loads(self._donations(donated))
        for k, group in enumerate(self.bundles.members):
            held = [local_bytes(group[0], s, self.mesh) * len(group) for s in self.states[k]]
            self.costs[k] = self.costs[k] + np.array(held) * (_TIE / self.machine.memory_bandwidth)
        problem = Problem.of(self.costs, self.edges, loads, names=self.names)
        return Graph(self.program, self.mesh, problem, self.bundles, self.states)

    def _states(self, k: int) -> tuple[Sharding, ...]:
        """The shardings of a bundle that marks allow."""
        group = self.bundles.members[k]
        even = any(v in self.border for v in group)
        waits = k in self.bundles.unreduced and not even and all(map(_can_be_added, group))
        found = shardings(group[0].shape, self.mesh, unreduced=waits, even=even)
        for demand in (d for v in group for d in self.said.get(v, ())):
            pairs = [(s, zip(s.dims, demand.dims, demand.open, strict=True)) for s in found]
            found = tuple(s for s, dims in pairs if all(is_open or have == asked for have, asked, is_open in dims))
            found = found or (Sharding(demand.dims),)  # it names parts of axes, or axes in another order
        return found

    def _options(self, e: Equation, piece: Piece) -> tuple[Split, ...]:
        barred = _barred(e)
        ways = splits(_rule(e), piece, self.mesh)
        return tuple(split for split in ways if not any(atoms and f in barred for f, atoms in split.items()))

    def _work(
        self, kernel: Kernel, times: int, options: _Options, number: Mapping[tuple[Equation, Piece], int]
    ) -> None:
        """Adds what a kernel takes to what decides how much of it a device does: an option, or a bundle."""
        e = kernel.equation
        if kernel.kind in (REGION, PASSING) or e.rule is None:
            return
        if e in self.bundles.tied:
            k, v = self.bundles.of[e.outputs[0]], e.outputs[0]
            shares = [math.prod(s.local_shape(self.mesh, v.shape)) / max(math.prod(v.shape), 1) for s in self.states[k]]
            taken = [self._kernel(kernel, part, kernel.moved * part) for part in shares]
        else:
            option, taken = (e, pieces(e.rule)[0]), []
            k = number[option]
            for state, split in enumerate(options[option]):
                part = share(e.rule, split, self.mesh)
                made = sum(
                    local_bytes(x, result_sharding(e.rule, i, split), self.mesh) for i, x in enumerate(e.outputs)
                )
                read = {}
                for i, x in enumerate(e.inputs):
                    if isinstance(x, Value):
                        own = local_bytes(x, operand_sharding(e.rule, i, split), self.mesh)
                        read[x] = min(own, made) if is_looked_up(e.rule, i) else own
                moved = made + sum(read.get(x, x.bytes * part) for x in kernel.reads)
                more = self.seconds.own_way(e, split, *self._of(as_kernel(e), part), made + sum(read.values()))
                taken.append(max(self._kernel(kernel, part, moved) + more, self.machine.starting(moved)))
                emitted = self.seconds.own(e, split)
                for operand, which, seconds in emitted.windows if emitted is not None else ():
                    whose = e.inputs[operand]
                    if isinstance(whose, Value):
                        window = whose, operand_sharding(e.rule, operand, split), (self.block_of[e], which)
                        self.windows.setdefault(window, {})[k, state] = times * min(seconds, taken[-1])
        self.costs[k] = self.costs[k] + times * np.array(taken)

    def _shared_windows(self) -> None:
        """Windows that several equations take of one array are fetched once: a choice of its own, fetched or not."""
        for (v, _, _), takers in self.windows.items():
            if len({k for k, _ in takers}) < 2:
                continue
            node = len(self.costs)
            self.costs.append(np.array([0.0, max(takers.values())]))
            self.names.append(f"a window of {self.names[self.bundles.of[v]]}")
            tables = {k: np.zeros((2, self.costs[k].size)) for k, _ in takers}
            for (k, state), seconds in takers.items():
                self.costs[k][state] = max(0.0, self.costs[k][state] - seconds)
                tables[k][0, state] = np.inf
            self.edges += [(node, k, table) for k, table in tables.items()]

    def _kernel(self, kernel: Kernel, part: float, moved: float) -> float:
        return self.seconds.work(kernel.equation, *self._of(kernel, part), moved)

    def _of(self, kernel: Kernel, part: float) -> tuple[float, float]:
        """The operations of products, and all others, in a part of a kernel."""
        products = flops(kernel.equation) if kernel.kind == PRODUCT else 0
        return products * part, kernel.vector_flops * part

    def _making(self, e: Equation, ways: Sequence[Split], i: int) -> Floats:
        """Moves from how a result is made to its bundle's states."""
        rule, v = _rule(e), e.outputs[i]
        states = self.states[self.bundles.of[v]]
        key = "making", rule, _barred(e), i, v.shape, itemsize(v.dtype), states
        if key not in self.tables:
            made = [result_sharding(rule, i, split) for split in ways]
            self.tables[key] = self._moves(made, states, v).T
        return self.times[e] * self.tables[key]

    def _readings(self, options: _Options, number: Mapping[tuple[Equation, Piece], int]) -> None:
        """Moves from a bundle to how the options take a value; where several do, by a reading between them."""
        readers: dict[Value, list[tuple[Equation, Piece, int]]] = {}
        for e, piece in options:
            for i in piece.operands:
                if isinstance(x := e.inputs[i], Value):
                    readers.setdefault(x, []).append((e, piece, i))
        for v, who in readers.items():
            k = self.bundles.of[v]
            home, states = k, self.states[k]
            if len(who) > 1 and len(states) > 1:
                waits = any(s.unreduced for s in states)
                home, states = len(self.costs), shardings(v.shape, self.mesh, unreduced=waits)
                self.costs.append(np.zeros(len(states)))
                self.names.append(f"{self.names[k]}, as it is read")
                times = min(self.times[e] for e, _, _ in who)
                key = "read", v.shape, itemsize(v.dtype), self.states[k], states
                if key not in self.tables:
                    self.tables[key] = self._moves(self.states[k], states, v)
                self.edges.append((k, home, times * self.tables[key]))
            for e, piece, i in who:
                rule = _rule(e)
                taken_key = "taking", rule, _barred(e), i, v.shape, itemsize(v.dtype), states
                if taken_key not in self.tables:
                    wanted = [operand_sharding(rule, i, split) for split in options[e, piece]]
                    self.tables[taken_key] = self._moves(states, wanted, v)
                self.edges.append((home, number[e, piece], self.times[e] * self.tables[taken_key]))

    def _crossing(self, e: Equation, crossing: Crossing) -> None:
        """Moves between a value outside of a region and one inside, and what is held while the region runs."""
        outer, inner = crossing.edge.outer, crossing.edge.inner
        outside, inside = self.bundles.of[outer], self.bundles.of[inner]
        stacked = len(outer.shape) - len(inner.shape)
        at_border = [Sharding(((),) * stacked + s.dims, s.unreduced) for s in self.states[inside]]
        times = self.times[e] * (e.trips if crossing.each_round else 1)
        sizes = [local_bytes(outer, s, self.mesh) for s in at_border]
        if crossing.inward and not crossing.each_round:
            # Either it is taken as it is, or a copy of it is moved, which is there until the region ends.
            copy = len(self.costs)
            self.costs.append(np.zeros(2 * len(at_border)))
            self.names.append(f"{self.names[outside]}, as it enters {e.name} at {e.line}")
            moves = self._moves(self.states[outside], at_border, outer)
            same = np.array([[0.0 if a == b else np.inf for b in at_border] for a in self.states[outside]])
            self.edges.append((outside, copy, times * np.hstack([same, moves])))
            equal = np.where(np.eye(len(at_border), dtype=bool), 0.0, np.inf)
            self.edges.append((copy, inside, np.vstack([equal, equal])))
            self.held.append((copy, e, [0] * len(sizes) + sizes))
        elif crossing.inward:
            self.edges.append((outside, inside, times * self._moves(self.states[outside], at_border, outer)))
        else:
            self.edges.append((outside, inside, times * self._moves(at_border, self.states[outside], outer).T))
            if stacked or inner in self.inner:
                self.held.append((inside, e, sizes))

    def _moves(self, sources: Sequence[Sharding], targets: Sequence[Sharding], v: Value) -> Floats:
        size = itemsize(v.dtype)
        return np.array([[self.seconds.move(a, b, v.shape, size) for b in targets] for a in sources])

    def _donations(self, donated: Iterable[int]) -> set[Value]:
        """The results that take the place of arguments; each gets the sharding of its argument."""
        pairs = [(self.program.block.inputs[i], after) for i, after in self.program.state(donated)]
        for v, after in pairs:
            a, b = self.bundles.of[v], self.bundles.of[after]
            same = np.array([[0.0 if s == t else np.inf for t in self.states[b]] for s in self.states[a]])
            if a != b and np.isfinite(same).any():
                self.edges.append((a, b, same))
        return {after for _, after in pairs}

    def _loads(self, elsewhere: set[Value]) -> list[tuple[int, int, int, list[int]]]:
        """Bytes of every buffer from the moment when it is made until it is last read."""
        clock = _Clock()
        clock.run(self.kernels)
        end = clock.now + 1
        found = []
        results = {v for v in self.program.block.outputs if isinstance(v, Value)}
        for v in self.program.block.inputs:
            found.append(self._load(v, 0, end + 1))
        for v, start in clock.made.items():
            if v not in elsewhere:
                found.append(self._load(v, start, end + 1 if v in results else clock.last.get(v, start) + 1))
        return found + [(k, *clock.spans[e], sizes) for k, e, sizes in self.held if e in clock.spans]

    def _load(self, v: Value, start: int, end: int) -> tuple[int, int, int, list[int]]:
        k = self.bundles.of[v]
        return k, start, end, [local_bytes(v, s, self.mesh) for s in self.states[k]]


@dataclasses.dataclass
class _Clock:
    """When each buffer is made and last read; a body's moments are between those of its region."""

    now: int = 0
    made: dict[Value, int] = dataclasses.field(default_factory=dict)
    last: dict[Value, int] = dataclasses.field(default_factory=dict)
    spans: dict[Equation, tuple[int, int]] = dataclasses.field(default_factory=dict)

    def run(self, kernels: Kernels) -> None:
        for kernel in kernels.kernels:
            self.now += 1
            if kernel.bodies:
                start = self.now
                for body in kernel.bodies:
                    self.run(body)
                self.now += 1
                self.spans[kernel.equation] = start, self.now
            for v in kernel.writes:
                self.made[v] = self.now
            for v in kernel.reads:
                self.last[v] = self.now
        for out in kernels.block.outputs:
            if isinstance(out, Value):
                self.last[kernels.home.get(out, out)] = self.now + 1


def _rule(e: Equation) -> Rule:
    assert e.rule is not None
    return e.rule


def _can_be_added(v: Value) -> bool:
    return bool(jnp.issubdtype(v.dtype, jnp.number))


def _barred(e: Equation) -> frozenset[int]:
    """The ways for parts of sums to pass that are none, since what would pass cannot be added, such as booleans."""
    assert e.rule is not None
    numbers = {i for i, v in enumerate(e.inputs) if isinstance(v, Value) and _can_be_added(v)}
    added = all(map(_can_be_added, e.outputs))
    return frozenset(-1 - k for k, (_, operands) in enumerate(e.rule.linear) if not (added and operands <= numbers))


def _times(block: Block, times: int) -> Iterator[tuple[Equation, int]]:
    """How often each equation runs in one call."""
    for e in block.equations:
        yield e, times
        for body in e.blocks:
            yield from _times(body, times * e.trips)


def _blocks(block: Block) -> Iterator[tuple[Equation, Block]]:
    """In which block each equation is."""
    for e in block.equations:
        yield e, block
        for body in e.blocks:
            yield from _blocks(body)


def _name_of_bundle(group: Sequence[Value], program: Program) -> str:
    named = dict(zip(program.block.inputs, program.names, strict=True))
    return next((named[v] for v in group if v in named), f"%{group[0].index}")
