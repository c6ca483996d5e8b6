"""Builds the planning problem of a program: nodes, edges and costs (``planning.graph``).

An objective gives the costs. What a loop runs counts once for each iteration. ``planning.choice_tables`` lists the
states of the nodes and computes the cost tables; this module adds a node for each choice and an edge for each reshard.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from gshard.core.plan import Plan, local_bytes
from gshard.core.program import Edge, Equation, Program, Value
from gshard.core.program_boundary import AS_MARKED, Boundary
from gshard.core.sharding import Sharding
from gshard.core.split import Split
from gshard.device.fusion_model import PASSING, REGION, Kernel
from gshard.language.region import Crossing
from gshard.planning.choice_tables import ChoiceTables, rule_of
from gshard.planning.graph import CARRIED, STACKED, Graph, LoopBytes
from gshard.planning.objective import Objective, StackCost
from gshard.planning.propagated import Propagated
from gshard.planning.seed_strategies import array_shardings
from gshard.planning.shared_halos import SharedWindows
from gshard.planning.strategies import Component, components
from gshard.solver.problem import Floats, Problem


def graph_of(
    program: Program,
    objective: Objective,
    *,
    propagated: Propagated | None = None,
    boundary: Boundary = AS_MARKED,
    near: Plan | None = None,
) -> Graph:
    """Builds the planning problem of a program."""
    return _Builder(ChoiceTables(program, objective, propagated, boundary, near)).graph()


class _Builder:
    """The nodes and edges so far. Nodes are numbered in the order of their creation; groups come first."""

    def __init__(self, tables: ChoiceTables):
        self.tables = tables
        self.program, self.objective, self.mesh = tables.program, tables.objective, tables.objective.mesh
        self.groups, self.states, self.interned = tables.groups, tables.states, tables.interned
        self.costs: list[Floats] = [tables.group_costs(group) for group in range(len(self.states))]
        self.edges: list[tuple[int, int, Floats]] = []
        argument_names = dict(zip(self.program.block.inputs, self.program.names, strict=True))
        self.names = [
            next((argument_names[v] for v in group if v in argument_names), f"%{group[0].index}")
            for group in self.groups.members
        ]
        self.windows = SharedWindows(self.program.block)
        self.strategies: dict[tuple[Equation, Component], tuple[int, tuple[Split, ...]]] = {}
        self.shared_reshards: dict[Value, tuple[int, Sequence[Sharding]]] = {}
        self.leaves: dict[Value, tuple[int, Sequence[Sharding]]] = {}
        self.held: list[tuple[int, Equation, Sequence[int]]] = []
        self.loop_bytes: list[LoopBytes] = []

    def graph(self) -> Graph:
        marked_shares = self._add_strategies()
        if self.tables.is_limited:
            self.objective = self.tables.objective = self.objective.through(self._shardings())
        for kernel, runs in self.objective.kernels(self.program.block):
            self._add_kernel(kernel, runs, marked_shares.get(kernel.equation, np.inf))
        for stack in self.objective.stack_costs(self.program.block):
            self._add_stack(stack)
        for v, receivers in self.windows.shared():
            self._add_shared_window(v, receivers)
        for (e, component), (node, splits) in self.strategies.items():
            for i in component.results:
                self.edges.append((self.groups.of[e.outputs[i]], node, self.tables.result_costs(e, splits, i)))
        self._add_operands()
        for e, crossing in self.tables.crossings:
            self._add_crossing(e, crossing)
        donated_results = self._add_results()
        for k, group in enumerate(self.groups.members):
            held = self.tables.held_costs(group[0], self.states[k], self.objective.held_byte_cost)
            self.costs[k] = self.interned.plus(self.costs[k], len(group), held)
        return Graph(
            program=self.program,
            mesh=self.mesh,
            problem=Problem.of(self.costs, self.edges, names=self.names),
            groups=self.groups,
            states=self.states,
            strategies=self.strategies,
            shared_reshards=self.shared_reshards,
            leaves=self.leaves,
            held=self.held,
            loop_bytes=self.loop_bytes,
            donated_results=donated_results,
            is_limited=self.tables.is_limited,
        )

    def _shardings(self) -> Iterator[Sharding]:
        """The states of groups, and the shardings in which equations read and make arrays under each split."""
        yield from itertools.chain(*dict.fromkeys(self.states))
        for rule, splits in {
            (id(e.rule), id(s)): (rule_of(e), s) for (e, _), (_, s) in self.strategies.items()
        }.values():
            yield from itertools.chain(*array_shardings(rule, splits))

    def _add_node(self, states: int, name: str) -> int:
        self.costs.append(self.interned.table(("free", states), lambda: np.zeros(states)))
        self.names.append(name)
        return len(self.costs) - 1

    def _add_strategies(self) -> dict[Equation, float]:
        """Adds a node for each component of each equation outside of the groups."""
        marked_shares: dict[Equation, float] = {}
        for e in self.program.block.walk():
            if e.rule is None or e in self.groups.tied:
                continue
            for component in components(e.rule):
                splits, marked_shares[e] = self.tables.splits_of(e, component)
                self.strategies[e, component] = self._add_node(len(splits), f"{e.name} at {e.line}"), splits
        return marked_shares

    def _add_kernel(self, kernel: Kernel, runs: int, marked_share: float) -> None:
        """Adds the cost of a kernel to the node that decides how much of it a device runs: a strategy, or a group."""
        e = kernel.equation
        if kernel.kind in (REGION, PASSING) or e.rule is None:
            return
        objective, cost_key = self.objective, self.objective.cost_key(kernel)
        if e in self.groups.tied:
            node = self.groups.of[e.outputs[0]]
            states = self.states[node]
            table = self.interned.table(
                ("work", cost_key, id(states)), lambda: objective.sharding_costs(kernel, states)
            )
        else:
            node, splits = self.strategies[e, components(e.rule)[0]]
            table = self.interned.table(
                ("work", cost_key, id(splits)), lambda: objective.split_costs(kernel, splits, marked_share)
            )
            for state, window in objective.windows(e, splits):
                cost = runs * min(window.cost, table[state])
                self.windows.add(e, splits[state], window, (node, state), cost)
        self.costs[node] = self.interned.plus(self.costs[node], runs, table)

    def _add_stack(self, stack: StackCost) -> None:
        """Adds what a loop moves for a slice of its stacks to the group of the slice."""
        group = self.groups.of[stack.value]
        states = self.states[group]
        table = self.tables.held_costs(stack.value, states, stack.byte_cost)
        key = "stack", id(table), stack.run_cost
        self.costs[group] = self.interned.plus(
            self.costs[group], stack.runs, self.interned.table(key, lambda: table + stack.run_cost)
        )

    def _add_shared_window(self, v: Value, receivers: Mapping[tuple[int, int], float]) -> None:
        """Adds a node with two states: a window is not fetched, or it is, and its receivers do not pay for it."""
        node = self._add_node(2, f"a window of {self.names[self.groups.of[v]]}")
        self.costs[node] = np.array([0.0, max(receivers.values())])
        tables = {receiver: np.zeros((2, self.costs[receiver].size)) for receiver, _ in receivers}
        for receiver in tables:
            self.costs[receiver] = self.costs[receiver].copy()
        for (receiver, state), cost in receivers.items():
            self.costs[receiver][state] = max(0.0, self.costs[receiver][state] - cost)
            tables[receiver][0, state] = np.inf
        self.edges += [(node, receiver, table) for receiver, table in tables.items()]

    def _add_operands(self) -> None:
        """Adds the reshards from a group to the strategies that read a value, through a shared node if several do."""
        readers: dict[Value, list[tuple[Equation, Component, int]]] = {}
        for e, component in self.strategies:
            for i in component.operands:
                if isinstance(v := e.inputs[i], Value):
                    readers.setdefault(v, []).append((e, component, i))
        for v, reads in readers.items():
            source = self.groups.of[v]
            states = self.states[source]
            if len(reads) > 1 and (len(states) > 1 or self.tables.propagated is not None):
                runs = min(self.tables.runs[e] for e, _, _ in reads)
                source, states = self._add_shared_reshard(v, runs)
            for e, component, i in reads:
                node, splits = self.strategies[e, component]
                self.edges.append((source, node, self.tables.operand_costs(e, splits, i, states)))

    def _add_shared_reshard(self, v: Value, runs: int) -> tuple[int, tuple[Sharding, ...]]:
        """Adds a node for the sharding in which several equations read a value."""
        group = self.groups.of[v]
        states, key = self.tables.read_states(v)
        node = self._add_node(len(states), f"{self.names[group]}, as it is read")
        self.shared_reshards[v] = node, states
        table = self.interned.table((key, id(states)), lambda: self.tables.move_costs(self.states[group], states, v))
        self.edges.append((group, node, self.interned.often(runs, table)))
        return node, states

    def _add_crossing(self, e: Equation, crossing: Crossing) -> None:
        """Adds the reshards between a value outside of a region and one inside, and the bytes that a loop holds."""
        outer, inner = crossing.edge.outer, crossing.edge.inner
        outside, inside = self.groups.of[outer], self.groups.of[inner]
        stacked_dims = len(outer.shape) - len(inner.shape)
        at_boundary = [Sharding(((),) * stacked_dims + s.dims, s.unreduced) for s in self.states[inside]]
        if crossing.inward and not crossing.each_round:
            self._add_region_input(e, crossing.edge, at_boundary)
            return
        runs = self.tables.runs[e] * (e.trip_count if crossing.each_round else 1)
        if crossing.inward:
            moves = self.tables.move_costs(self.states[outside], at_boundary, outer)
            self.edges.append((outside, inside, self.interned.often(runs, moves)))
            return
        moves = self.tables.move_costs(at_boundary, self.states[outside], outer).T
        self.edges.append((outside, inside, self.interned.often(runs, moves)))
        if stacked_dims or inner in self.tables.carried:
            sizes = [local_bytes(outer, s, self.mesh) for s in at_boundary]
            self.held.append((inside, e, sizes))
            extra = self.tables.room.extra_bytes(e, crossing.edge, sizes)
            if extra is not None:
                self.loop_bytes.append(LoopBytes(inside, e, extra, STACKED if stacked_dims else CARRIED))
        if stacked_dims:
            held = self.tables.held_costs(inner, self.states[inside], self.objective.stacked_byte_cost)
            self.costs[inside] = self.interned.plus(self.costs[inside], self.tables.runs[e] * outer.shape[0], held)

    def _add_region_input(self, e: Equation, edge: Edge, at_boundary: Sequence[Sharding]) -> None:
        """Adds a node for a value that a region reads: the value itself, or a copy that the region holds to its end."""
        outer, inner = edge.outer, edge.inner
        outside, inside = self.groups.of[outer], self.groups.of[inner]
        is_stacked = len(outer.shape) > len(inner.shape)
        runs = self.tables.runs[e]
        sizes = [local_bytes(outer, s, self.mesh) for s in at_boundary]
        copy = self._add_node(2 * len(at_boundary), f"{self.names[outside]}, as it enters {e.name} at {e.line}")
        moves = self.tables.move_costs(self.states[outside], at_boundary, outer)
        same = np.array([[0.0 if a == b else np.inf for b in at_boundary] for a in self.states[outside]])
        room = self.tables.room
        extra = room.extra_bytes(e, edge, sizes)
        if extra is not None and inner not in self.tables.carried:
            if is_stacked:  # memory holds a stack until the loop ends, whether or not it is moved
                fits = room.fits(e, extra)
                same, moves = np.where(fits, same, np.inf), np.where(fits, moves, np.inf)
            held = room.loop_input(copy, e, extra, is_stacked)
            self.loop_bytes.append(held)
            self.costs[copy] = runs * self.objective.stacked_byte_cost * held.extra_bytes.clip(0)
        self.edges.append((outside, copy, self.interned.often(runs, np.hstack([same, moves]))))
        equal = np.where(np.eye(len(at_boundary), dtype=bool), 0.0, np.inf)
        self.edges.append((copy, inside, np.vstack([equal, equal])))
        self.held.append((copy, e, [0] * len(sizes) + sizes))

    def _add_results(self) -> set[Value]:
        """Adds a node for the sharding in which each unmarked result of the program leaves."""
        tables = self.tables
        inputs, donated = self.program.block.inputs, tables.boundary.donated
        undecided = {} if tables.propagated is None else tables.propagated.undecided
        state = [*donated, *(i for i, v in enumerate(inputs) if v in undecided and i not in donated)]
        pairs = self.program.state(state)
        arguments = {v: inputs[i] for i, v in pairs}
        donated_results = {v for i, v in pairs if i in donated}
        for v in dict.fromkeys(v for v in self.program.block.outputs if isinstance(v, Value)):
            if v in tables.inputs or (v in tables.demands_of and not tables.demands_of[v][0].unreduced):
                continue
            group = self.groups.of[v]
            states = tables.result_states(v, arguments)
            node = self._add_node(len(states), f"{self.names[group]}, as it leaves")
            self.costs[node], moves = tables.leaving_costs(v, states)
            self.leaves[v] = node, states
            self.edges.append((group, node, moves))
            if v in arguments:
                self._add_next_argument(v, arguments[v], node, states, is_donated=v in donated_results)
        return donated_results

    def _add_next_argument(
        self, v: Value, argument: Value, node: int, states: Sequence[Sharding], *, is_donated: bool
    ) -> None:
        """Adds the edge between a result and the argument that it becomes in the next call."""
        group = self.groups.of[argument]
        if not is_donated:
            self.edges.append((group, node, self.tables.next_call_costs(v, states, argument)))
            return
        same = np.array([[0.0 if s == t else np.inf for t in states] for s in self.states[group]])
        if np.isfinite(same).any():
            self.edges.append((group, node, same))
