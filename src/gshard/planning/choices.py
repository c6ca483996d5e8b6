"""Choices: builds the planning problem of a program, its nodes, edges and costs (``planning.graph``).

An objective gives the costs; those of a body count as often as it runs. Marks, shardings of arguments and propagated
shardings (``planning.propagated``) limit the states of a sharding group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np

from gshard.core.manual_axes import axes_without, manual_axes
from gshard.core.mark import Demand
from gshard.core.plan import local_bytes
from gshard.core.program import Equation, Program, Value, itemsize
from gshard.core.program_boundary import AS_MARKED, Boundary
from gshard.core.rule import Rule
from gshard.core.sharding import Sharding
from gshard.core.split import Split, operand_sharding, result_sharding
from gshard.device.fusion_model import PASSING, REGION, Kernel
from gshard.language.region import REGIONS, Crossing
from gshard.planning.demands import demands
from gshard.planning.graph import CARRIED, STACKED, Brought, Graph
from gshard.planning.interned import Once
from gshard.planning.io_shardings import as_returned
from gshard.planning.nearby import changes
from gshard.planning.objective import Objective
from gshard.planning.propagated import Propagated
from gshard.planning.room import Room
from gshard.planning.seed_strategies import arrays_as, as_demanded, in_parts, met_in, shardings_as, ways_as
from gshard.planning.sharding_groups import free_to_leave, sharding_groups_of
from gshard.planning.shared_halos import SharedWindows
from gshard.planning.strategies import Component, components
from gshard.planning.value_classes import kinds_at, kinds_of
from gshard.solver.problem import Floats, Problem

# What a caller may have to move afterwards counts so much.
_AFTERWARDS = 1 / 8


def graph_of(
    program: Program,
    objective: Objective,
    *,
    propagated: Propagated | None = None,
    boundary: Boundary = AS_MARKED,
) -> Graph:
    """The problem of a program.

    Args:
        program: with the user's marks.
        objective: what choices cost, on a mesh.
        propagated: the shardings that follow from the marks. Arguments, and results that become arguments of the next
            call, keep them. Without, the shardings of these are chosen too.
        boundary: of arguments and results. A result that takes a donated argument's memory has its sharding.

    Raises:
        ShardingError: a mark does not fit its value or the mesh.
    """
    return _Builder(program, objective, propagated, boundary).graph()


class _Builder:
    def __init__(self, program: Program, objective: Objective, propagated: Propagated | None, boundary: Boundary):
        self.boundary, self.leaving = boundary, set[int]()
        self.program, self.objective, self.mesh, self.propagated = program, objective, objective.mesh, propagated
        self.times, self.inputs = dict(program.block.runs()), frozenset(program.block.inputs)
        self.made = {v: times for e, times in self.times.items() for v in e.outputs}
        self.manual, self.said = manual_axes(program.block, objective.mesh), dict[Value, list[Demand]]()
        for v, demand, _ in demands(program, self.mesh):
            self.said.setdefault(v, []).append(demand)
        self.crossings = [(e, c) for e in program.block.walk() if e.rule is None for c in REGIONS[e.name].crossings(e)]
        inner = {v for e in program.block.walk() for body in e.blocks for v in body.inputs}
        self.carried = inner & {c.edge.inner for _, c in self.crossings if not c.inward}
        self.room = Room({e for e, c in self.crossings if c.each_round or e.trip_count > 1}, propagated, self.mesh)
        entering = inner - {c.edge.inner for _, c in self.crossings if c.each_round}
        marked = {v: own[0].unreduced[0][1] for v, own in self.said.items() if own[0].unreduced}
        finished = {*program.block.inputs, *(self.said.keys() - marked.keys()), *entering}
        self.groups = sharding_groups_of(program, {*finished, *inner, *marked}, finished, marked, fused=objective.fuses)
        self.kinds, tied = kinds_of(program, propagated), self.groups.tied
        self.changes, given = changes(program, self.mesh, objective.axes), (self.kinds, tied, objective.axes)
        self.suggested = {} if propagated is None else in_parts(propagated, *given, whole=self.changes is not None)
        if propagated is not None:
            results = {v for v in program.block.outputs if isinstance(v, Value)} - propagated.kept
            self.leaving = free_to_leave(program, self.groups, results - self.said.keys() - self.inputs)
        self.once, self.windows = Once(), SharedWindows(program.block)
        alike = [tuple(dict.fromkeys(map(self.kinds.__getitem__, own))) for own in self.groups.members]
        self.states = tuple(self._states(k, own) for k, own in enumerate(alike))
        self.costs: list[Floats] = [self._otherwise(k, own) for k, own in enumerate(alike)]
        self.edges: list[tuple[int, int, Floats]] = []
        named = dict(zip(program.block.inputs, program.names, strict=True))
        self.names = [next((named[v] for v in own if v in named), f"%{own[0].index}") for own in self.groups.members]
        self.ways: dict[object, tuple[tuple[Split, ...], float]] = {}
        self.strategies: dict[tuple[Equation, Component], tuple[int, tuple[Split, ...]]] = {}
        self.shared_reshards: dict[Value, tuple[int, Sequence[Sharding]]] = {}
        self.leaves: dict[Value, tuple[int, Sequence[Sharding]]] = {}
        self.held: list[tuple[int, Equation, Sequence[int]]] = []
        self.brought: list[Brought] = []

    def graph(self) -> Graph:
        asked: dict[Equation, float] = {}
        for e in self.program.block.walk():
            if e.rule is None or e in self.groups.tied:
                continue
            for component in components(e.rule):
                ways, asked[e] = self._ways(e, component)
                self.strategies[e, component] = self._node(len(ways), f"{e.name} at {e.line}"), ways
        self.objective.visit(s for states in self.states for s in states)
        for (e, _), (_, ways) in self.strategies.items():
            self.objective.visit(met_in(_rule(e), ways))
        for kernel, times in self.objective.kernels(self.program.block):
            self._work(kernel, times, asked.get(kernel.equation, np.inf))
        for v, receivers in self.windows.shared():
            self._fetched_once(v, receivers)
        for (e, component), (node, ways) in self.strategies.items():
            for i in component.results:
                self.edges.append((self.groups.of[e.outputs[i]], node, self._making(e, ways, i)))
        self._shared_reshards()
        for e, crossing in self.crossings:
            self._crossing(e, crossing)
        after = self._leaves()
        for k, group in enumerate(self.groups.members):
            held = self._holding(group[0], self.states[k], self.objective.a_byte)
            self.costs[k] = self.once.plus(self.costs[k], len(group), held)
        return Graph(
            self.program, self.mesh, Problem.of(self.costs, self.edges, names=self.names), self.groups, self.states,
            self.strategies, self.shared_reshards, self.leaves, self.held, self.brought, after,
        )  # fmt: skip

    def _holding(self, v: Value, states: Sequence[Sharding], a_byte: float) -> Floats:
        key = "held", v.shape, itemsize(v.dtype), id(states), a_byte
        return self.once.table(key, lambda: np.array([local_bytes(v, s, self.mesh) for s in states]) * a_byte)

    def _node(self, states: int, name: str) -> int:
        self.costs.append(self.once.table(("free", states), lambda: np.zeros(states)))
        self.names.append(name)
        return len(self.costs) - 1

    def _shardings(
        self, v: Value, monoids: Sequence[str] = (), *, even: bool = False, group: Sequence[Value] = ()
    ) -> tuple[Sharding, ...]:
        axes = axes_without(self.objective.axes, self.manual.of_any(self.groups.members[self.groups.of[v]]))
        return shardings_as(group or (v,), self.propagated, self.mesh, axes, monoids, even=even, changes=self.changes)

    def _states(self, k: int, kinds: tuple[int, ...]) -> tuple[Sharding, ...]:
        """The shardings of a group that marks allow."""
        group, monoids = self.groups.members[k], self.groups.unreduced.get(k, ())
        demands = [d for v in group for d in self.said.get(v, ())]
        suggested = tuple(s for v in group for s in self.suggested.get(v, ())) if self.suggested else ()
        key = kinds, monoids, group[0] in self.inputs, suggested, k if demands else -1, self.manual.of_any(group)
        return self.once.states(key, lambda: self._allowed(group, monoids, suggested, demands))

    def _allowed(
        self, group: Sequence[Value], monoids: Sequence[str], suggested: Sequence[Sharding], said: Sequence[Demand]
    ) -> Sequence[Sharding]:
        v, given = group[0], self.propagated
        found = self._shardings(v, monoids, even=v in self.inputs, group=group)
        if given is not None and v in self.inputs:
            return tuple(dict.fromkeys((given.shardings[v], *(s for s in found if given.allow(v, s)))))
        if given is not None:
            fitting = (s for s in suggested if {m for _, m in s.unreduced} <= {*monoids})
            known = (own[v] for v in group for own in (given.shardings, given.moved) if v in own)
            found = tuple(dict.fromkeys((*known, *found, *fitting)))
        return as_demanded(found, said, self.manual.of_any(group))

    def _otherwise(self, k: int, kinds: tuple[int, ...]) -> Floats:
        """float64 [states]: a little for what is otherwise than propagation says, and the price of bytes beyond."""
        states, group, propagated = self.states[k], self.groups.members[k], self.propagated
        made = max(self.made.get(v, 0) for v in group)

        def find() -> Floats:
            free = propagated is None or any(v in propagated.undecided for v in group)
            known = set() if free or propagated is None else {propagated.shardings[v] for v in group}
            follows = np.array([0.0 if free or s in known else self.objective.tie for s in states])
            return follows + made * self.objective.a_byte_beyond * self.room.beyond(group, states)

        return self.once.table(("otherwise", kinds, made, id(states)), find)

    def _ways(self, e: Equation, component: Component) -> tuple[tuple[Split, ...], float]:
        """The splits of an equation, and the largest share of its work that a device has as the marks ask."""
        rule = _rule(e)
        of, unreduced = self.groups.of, self.groups.unreduced
        partial = any(isinstance(v, Value) and of[v] in unreduced for v in e.inputs)
        ways = [w for w in component.factors if w < 0] if partial else ()
        passing = frozenset(w for w in ways if self._may_pass(e, *rule.linear[-1 - w]))
        barred = self.manual.at(e)
        key = rule, component, passing, () if self.propagated is None else kinds_at(e, self.kinds), barred
        if key not in self.ways:
            arrays = () if self.propagated is None else arrays_as(e, self.propagated)
            axes, pinned = axes_without(self.objective.axes, barred), self.manual.pinned(e)
            self.ways[key] = ways_as(rule, component, passing, arrays, self.mesh, axes, barred, pinned, self.changes)
        return self.ways[key]

    def _may_pass(self, e: Equation, monoid: str, operands: Collection[int]) -> bool:
        values = [v for i in operands if isinstance(v := e.inputs[i], Value)]
        return any(monoid in self.groups.unreduced.get(self.groups.of[v], ()) for v in values)

    def _work(self, kernel: Kernel, times: int, asked: float) -> None:
        """Adds what a kernel takes to what decides how much of it a device does: a strategy, or a group."""
        e = kernel.equation
        if kernel.kind in (REGION, PASSING) or e.rule is None:
            return
        objective, alike = self.objective, self.objective.alike(kernel)
        if e in self.groups.tied:
            k = self.groups.of[e.outputs[0]]
            own = self.states[k]
            table = self.once.table(("work", alike, id(own)), lambda: objective.of_shardings(kernel, own))
        else:
            k, ways = self.strategies[e, components(e.rule)[0]]
            table = self.once.table(("work", alike, id(ways)), lambda: objective.of_splits(kernel, ways, asked))
            for state, window in objective.windows(e, ways):
                self.windows.add(e, ways[state], window, (k, state), times * min(window.cost, table[state]))
        self.costs[k] = self.once.plus(self.costs[k], times, table)

    def _fetched_once(self, v: Value, receivers: Mapping[tuple[int, int], float]) -> None:
        """A choice of its own: a window is fetched or not, and those who need it need not pay for it."""
        node = self._node(2, f"a window of {self.names[self.groups.of[v]]}")
        self.costs[node] = np.array([0.0, max(receivers.values())])
        tables = {k: np.zeros((2, self.costs[k].size)) for k, _ in receivers}
        for k in tables:
            self.costs[k] = self.costs[k].copy()
        for (k, state), cost in receivers.items():
            self.costs[k][state] = max(0.0, self.costs[k][state] - cost)
            tables[k][0, state] = np.inf
        self.edges += [(node, k, table) for k, table in tables.items()]

    def _making(self, e: Equation, ways: Sequence[Split], i: int) -> Floats:
        """Moves from how a result is made to its group's states."""
        rule, v = _rule(e), e.outputs[i]
        states = self.states[self.groups.of[v]]
        key = "making", rule, id(ways), i, v.shape, itemsize(v.dtype), id(states), self._cut_kind(v)
        table = self.once.table(key, lambda: self._going(v, self._met(rule, ways, i, result_sharding), states).T)
        return self.once.often(self.times[e], table)

    def _met(self, rule: Rule, ways: Sequence[Split], i: int, of: Callable[..., Sharding]) -> tuple[Sharding, ...]:
        return self.once.states((of, rule, id(ways), i), lambda: (of(rule, i, split) for split in ways))

    def _cut_kind(self, v: Value) -> int:
        return self.kinds[v] if self.groups.of[v] in self.leaving else -1  # what costs of cuts depend on

    def _cut_costs(self, v: Value, sources: Sequence[Sharding], targets: Sequence[Sharding]) -> Floats | float:
        """float64 [sources, targets]: ``inf`` where a sum would be cut in order to leave cut, though no mark cuts it.

        An unmarked sum over devices that is a result comes to all of them.
        """
        if self.groups.of[v] not in self.leaving:
            return 0.0
        assert self.propagated is not None
        marked = {*self.propagated.shardings[v].atoms, *(a for own in self.propagated.could(v).values() for a in own)}
        summed = [{a for a, _ in s.unreduced} - marked for s in sources]
        cut = [{a for atoms in s.dims for a in atoms} for s in targets]
        return np.array([[np.inf if mine & own else 0.0 for own in cut] for mine in summed])

    def _shared_reshards(self) -> None:
        """Moves from a group to how the strategies take a value; where several do, by a reshard that they share."""
        users: dict[Value, list[tuple[Equation, Component, int]]] = {}
        for e, component in self.strategies:
            for i in component.operands:
                if isinstance(x := e.inputs[i], Value):
                    users.setdefault(x, []).append((e, component, i))
        for v, who in users.items():
            k = self.groups.of[v]
            home, states = k, self.states[k]
            if len(who) > 1 and (len(states) > 1 or self.propagated is not None):
                home, states = self._shared_reshard(v, min(self.times[e] for e, _, _ in who))
            for e, component, i in who:
                node, ways = self.strategies[e, component]
                self.edges.append((home, node, self._taking(e, ways, i, states)))

    def _shared_reshard(self, v: Value, times: int) -> tuple[int, tuple[Sharding, ...]]:
        """How several take a value: a node, and its states."""
        k = self.groups.of[v]
        own, monoids = self.states[k], self.groups.unreduced.get(k, ())
        key = "read", self.kinds[v], id(own), monoids
        states = self.once.states(key, lambda: dict.fromkeys((*own, *self._shardings(v, monoids))))
        node = self._node(len(states), f"{self.names[k]}, as it is read")
        self.shared_reshards[v] = node, states
        table = self.once.table((*key, id(states)), lambda: self._move_costs(own, states, v))
        self.edges.append((k, node, self.once.often(times, table)))
        return node, states

    def _taking(self, e: Equation, ways: Sequence[Split], i: int, states: Sequence[Sharding]) -> Floats:
        """Moves from some states to how an operand is taken."""
        rule, v = _rule(e), e.inputs[i]
        assert isinstance(v, Value)

        def find() -> Floats:
            return self._going(v, states, self._met(rule, ways, i, operand_sharding))

        key = "taking", rule, id(ways), i, v.shape, itemsize(v.dtype), id(states), self._cut_kind(v)
        return self.once.often(self.times[e], self.once.table(key, find))

    def _crossing(self, e: Equation, crossing: Crossing) -> None:
        """Moves between a value outside of a region and one inside, and what is held while the region runs."""
        outer, inner = crossing.edge.outer, crossing.edge.inner
        outside, inside = self.groups.of[outer], self.groups.of[inner]
        stacked = len(outer.shape) - len(inner.shape)
        at_boundary = [Sharding(((),) * stacked + s.dims, s.unreduced) for s in self.states[inside]]
        times = self.times[e] * (e.trip_count if crossing.each_round else 1)
        sizes = [local_bytes(outer, s, self.mesh) for s in at_boundary]
        if crossing.inward and not crossing.each_round:
            # The region takes the value itself, or a copy that is moved and held until the region ends.
            copy = self._node(2 * len(at_boundary), f"{self.names[outside]}, as it enters {e.name} at {e.line}")
            moves = self._move_costs(self.states[outside], at_boundary, outer)
            same = np.array([[0.0 if a == b else np.inf for b in at_boundary] for a in self.states[outside]])
            if (more := self.room.more(e, crossing.edge, sizes)) is not None and inner not in self.carried:
                if stacked:  # whoever makes it, it is there until the loop ends: taken as it is, too
                    same, moves = (np.where(self.room.fits(e, more), table, np.inf) for table in (same, moves))
                self.brought.append(self.room.brought(copy, e, more, stacked > 0))
                self.costs[copy] = times * self.objective.a_byte_stacked * self.brought[-1].more.clip(0)
            self.edges.append((outside, copy, self.once.often(times, np.hstack([same, moves]))))
            equal = np.where(np.eye(len(at_boundary), dtype=bool), 0.0, np.inf)
            self.edges.append((copy, inside, np.vstack([equal, equal])))
            self.held.append((copy, e, [0] * len(sizes) + sizes))
        elif crossing.inward:
            moves = self._move_costs(self.states[outside], at_boundary, outer)
            self.edges.append((outside, inside, self.once.often(times, moves)))
        else:
            moves = self._move_costs(at_boundary, self.states[outside], outer).T
            self.edges.append((outside, inside, self.once.often(times, moves)))
            if stacked or inner in self.carried:
                self.held.append((inside, e, sizes))
                if (more := self.room.more(e, crossing.edge, sizes)) is not None:
                    self.brought.append(Brought(inside, e, more, STACKED if stacked else CARRIED))
            if stacked:
                held = self._holding(inner, self.states[inside], self.objective.a_byte_stacked)
                self.costs[inside] = self.once.plus(self.costs[inside], self.times[e] * outer.shape[0], held)

    def _move_costs(self, sources: Sequence[Sharding], targets: Sequence[Sharding], v: Value) -> Floats:
        return self.objective.table(sources, targets, v.shape, itemsize(v.dtype))

    def _leaves(self) -> set[Value]:
        """How results leave; those that take the place of arguments as these come."""
        donated = self.boundary.donated
        come, undecided = self.program.block.inputs, {} if self.propagated is None else self.propagated.undecided
        state = [*donated, *(i for i, v in enumerate(come) if v in undecided and i not in donated)]
        pairs = self.program.state(state)
        came, after = {v: come[i] for i, v in pairs}, {v for i, v in pairs if i in donated}
        for v in dict.fromkeys(v for v in self.program.block.outputs if isinstance(v, Value)):
            k = self.groups.of[v]
            if v in self.inputs or (v in self.said and not self.said[v][0].unreduced):
                continue
            kept = self._kept(v, came)
            states = self._leaving(v, self.states[k], kept)
            node = self._node(len(states), f"{self.names[k]}, as it leaves")
            key = self.kinds[v], id(self.states[k]), id(states), k in self.leaving
            self.costs[node] = self.once.table(("charged", *key), functools.partial(self._charged, v, states))
            self.leaves[v] = node, states
            table = self.once.table(("leaving", *key), functools.partial(self._going, v, self.states[k], states))
            self.edges.append((k, node, table))
            if v in came:
                a = self.groups.of[came[v]]
                same = np.array([[0.0 if s == t else np.inf for t in states] for s in self.states[a]])
                if v not in after:
                    self.edges.append((a, node, _AFTERWARDS * self._move_costs(states, self.states[a], v).T))
                elif np.isfinite(same).any():
                    self.edges.append((a, node, same))
        return after

    def _leaving(self, v: Value, own: Sequence[Sharding], kept: Sharding | None) -> tuple[Sharding, ...]:
        """The shardings in which a result may leave."""

        def find() -> Iterable[Sharding]:
            if kept is not None:
                return (kept,)
            every = *self._shardings(v, even=not self.boundary.keep_uneven), *(s for s in own if not s.unreduced)
            return dict.fromkeys(self._returned(v, s) for s in every)

        return self.once.states(("leaves", self.kinds[v], id(own), kept), find)

    def _going(self, v: Value, sources: Sequence[Sharding], targets: Sequence[Sharding]) -> Floats:
        return self._move_costs(sources, targets, v) + self._cut_costs(v, sources, targets)

    def _kept(self, v: Value, came: Mapping[Value, Value]) -> Sharding | None:
        """How a result leaves that has no choice: as the argument whose place it takes, or as propagation says."""
        if self.propagated is None:
            return self._returned(v, Sharding(self.said[v][0].dims)) if v in self.said else None
        known = self.propagated.shardings
        if came.get(v) in self.propagated.undecided:
            return None
        if v in came and (self.boundary.keep_uneven or known[came[v]].is_even(self.mesh, v.shape)):
            return known[came[v]] if came[v] in self.said else self._returned(v, known[came[v]])  # placed: unchanged
        return self._returned(v, Sharding(known[v].dims)) if v in self.propagated.kept else None  # finished

    def _returned(self, v: Value, s: Sharding) -> Sharding:
        return as_returned(s, v.shape, self.mesh, padded=self.boundary.keep_uneven)

    def _charged(self, v: Value, states: Sequence[Sharding]) -> Floats:
        """What leaving otherwise than the marks say costs: some callers have to bring it there."""
        known = None if self.propagated is None or v in self.propagated.undecided else self.propagated.shardings[v]
        if known is None or not (self.boundary.keep_uneven or known.is_even(self.mesh, v.shape)):
            return np.zeros(len(states))
        return _AFTERWARDS * self._move_costs(states, (known,), v)[:, 0]


def _rule(e: Equation) -> Rule:
    assert e.rule is not None
    return e.rule
