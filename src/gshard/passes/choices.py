"""Choices: what there is to choose from in a program, and what it costs, as the problem of ``passes.graph``.

Costs are those of an objective, those of bodies as often as they run. Marks, shardings of arguments, and facts
(``passes.facts``) leave a bundle only the states that they allow.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np

from gshard.core.border import AS_MARKED, Border
from gshard.core.mark import Demand
from gshard.core.mesh import Atoms
from gshard.core.plan import local_bytes
from gshard.core.program import Block, Equation, Program, Value, itemsize
from gshard.core.rule import PARALLEL, Rule
from gshard.core.sharding import Sharding
from gshard.core.split import Split, operand_sharding, result_sharding
from gshard.core.uneven import cut_evenly
from gshard.language.region import REGIONS, Crossing
from gshard.passes.bundles import bundles_of
from gshard.passes.candidates import candidates
from gshard.passes.device_program import PASSING, REGION, Kernel
from gshard.passes.facts import Facts, demands
from gshard.passes.graph import Graph
from gshard.passes.kinds import kinds_at, kinds_of
from gshard.passes.objective import Objective
from gshard.passes.suggested import arrays_as, in_parts
from gshard.passes.ways import Component, components, shardings, splits
from gshard.passes.windows import SharedWindows
from gshard.solver.problem import Floats, Problem

# What a caller may have to move afterwards counts so much.
_AFTERWARDS = 1 / 8


def graph_of(
    program: Program,
    objective: Objective,
    *,
    facts: Facts | None = None,
    border: Border = AS_MARKED,
) -> Graph:
    """The problem of a program.

    Args:
        program: with the user's marks.
        objective: what choices cost, on a mesh.
        facts: what follows from the marks: arguments, and results that are to go round, keep it. Without, they are
            to be chosen too.
        border: what is asked of arguments and results. A result that takes a donated argument's memory has its
            sharding.

    Raises:
        ShardingError: a mark does not fit its value or the mesh.
    """
    return _Builder(program, objective, facts, border).graph()


class _Builder:
    def __init__(self, program: Program, objective: Objective, facts: Facts | None, border: Border):
        self.border = border
        self.program, self.objective, self.mesh, self.facts = program, objective, objective.mesh, facts
        self.times, self.inputs = dict(_times(program.block, 1)), frozenset(program.block.inputs)
        self.said: dict[Value, list[Demand]] = {}
        for v, demand, _ in demands(program, self.mesh):
            self.said.setdefault(v, []).append(demand)
        self.crossings = [(e, c) for e in program.block.walk() if e.rule is None for c in REGIONS[e.name].crossings(e)]
        inner = {v for e in program.block.walk() for body in e.blocks for v in body.inputs}
        self.carried = inner & {c.edge.inner for _, c in self.crossings if not c.inward}
        self.loops = {e for e, c in self.crossings if c.each_round or e.trip_count > 1}
        entering = inner - {c.edge.inner for _, c in self.crossings if c.each_round}
        finished = {*program.block.inputs, *self.said, *entering}
        self.bundles = bundles_of(program, {*finished, *inner}, finished)
        self.kinds = kinds_of(program, facts)
        self.suggested = {} if facts is None else in_parts(facts, self.kinds, self.bundles.tied, objective.axes)
        self.leaving = set() if facts is None else self._free_to_leave(facts)
        # Equal ones are one object, by which tables are known, and what is found for some kinds of values.
        self.known: dict[tuple[Sharding, ...], tuple[Sharding, ...]] = {}
        self.found: dict[object, tuple[Sharding, ...]] = {}
        self.tables: dict[object, Floats] = {}
        self.sums: dict[object, tuple[Floats, Floats]] = {}
        alike = [tuple(dict.fromkeys(map(self.kinds.__getitem__, own))) for own in self.bundles.members]
        self.states = tuple(self._states(k, own) for k, own in enumerate(alike))
        self.costs: list[Floats] = [self._otherwise(k, own) for k, own in enumerate(alike)]
        self.edges: list[tuple[int, int, Floats]] = []
        named = dict(zip(program.block.inputs, program.names, strict=True))
        groups = self.bundles.members
        self.names = [next((named[v] for v in own if v in named), f"%{own[0].index}") for own in groups]
        self.windows = SharedWindows(program.block)
        self.ways: dict[object, tuple[tuple[Split, ...], tuple[Split, ...]]] = {}
        self.options: dict[tuple[Equation, Component], tuple[int, tuple[Split, ...]]] = {}
        self.readings: dict[Value, tuple[int, Sequence[Sharding]]] = {}
        self.leaves: dict[Value, tuple[int, Sequence[Sharding]]] = {}
        self.held: list[tuple[int, Equation, Sequence[int]]] = []
        self.brought: list[tuple[int, Equation, Floats]] = []

    def graph(self) -> Graph:
        marked: dict[Equation, tuple[Split, ...]] = {}
        for e in self.program.block.walk():
            if e.rule is None or e in self.bundles.tied:
                continue
            for component in components(e.rule):
                ways, marked[e] = self._ways(e, component)
                self.options[e, component] = self._node(len(ways), f"{e.name} at {e.line}"), ways
        for kernel, times in self.objective.kernels(self.program.block):
            self._work(kernel, times, marked.get(kernel.equation, ()))
        for v, receivers in self.windows.shared():
            self._fetched_once(v, receivers)
        for (e, component), (node, ways) in self.options.items():
            for i in component.results:
                self.edges.append((self.bundles.of[e.outputs[i]], node, self._making(e, ways, i)))
        self._readings()
        for e, crossing in self.crossings:
            self._crossing(e, crossing)
        after = self._leaves()
        for k, group in enumerate(self.bundles.members):
            key = "held", group[0].shape, itemsize(group[0].dtype), id(self.states[k])
            if key not in self.tables:
                held = [local_bytes(group[0], s, self.mesh) for s in self.states[k]]
                self.tables[key] = np.array(held) * self.objective.a_byte
            self._add_cost(k, len(group), self.tables[key])
        problem = Problem.of(self.costs, self.edges, names=self.names)
        return Graph(
            self.program, self.mesh, problem, self.bundles, self.states, self.options, self.readings, self.leaves,
            self.held, self.brought, after,
        )  # fmt: skip

    def _node(self, states: int, name: str) -> int:
        self.costs.append(self.tables.setdefault(("free", states), np.zeros(states)))
        self.names.append(name)
        return len(self.costs) - 1

    def _add_cost(self, k: int, times: int, table: Floats) -> None:
        """Adds what something costs so often. Equal sums are one array."""
        key = id(self.costs[k]), times, id(table)
        if key not in self.sums:
            self.sums[key] = self.costs[k], self.costs[k] + times * table
        self.costs[k] = self.sums[key][1]

    def _often(self, times: int, table: Floats) -> Floats:
        """What something costs that happens so often; what cannot be cannot, also in a loop without rounds."""
        if times == 1:
            return table
        key = times, id(table)
        if key not in self.sums:
            self.sums[key] = table, np.where(np.isinf(table), np.inf, times * np.where(np.isinf(table), 0.0, table))
        return self.sums[key][1]

    def _one(self, key: object, find: Callable[[], Iterable[Sharding]]) -> tuple[Sharding, ...]:
        if key not in self.found:
            states = tuple(find())
            self.found[key] = self.known.setdefault(states, states)
        return self.found[key]

    def _shardings(self, v: Value, monoids: Sequence[str] = (), *, even: bool = False) -> tuple[Sharding, ...]:
        axes, also = self.objective.axes, frozenset[tuple[int, Atoms]]()
        if self.facts is not None and not even:
            cut = enumerate(zip(v.shape, self.facts.shardings[v].dims, strict=True))
            also = frozenset((d, own) for d, (n, own) in cut if n % self.mesh.count(own))
        found = [shardings(v.shape, self.mesh, axes, unreduced=m, even=even, also=also) for m in monoids or ("",)]
        return found[0] if len(found) == 1 else tuple(dict.fromkeys(s for some in found for s in some))

    def _states(self, k: int, kinds: tuple[int, ...]) -> tuple[Sharding, ...]:
        """The shardings of a bundle that marks allow."""
        group = self.bundles.members[k]
        monoids = self.bundles.unreduced.get(k, ())
        demands = [d for v in group for d in self.said.get(v, ())]
        suggested = tuple(s for v in group for s in self.suggested.get(v, ())) if self.suggested else ()
        key = kinds, monoids, group[0] in self.inputs, suggested, k if demands else -1
        return self._one(key, lambda: self._allowed(group, monoids, suggested, demands))

    def _allowed(
        self, group: Sequence[Value], monoids: Sequence[str], suggested: Sequence[Sharding], said: Sequence[Demand]
    ) -> Sequence[Sharding]:
        v = group[0]
        found = self._shardings(v, monoids, even=v in self.inputs)
        if self.facts is not None and v in self.inputs:
            return tuple(dict.fromkeys((self.facts.shardings[v], *(s for s in found if self.facts.allow(v, s)))))
        if self.facts is not None:
            fitting = (s for s in suggested if {m for _, m in s.unreduced} <= {*monoids})
            known = (facts[v] for v in group for facts in (self.facts.shardings, self.facts.moved) if v in facts)
            found = tuple(dict.fromkeys((*known, *found, *fitting)))
        for demand in said:
            pairs = [(s, zip(s.dims, demand.dims, demand.open, strict=True)) for s in found]
            found = tuple(s for s, dims in pairs if all(is_open or have == asked for have, asked, is_open in dims))
            found = found or (Sharding(demand.dims),)  # it names parts of axes, or axes in another order
        return found

    def _free_to_leave(self, facts: Facts) -> set[int]:
        """The bundles of results that may leave as they like, and of what nothing but these is made of, in place."""
        block = self.program.block
        free = {v for v in block.outputs if isinstance(v, Value)} - facts.kept - self.said.keys() - set(block.inputs)
        found = {self.bundles.of[v] for v in free}
        users: dict[int, set[Equation]] = {}
        for e in block.walk():
            for v in e.inputs:
                if isinstance(v, Value):
                    users.setdefault(self.bundles.of[v], set()).add(e)
        for e in reversed(block.equations):
            if e.rule is not None and e.mark is None and {self.bundles.of[v] for v in e.outputs} <= found:
                if all(f.kind == PARALLEL for f in e.rule.factors):
                    own = (self.bundles.of[v] for v in e.inputs if isinstance(v, Value))
                    found.update(k for k in own if users[k] - self.bundles.tied <= {e})
        return found

    def _otherwise(self, k: int, kinds: tuple[int, ...]) -> Floats:
        """float64 [states]: a little for what is otherwise than the facts say."""
        states = self.states[k]
        key = "otherwise", kinds, id(states)
        if key not in self.tables:
            group, facts = self.bundles.members[k], self.facts
            free = facts is None or any(v in facts.undecided for v in group)
            known = set() if free or facts is None else {facts.shardings[v] for v in group}
            self.tables[key] = np.array([0.0 if free or s in known else self.objective.tie for s in states])
        return self.tables[key]

    def _ways(self, e: Equation, component: Component) -> tuple[tuple[Split, ...], tuple[Split, ...]]:
        """The splits of an equation, and those that the facts suggest."""
        rule = _rule(e)
        of, unreduced = self.bundles.of, self.bundles.unreduced
        partial = any(isinstance(v, Value) and of[v] in unreduced for v in e.inputs)
        ways = [w for w in component.factors if w < 0] if partial else ()
        passing = frozenset(w for w in ways if self._may_pass(e, *rule.linear[-1 - w]))
        key = rule, component, passing, () if self.facts is None else kinds_at(e, self.kinds)
        if key not in self.ways:
            arrays = () if self.facts is None else arrays_as(e, self.facts)
            near = [s for own in arrays for s in candidates(rule, own, self.mesh)] if rule.fixed is None else []
            suggested = tuple({f: a for f, a in s.items() if f in component.factors} for s in near)
            cuts = ((f, a, rule.factors[f].size) for s in suggested for f, a in s.items() if f >= 0)
            uneven = frozenset((f, a) for f, a, n in cuts if n % self.mesh.count(a))
            found = splits(rule, component, self.mesh, self.objective.axes, passing, uneven)
            known = {_key(split) for split in found}
            new = {_key(s): s for s in suggested if all(f >= 0 or f in passing for f, a in s.items() if a)}
            self.ways[key] = found + tuple(s for own, s in new.items() if own not in known), suggested
        return self.ways[key]

    def _may_pass(self, e: Equation, monoid: str, operands: Collection[int]) -> bool:
        values = [v for i in operands if isinstance(v := e.inputs[i], Value)]
        return any(monoid in self.bundles.unreduced.get(self.bundles.of[v], ()) for v in values)

    def _work(self, kernel: Kernel, times: int, marked: Sequence[Split]) -> None:
        """Adds what a kernel takes to what decides how much of it a device does: an option, or a bundle."""
        e = kernel.equation
        if kernel.kind in (REGION, PASSING) or e.rule is None:
            return
        if e in self.bundles.tied:
            k = self.bundles.of[e.outputs[0]]
            key = "work", self.objective.alike(kernel), id(self.states[k])
            if key not in self.tables:
                self.tables[key] = self.objective.of_shardings(kernel, self.states[k])
        else:
            k, ways = self.options[e, components(e.rule)[0]]
            key = "work", self.objective.alike(kernel), id(ways)
            if key not in self.tables:
                self.tables[key] = self.objective.of_splits(kernel, ways, marked)
            for state, window in self.objective.windows(e, ways):
                cost = times * min(window.cost, self.tables[key][state])
                self.windows.add(e, ways[state], window, (k, state), cost)
        self._add_cost(k, times, self.tables[key])

    def _fetched_once(self, v: Value, receivers: Mapping[tuple[int, int], float]) -> None:
        """A choice of its own: a window is fetched or not, and those who need it need not pay for it."""
        node = self._node(2, f"a window of {self.names[self.bundles.of[v]]}")
        self.costs[node] = np.array([0.0, max(receivers.values())])
        tables = {k: np.zeros((2, self.costs[k].size)) for k, _ in receivers}
        for k in tables:
            self.costs[k] = self.costs[k].copy()
        for (k, state), cost in receivers.items():
            self.costs[k][state] = max(0.0, self.costs[k][state] - cost)
            tables[k][0, state] = np.inf
        self.edges += [(node, k, table) for k, table in tables.items()]

    def _making(self, e: Equation, ways: Sequence[Split], i: int) -> Floats:
        """Moves from how a result is made to its bundle's states."""
        rule, v = _rule(e), e.outputs[i]
        states = self.states[self.bundles.of[v]]
        key = "making", rule, id(ways), i, v.shape, itemsize(v.dtype), id(states), self.bundles.of[v] in self.leaving
        if key not in self.tables:
            made = [result_sharding(rule, i, split) for split in ways]
            self.tables[key] = (self._move_costs(made, states, v) + self._cut_costs(v, made, states)).T
        return self._often(self.times[e], self.tables[key])

    def _cut_costs(self, v: Value, sources: Sequence[Sharding], targets: Sequence[Sharding]) -> Floats | float:
        """float64 [sources, targets]: ``inf`` where a sum would be cut in order to leave cut, though no mark cuts it.

        A sum over devices that nobody marked, and that is a result, comes to all of them.
        """
        if self.bundles.of[v] not in self.leaving:
            return 0.0
        assert self.facts is not None
        marked = {*self.facts.shardings[v].atoms, *(a for own in self.facts.could(v).values() for a in own)}
        summed = [{a for a, _ in s.unreduced} - marked for s in sources]
        cut = [{a for atoms in s.dims for a in atoms} for s in targets]
        return np.array([[np.inf if mine & own else 0.0 for own in cut] for mine in summed])

    def _readings(self) -> None:
        """Moves from a bundle to how the options take a value; where several do, by a reading between them."""
        users: dict[Value, list[tuple[Equation, Component, int]]] = {}
        for e, component in self.options:
            for i in component.operands:
                if isinstance(x := e.inputs[i], Value):
                    users.setdefault(x, []).append((e, component, i))
        for v, who in users.items():
            k = self.bundles.of[v]
            home, states = k, self.states[k]
            if len(who) > 1 and (len(states) > 1 or self.facts is not None):
                home_states, monoids = states, self.bundles.unreduced.get(k, ())
                states = self._one(
                    ("read", self.kinds[v], id(states), monoids),
                    lambda: dict.fromkeys((*home_states, *self._shardings(v, monoids))),
                )
                home = self._node(len(states), f"{self.names[k]}, as it is read")
                self.readings[v] = home, states
                times = min(self.times[e] for e, _, _ in who)
                key = "read", v.shape, itemsize(v.dtype), id(self.states[k]), id(states)
                if key not in self.tables:
                    self.tables[key] = self._move_costs(self.states[k], states, v)
                self.edges.append((k, home, self._often(times, self.tables[key])))
            for e, component, i in who:
                rule, (node, ways) = _rule(e), self.options[e, component]
                taken_key = "taking", rule, id(ways), i, v.shape, itemsize(v.dtype), id(states), k in self.leaving
                if taken_key not in self.tables:
                    wanted = [operand_sharding(rule, i, split) for split in ways]
                    self.tables[taken_key] = self._move_costs(states, wanted, v) + self._cut_costs(v, states, wanted)
                self.edges.append((home, node, self._often(self.times[e], self.tables[taken_key])))

    def _crossing(self, e: Equation, crossing: Crossing) -> None:
        """Moves between a value outside of a region and one inside, and what is held while the region runs."""
        outer, inner = crossing.edge.outer, crossing.edge.inner
        outside, inside = self.bundles.of[outer], self.bundles.of[inner]
        stacked = len(outer.shape) - len(inner.shape)
        at_border = [Sharding(((),) * stacked + s.dims, s.unreduced) for s in self.states[inside]]
        times = self.times[e] * (e.trip_count if crossing.each_round else 1)
        sizes = [local_bytes(outer, s, self.mesh) for s in at_border]
        if crossing.inward and not crossing.each_round:
            # Either it is taken as it is, or a copy of it is moved, which is there until the region ends.
            copy = self._node(2 * len(at_border), f"{self.names[outside]}, as it enters {e.name} at {e.line}")
            moves = self._move_costs(self.states[outside], at_border, outer)
            if self.facts is not None and e in self.loops and inner not in self.carried:
                known = self.facts.shardings
                more = np.array(sizes) - local_bytes(outer, known[outer], self.mesh)
                if stacked:  # a slice of it is gathered in each round, not all of it before
                    same = np.array([s == known[inner] for s in self.states[inside]])
                    moves = np.where((more <= 0) | same, moves, np.inf)
                else:
                    self.brought.append((copy, e, np.concatenate([np.zeros(len(sizes)), more])))
            same = np.array([[0.0 if a == b else np.inf for b in at_border] for a in self.states[outside]])
            self.edges.append((outside, copy, self._often(times, np.hstack([same, moves]))))
            equal = np.where(np.eye(len(at_border), dtype=bool), 0.0, np.inf)
            self.edges.append((copy, inside, np.vstack([equal, equal])))
            self.held.append((copy, e, [0] * len(sizes) + sizes))
        elif crossing.inward:
            self.edges.append(
                (outside, inside, self._often(times, self._move_costs(self.states[outside], at_border, outer)))
            )
        else:
            self.edges.append(
                (outside, inside, self._often(times, self._move_costs(at_border, self.states[outside], outer).T))
            )
            if stacked or inner in self.carried:
                self.held.append((inside, e, sizes))

    def _move_costs(self, sources: Sequence[Sharding], targets: Sequence[Sharding], v: Value) -> Floats:
        return self.objective.table(sources, targets, v.shape, itemsize(v.dtype))

    def _leaves(self) -> set[Value]:
        """How results leave; those that take the place of arguments as these come."""
        donated, keep_uneven = self.border.donated, self.border.keep_uneven
        come, undecided = self.program.block.inputs, {} if self.facts is None else self.facts.undecided
        state = [*donated, *(i for i, v in enumerate(come) if v in undecided and i not in donated)]
        pairs = self.program.state(state)
        came, after = {v: come[i] for i, v in pairs}, {v for i, v in pairs if i in donated}
        for v in dict.fromkeys(v for v in self.program.block.outputs if isinstance(v, Value)):
            k = self.bundles.of[v]
            if v in self.inputs or v in self.said:
                continue
            kept = self._kept(v, came)
            if kept is not None:
                sharding = kept
                states: tuple[Sharding, ...] = (sharding if keep_uneven else cut_evenly(sharding, v.shape, self.mesh),)
            else:
                own = (s for s in self.states[k] if not s.unreduced and (keep_uneven or s.is_even(self.mesh, v.shape)))
                states = tuple(dict.fromkeys((*self._shardings(v, even=not keep_uneven), *own)))
            node = self._node(len(states), f"{self.names[k]}, as it leaves")
            self.costs[node] = self._charged(v, states)
            self.leaves[v] = node, states
            self.edges.append(
                (k, node, self._move_costs(self.states[k], states, v) + self._cut_costs(v, self.states[k], states))
            )
            if v in came:
                a = self.bundles.of[came[v]]
                same = np.array([[0.0 if s == t else np.inf for t in states] for s in self.states[a]])
                if v not in after:
                    self.edges.append((a, node, _AFTERWARDS * self._move_costs(states, self.states[a], v).T))
                elif np.isfinite(same).any():
                    self.edges.append((a, node, same))
        return after

    def _kept(self, v: Value, came: Mapping[Value, Value]) -> Sharding | None:
        """How a result leaves that has no choice: as the argument comes whose place it takes, or as the facts say."""
        if self.facts is None:
            return None
        known = self.facts.shardings
        if came.get(v) in self.facts.undecided:
            return None
        if v in came and (self.border.keep_uneven or known[came[v]].is_even(self.mesh, v.shape)):
            return known[came[v]]
        return known[v] if v in self.facts.kept else None

    def _charged(self, v: Value, states: Sequence[Sharding]) -> Floats:
        """What leaving otherwise than the marks say costs: some callers have to bring it there."""
        known = None if self.facts is None or v in self.facts.undecided else self.facts.shardings[v]
        if known is None or not (self.border.keep_uneven or known.is_even(self.mesh, v.shape)):
            return np.zeros(len(states))
        return _AFTERWARDS * self._move_costs(states, (known,), v)[:, 0]


def _key(split: Split) -> tuple[tuple[int, tuple[str, ...]], ...]:
    return tuple(sorted((f, atoms) for f, atoms in split.items() if atoms))


def _rule(e: Equation) -> Rule:
    assert e.rule is not None
    return e.rule


def _times(block: Block, times: int) -> Iterator[tuple[Equation, int]]:
    """How often each equation runs in one call."""
    for e in block.equations:
        yield e, times
        for body in e.blocks:
            yield from _times(body, times * e.trip_count)
