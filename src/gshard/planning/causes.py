"""Splits the cost of a solution by cause: which equation computes, and which reshard or boundary sends.

Each cost of a node and each table of an edge of the problem (``planning.graph``) is one cause, so the causes of a
solution add up to its cost. The nodes decide which cause it is: an edge between a sharding group and a strategy is the
reshards of that equation's operands and results, an edge between a group and a leaf is what the boundary requires, and
so on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from gshard.comm.reshard import plan_reshard
from gshard.comm.steps import LOCAL
from gshard.core.program import Equation, Value, itemsize
from gshard.core.sharding import Sharding
from gshard.core.split import Split, operand_sharding, result_sharding
from gshard.language.region import REGIONS
from gshard.planning.graph import Graph
from gshard.planning.strategies import Component
from gshard.solver.problem import Ints


@dataclasses.dataclass(frozen=True, slots=True)
class Cause:
    """A part of the cost of a solution."""

    nodes: tuple[int, ...]  # the node of the problem, or the two nodes of an edge
    cost: float  # the cost, in the unit of the objective
    what: str  # the operation and its role: ``operand 1 of dot_general``
    moves: str = ""  # the steps of the reshard: ``all_gather over data``; empty if nothing is sent
    line: str = ""  # the user's source line; empty if there is none

    @property
    def text(self) -> str:
        """Everything but the cost, in one line."""
        moves = f": {self.moves}" if self.moves else ""
        return f"{self.what}{moves}{f' at {self.line}' if self.line else ''}"


class Causes:
    """Names the causes in solutions of one problem."""

    def __init__(self, graph: Graph):
        self._graph, self._mesh = graph, graph.mesh
        self._strategy: dict[int, tuple[Equation, Component, Sequence[Split]]] = {
            node: (e, component, choices) for (e, component), (node, choices) in graph.strategies.items()
        }
        self._producers = {v: e for e in graph.program.block.walk() for v in e.outputs}
        self._moved: dict[int, tuple[Value, Sequence[Sharding], str]] = {
            node: (v, states, f"{self._called(v)}, moved once for several readers")
            for v, (node, states) in graph.shared_reshards.items()
        }
        self._moved |= {
            node: (v, states, f"{self._called(v)}, as it leaves") for v, (node, states) in graph.leaves.items()
        }
        self._copies = {node: e for node, e, _ in graph.held if node >= len(graph.states)}
        self._computed: dict[int, list[Equation]] = {}
        for e in graph.program.block.walk():
            if e in graph.groups.tied:
                self._computed.setdefault(graph.groups.of[e.outputs[0]], []).append(e)
        self._crossings: dict[frozenset[int], Equation] = {}
        for e in graph.program.block.walk():
            for crossing in REGIONS[e.name].crossings(e) if e.rule is None else ():
                pair = (crossing.edge.outer, crossing.edge.inner)
                self._crossings.setdefault(frozenset(graph.groups.of[v] for v in pair), e)

    def costs(self, states: Ints) -> dict[tuple[int, ...], float]:
        """The cost of each node and each edge, by its nodes, with these states chosen; without zeros.

        Args:
            states: int64 [nodes].
        """
        problem = self._graph.problem
        costs: dict[tuple[int, ...], float] = {
            (i,): float(node_costs[states[i]]) for i, node_costs in enumerate(problem.costs)
        }
        for (u, v), table in zip(problem.ends.tolist(), problem.tables, strict=True):
            costs[u, v] = float(table[states[u], states[v]])
        return {nodes: cost for nodes, cost in costs.items() if cost}

    def cause(self, nodes: tuple[int, ...], states: Ints, cost: float) -> Cause:
        """The cause of a node's or an edge's cost, with these states chosen."""
        return self._of_node(nodes[0], cost) if len(nodes) == 1 else self._of_edge(nodes[0], nodes[1], states, cost)

    def _of_node(self, node: int, cost: float) -> Cause:
        if node in self._strategy:
            e, *_ = self._strategy[node]
            return Cause((node,), cost, f"{e.name} computes", line=e.line)
        if node in self._moved:
            v, _, what = self._moved[node]
            return Cause((node,), cost, f"{what}: a caller may have to move it", line=self._line(v))
        if node < len(self._graph.states):
            computing = self._computed.get(node, [])
            names = ", ".join(dict.fromkeys(e.name for e in computing))
            what = f"{names} compute, and their arrays are held" if computing else "the array is held"
            first = self._graph.groups.members[node][0]
            return Cause((node,), cost, what, line=computing[0].line if computing else self._line(first))
        return Cause((node,), cost, self._other(node), line=self._line_of_copy(node))

    def _of_edge(self, u: int, v: int, states: Ints, cost: float) -> Cause:
        for strategy, other in ((u, v), (v, u)):
            if strategy in self._strategy:
                return self._of_strategy(strategy, other, states, cost, (u, v))
        for moved, other in ((u, v), (v, u)):
            if moved in self._moved:
                value, choices, what = self._moved[moved]
                if other < len(self._graph.states) and self._graph.groups.of[value] == other:
                    moves = self._moves(value, self._graph.states[other][states[other]], choices[states[moved]])
                    return Cause((u, v), cost, what, moves, self._line(value))
                what = f"{self._called(value)}: the next call may take it as an argument"
                return Cause((u, v), cost, what, line=self._line(value))
        if (e := self._crossings.get(frozenset((u, v)))) is not None:
            return Cause((u, v), cost, f"an array enters or leaves {e.name}", line=e.line)
        return Cause((u, v), cost, self._other(max(u, v)), line=self._line_of_copy(max(u, v)))

    def _of_strategy(self, strategy: int, other: int, states: Ints, cost: float, nodes: tuple[int, ...]) -> Cause:
        e, component, choices = self._strategy[strategy]
        found = list(self._reshards(e, component, choices[states[strategy]], other, states))
        moved = [(role, moves) for role, moves in found if moves] or found[:1] or [("", "")]
        what = f"{' and '.join(role for role, _ in moved)} of {e.name}" if moved[0][0] else e.name
        return Cause(nodes, cost, what, ", ".join(dict.fromkeys(m for _, m in moved if m)), e.line)

    def _reshards(
        self, e: Equation, component: Component, split: Split, other: int, states: Ints
    ) -> Iterator[tuple[str, str]]:
        """The arrays of an equation that are in a group, or that it reads through a node: the role, and the reshard."""
        graph, rule = self._graph, e.rule
        assert rule is not None
        for i in component.operands:
            x = e.inputs[i]
            if not isinstance(x, Value):
                continue
            home = graph.shared_reshards[x][0] if x in graph.shared_reshards else graph.groups.of[x]
            if home == other:
                choices = graph.shared_reshards[x][1] if x in graph.shared_reshards else graph.states[home]
                yield f"operand {i}", self._moves(x, choices[states[home]], operand_sharding(rule, i, split))
        for i in component.results:
            x = e.outputs[i]
            if (home := graph.groups.of[x]) == other:
                result = result_sharding(rule, i, split)
                yield f"result {i}", self._moves(x, result, graph.states[home][states[home]])

    def _moves(self, v: Value, source: Sharding, target: Sharding) -> str:
        steps = plan_reshard(source, target, v.shape, itemsize(v.dtype), self._mesh)
        sent = (f"{s.kind} over {self._mesh.format_atoms(s.atoms)}" for s in steps if s.kind not in LOCAL)
        return ", ".join(dict.fromkeys(sent))

    def _other(self, node: int) -> str:
        """The name of a copy at the boundary of a loop, or of a window that several operations share."""
        names = self._graph.problem.names
        return names[node] if node < len(names) else "an array that is held"

    def _called(self, v: Value) -> str:
        """The name of an array: by the operation that computes it, or the name of an argument."""
        if (e := self._producers.get(v)) is not None:
            return f"result {e.outputs.index(v)} of {e.name}"
        return self._other(self._graph.groups.of[v])

    def _line(self, v: Value) -> str:
        return self._producers[v].line if v in self._producers else ""

    def _line_of_copy(self, node: int) -> str:
        return self._copies[node].line if node in self._copies else ""
