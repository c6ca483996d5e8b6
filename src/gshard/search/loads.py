"""Adds the memory of buffers, from first write to last read, to the planning problem."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from gshard.core.plan import local_bytes
from gshard.core.program import Equation, Value
from gshard.device.fusion_model import Kernels, kernels_of
from gshard.planning.graph import Graph
from gshard.solver.problem import Problem

_Load = tuple[int, int, int, Sequence[int]]


def with_loads(graph: Graph) -> Graph:
    """The problem with the bytes that each state holds, and their interval of time."""
    problem = graph.problem
    edges = [(u, v, table) for (u, v), table in zip(problem.ends.tolist(), problem.tables)]
    loaded = Problem.of(problem.costs, edges, _loads(graph), names=problem.names)
    return dataclasses.replace(graph, problem=loaded)


def _loads(graph: Graph) -> list[_Load]:
    clock = _Clock()
    clock.run(kernels_of(graph.program.block, windows=False))
    end = clock.now + 1

    def load(v: Value, start: int, stop: int) -> _Load:
        group = graph.groups.of[v]
        return group, start, stop, [0 if v.on_host else local_bytes(v, s, graph.mesh) for s in graph.states[group]]

    results = {v for v in graph.program.block.outputs if isinstance(v, Value)}
    loads = [load(v, 0, end + 1) for v in graph.program.block.inputs]
    for v, start in clock.written_at.items():
        if v not in graph.donated_results:
            loads.append(load(v, start, end + 1 if v in results else clock.last_read.get(v, start) + 1))
    return loads + [(group, *clock.spans[e], sizes) for group, e, sizes in graph.held if e in clock.spans]


@dataclasses.dataclass
class _Clock:
    """Numbers the moments at which each buffer is written first and read last.

    The moments of a body lie between those of its region.
    """

    now: int = 0
    written_at: dict[Value, int] = dataclasses.field(default_factory=dict)
    last_read: dict[Value, int] = dataclasses.field(default_factory=dict)
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
                self.written_at[v] = self.now
            for v in kernel.reads:
                self.last_read[v] = self.now
        self.last_read.update(dict.fromkeys(kernels.results, self.now + 1))
