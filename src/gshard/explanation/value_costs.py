"""Value costs: the shardings that planning compared for a value, with their costs, each by its cause."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence

from gshard.comm.reshard import plan_reshard
from gshard.comm.steps import LOCAL
from gshard.core.number_text import format_seconds, significant
from gshard.core.program import Equation, Value, format_bytes, itemsize
from gshard.core.rule import Split, operand_sharding, result_sharding
from gshard.core.sharding import Sharding
from gshard.device.machine import Machine
from gshard.explanation.rows import TensorRow
from gshard.language.region import REGIONS
from gshard.planning.demands import demands
from gshard.planning.graph import Graph
from gshard.planning.objective import BY_BYTES, MESSAGE
from gshard.planning.propagate import Choice
from gshard.planning.strategies import Component
from gshard.search.alternatives import SearchChoice
from gshard.solver.problem import Ints

# Splits the cost of a solution by cause: which equation computes, and which reshard or boundary sends.


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


_MOST = 32  # shardings of a value that are compared: each takes another solution of the problem
_PARTS, _NAMES = 4, 6  # causes of each that are printed, and names of other values
_SMALL = 1e-2  # of the largest part: smaller ones are printed in one line
_NOTHING = 1e-9  # of a cost: what rounding leaves


# What was chosen in the problem of a program: by planning, or by a search.
Compared = Choice | SearchChoice


@dataclasses.dataclass(frozen=True, slots=True)
class CostPart:
    """A part of a cost."""

    cost: float  # bytes or seconds
    cause: str  # the operation or boundary that asks for it, how arrays move for it, and the user's line


@dataclasses.dataclass(frozen=True, slots=True)
class CostRow:
    """A sharding that a value may have."""

    sharding: str  # as text
    cost: float  # of the best plan in which the value has it, in bytes or seconds; ``inf`` if there is none
    more: float  # the cost beyond that of the chosen plan
    chosen: bool  # whether the plan has it
    parts: tuple[CostPart, ...]  # of the cost; they add up to it
    changes: tuple[CostPart, ...]  # what its parts are more than those of the chosen plan, the largest change first


@dataclasses.dataclass(frozen=True, repr=False)
class ValueCosts:
    """What planning compared for one value; print it, or read its rows."""

    name: str  # of the value
    counted: str  # what a cost is: ``bytes sent``, or ``time on h100:1x8``
    rows: tuple[CostRow, ...]  # the shardings that were compared, the cheapest first
    notes: tuple[str, ...]  # marks that leave no choice, and values that have the same sharding

    @property
    def chosen(self) -> CostRow:
        """The sharding of the plan."""
        return next(row for row in self.rows if row.chosen)

    def format(self, most: int = 8) -> str:
        """The costs as text, with at most so many shardings."""
        title = f"costs of {self.name!r}, counted in {self.counted}" if self.rows else f"costs of {self.name!r}"
        lines = [title, *(f"  {note}" for note in self.notes)]
        first = [row for i, row in enumerate(self.rows) if i < most or row.chosen]
        wide = max((len(row.sharding) for row in first), default=0)
        for row in first:
            total = self._text(row.cost) if math.isfinite(row.cost) else "not possible"
            more = "chosen" if row.chosen else self._text(row.more, sign=True) if math.isfinite(row.cost) else ""
            lines.append(f"  {'*' if row.chosen else ' '} {row.sharding:<{wide}}  {total:>12}  {more}".rstrip())
            lines += [f"      {amount:>12}  {cause}" for amount, cause in self._shown(row)]
        if rest := [row for row in self.rows if row not in first]:
            lines.append(f"    {len(rest)} more, from {self._text(min(row.more for row in rest), sign=True)} on")
        return "\n".join(lines)

    def _shown(self, row: CostRow) -> list[tuple[str, str]]:
        """The largest parts of the chosen row, and the largest changes of another one; the rest in one line."""
        parts = row.parts if row.chosen else row.changes
        largest = max((abs(part.cost) for part in parts), default=0.0)
        shown = [part for part in parts if abs(part.cost) >= _SMALL * largest][:_PARTS]
        lines = [(self._text(part.cost, sign=not row.chosen), part.cause) for part in shown]
        rest = [part for part in parts if part not in shown]
        amount = sum(part.cost for part in rest)
        if abs(amount) >= _SMALL * largest:
            lines.append((self._text(amount, sign=not row.chosen), f"{len(rest)} more"))
        return lines

    def __str__(self) -> str:
        return self.format()

    __repr__ = __str__

    def _text(self, cost: float, *, sign: bool = False) -> str:
        before = "" if not sign else "-" if cost < 0 else "+"
        if self.counted.startswith(BY_BYTES):
            return f"{before}{format_bytes(round(abs(cost))) if abs(cost) >= 1 else f'{significant(abs(cost), 2)} B'}"
        return before + format_seconds(abs(cost))


def value_costs(
    choice: Compared | None, row: TensorRow, others: Sequence[str], machine: Machine | None = None
) -> ValueCosts:
    """What planning compared for a value."""
    name = row.short or row.name
    if choice is None:
        return ValueCosts(name, "", (), (f"it is {row.sharding}: no mark splits anything, so nothing was compared",))
    counted, notes = choice.counted, _notes(choice, row, others)
    if counted == BY_BYTES:
        counted += f"; a message counts {MESSAGE:.0f} B, operations little"
        if machine is not None:
            notes.append(f"the plan by bytes is as fast on {machine.name} as those by time, and was taken")
    return ValueCosts(name, counted, tuple(_Solutions(choice, row.value).rows()), tuple(notes))


class _Solutions:
    """The best solution of the problem for each sharding of a value."""

    def __init__(self, choice: Compared, value: Value):
        self.choice, self.value, self.causes = choice, value, Causes(choice.graph)
        self.group = choice.graph.groups.of[value]
        self.chosen = int(choice.states[self.group])
        self.solved = {state: choice.with_state(self.group, state) for state in _compared(choice, self.group)}
        self.costs = {k: self.causes.costs(states) for k, states in self.solved.items() if states is not None}
        base, tied = self.costs[self.chosen], set(choice.tied_to(self.group))
        # Causes that concern the group, or that cost more or less with another sharding of it.
        self.shown = {nodes for costs in self.costs.values() for nodes in costs if not tied.isdisjoint(nodes)}
        for costs in self.costs.values():
            differ = (n for n in {**costs, **base} if not math.isclose(costs.get(n, 0.0), base.get(n, 0.0)))
            self.shown.update(differ)

    def rows(self) -> list[CostRow]:
        """All shardings, the cheapest first."""
        choice, graph, found = self.choice, self.choice.graph, []
        for state, states in self.solved.items():
            sharding = graph.states[self.group][state]
            shown = sharding.format(graph.mesh, self.value.shape, self.value.dtype_name)
            cost = math.inf if states is None else graph.problem.value(states)
            parts = () if states is None else self._parts(state, states)
            changes = () if states is None or state == self.chosen else self._changes(state, states)
            found.append(CostRow(shown, cost, cost - choice.cost, state == self.chosen, parts, changes))
        return sorted(found, key=lambda row: (row.cost, not row.chosen))

    def _parts(self, state: int, states: Ints) -> tuple[CostPart, ...]:
        """The causes, equal ones together; what costs the same with every sharding is one part, the last."""
        costs = self.costs[state]
        parts = self._together((self._text(n, states, costs[n]), costs[n]) for n in sorted(self.shown & costs.keys()))
        rest = sum(cost for nodes, cost in costs.items() if nodes not in self.shown)
        return (*parts, CostPart(rest, "all else, which is the same whatever it is")) if rest else tuple(parts)

    def _changes(self, state: int, states: Ints) -> tuple[CostPart, ...]:
        """What causes cost more than in the chosen plan; each is named as where it costs more."""
        costs, base, found = self.costs[state], self.costs[self.chosen], []
        for nodes in sorted(self.shown):
            before, after = base.get(nodes, 0.0), costs.get(nodes, 0.0)
            own = (self.choice.states, before) if before > after else (states, after)
            found.append((self._text(nodes, *own), after - before))
        return tuple(part for part in self._together(found) if abs(part.cost) > _NOTHING * self.choice.cost)

    def _text(self, nodes: tuple[int, ...], states: Ints, cost: float) -> str:
        return self.causes.cause(nodes, states, cost).text

    def _together(self, parts: Iterable[tuple[str, float]]) -> list[CostPart]:
        sums: dict[str, float] = {}
        for text, cost in parts:
            sums[text] = sums.get(text, 0.0) + cost
        return sorted((CostPart(cost, text) for text, cost in sums.items()), key=lambda part: -abs(part.cost))


def _compared(choice: Compared, group: int) -> list[int]:
    """The states of a group that are compared: the chosen one, then those over few axes."""
    own, chosen = choice.graph.states[group], choice.states[group]
    return sorted(range(len(own)), key=lambda state: (state != chosen, len(own[state].atoms), state))[:_MOST]


def _notes(choice: Compared, row: TensorRow, others: Sequence[str]) -> list[str]:
    """Marks that leave no choice, and other values that have the same sharding."""
    graph = choice.graph
    group = graph.groups.of[row.value]
    members, count, layers = graph.groups.members[group], len(graph.states[group]), len(choice.tied_to(group))
    marks = [str(reason) for v, _, reason in demands(graph.program, graph.mesh) if v in members]
    notes = [f"{mark}: the mark is kept" for mark in dict.fromkeys(marks)]
    if count == 1 and not marks:
        comes = f"the marks decide how this argument comes: {row.reason}"
        notes.append(comes if row.is_argument else "no other sharding is possible")
    if layers > 1:
        notes.append(f"{layers} equal layers were planned alike, so each row is for all of them")
    if others:
        more = f" and {len(others) - _NAMES} more" if len(others) > _NAMES else ""
        notes.append(f"one sharding with {', '.join(others[:_NAMES])}{more}")
    if count > _MOST:
        notes.append(f"{count - _MOST} more shardings, over more axes, are not listed")
    return notes
