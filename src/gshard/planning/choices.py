"""Builds the planning problem of a program: nodes, edges and costs (states, cost tables, memory of loops)."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np

from gshard.comm.reshard import parts_of
from gshard.core.mark import Demand
from gshard.core.plan import AS_MARKED, Boundary, axes_without, local_bytes, manual_axes
from gshard.core.program import Edge, Equation, Program, Value, itemsize
from gshard.core.rule import Split
from gshard.core.sharding import Sharding
from gshard.device.fusion_model import PASSING, REGION, Kernel
from gshard.language.region import REGIONS, Crossing
from gshard.planning.demands import as_returned, demands
from gshard.planning.graph import CARRIED, STACKED, WHOLE, Graph, LoopBytes
from gshard.planning.objective import Objective, StackCost
from gshard.planning.propagated import Propagated
from gshard.planning.sharding_groups import ShardingGroups, free_result_groups, sharding_groups_of
from gshard.planning.strategies import (
    FEW_PARTS,
    Component,
    Runs,
    allowed_by_marks,
    array_shardings,
    component_splits,
    components,
    group_shardings,
    is_limited,
    kinds_at,
    kinds_of,
    opened,
    propagated_arrays,
    runs_of,
    suggested_shardings,
)
from gshard.solver.problem import Floats, Problem

# Interns equal states and equal cost tables of one planning problem, so that each is computed once.


class Interned:
    """The states and tables of one problem, by keys of everything that they depend on."""

    def __init__(self) -> None:
        self._states: dict[object, tuple[Sharding, ...]] = {}
        self._equal: dict[tuple[Sharding, ...], tuple[Sharding, ...]] = {}
        self._tables: dict[object, Floats] = {}
        # By identities of tables. The first array of each pair keeps the identity in its key valid.
        self._products: dict[tuple[float, int], tuple[Floats, Floats]] = {}

    def states(self, key: object, find: Callable[[], Iterable[Sharding]]) -> tuple[Sharding, ...]:
        """The shardings of a key, computed by ``find`` the first time. Equal tuples are one object, under any key."""
        if key not in self._states:
            found = tuple(find())
            self._states[key] = self._equal.setdefault(found, found)
        return self._states[key]

    def table(self, key: object, find: Callable[[], Floats]) -> Floats:
        """The cost table of a key, computed by ``find`` the first time. Callers must not write to it."""
        if key not in self._tables:
            self._tables[key] = find()
        return self._tables[key]

    def often(self, times: float, table: Floats) -> Floats:
        """``times * table``, where ``inf`` stays ``inf`` even if ``times`` is 0."""
        if times == 1:
            return table
        key = times, id(table)
        if key not in self._products:
            product = np.where(np.isinf(table), np.inf, times * np.where(np.isinf(table), 0.0, table))
            self._products[key] = table, product
        return self._products[key][1]


# A reshard that a caller may need after the call costs this share of its price.
_AFTERWARDS = 1 / 8
# A loop with an unknown number of iterations has probably several: a reshard before it costs this share of one in it.
_BEFORE = 1 / 2


class ChoiceTables:
    """The states and cost tables of the planning problem of one program."""

    def __init__(self, program: Program, objective: Objective, propagated: Propagated | None, boundary: Boundary):
        # All objectives of one mesh have one list of splits: it does not depend on the times of steps.
        self.mesh = dataclasses.replace(objective.mesh, times=None)
        if propagated is not None:
            propagated = dataclasses.replace(propagated, mesh=self.mesh)
        self.program, self.objective, self.propagated, self.boundary = program, objective, propagated, boundary
        self.runs = dict(program.block.runs())  # how often each equation runs in one call
        self.inputs = frozenset(program.block.inputs)  # the inputs of the program
        self._manual = manual_axes(program.block, objective.mesh)
        self.demands_of: dict[Value, list[Demand]] = {}  # for each marked value, what its marks require
        for v, demand, _ in demands(program, self.mesh):
            self.demands_of.setdefault(v, []).append(demand)
        regions = [e for e in program.block.walk() if e.rule is None]
        # the values that enter or leave regions, each with the equation of the region
        self.crossings = [(e, crossing) for e in regions for crossing in REGIONS[e.name].crossings(e)]
        self._loops = {e for e, c in self.crossings if c.each_round or e.trip_count > 1}
        # loops whose values decide how often they run; they count as one iteration
        self.open_ended = {e for e in self._loops if REGIONS[e.name].decided(e)}
        # inputs of bodies that an iteration passes to the next one
        self.carried = self._body_inputs & {c.edge.inner for _, c in self.crossings if not c.inward}
        self.groups = self._sharding_groups()
        self._kinds = kinds_of(program, propagated)
        # whether not all choices are compared (``planning.strategies``)
        self.is_limited = is_limited(program, self.mesh, objective.axes)
        # the axes that may differ together (``strategies.places_for``); None if all choices are compared
        self._runs: Runs | None = None
        if propagated is not None and self.is_limited:
            self._runs = runs_of(objective.axes, dict.fromkeys(propagated.shardings.values()))
        self._suggested: dict[Value, dict[Sharding, None]] = {}
        self._free_groups: set[int] = set()
        if propagated is not None:
            self._suggested = suggested_shardings(propagated, self._kinds, self.groups.tied, objective.axes)
            results = {v for v in program.block.outputs if isinstance(v, Value)} - propagated.kept
            unmarked = results - self.demands_of.keys() - self.inputs
            self._free_groups = free_result_groups(program, self.groups, unmarked)
        self.interned = Interned()  # the states and tables so far
        self._splits: dict[object, tuple[tuple[Split, ...], float]] = {}
        producer_runs = {v: times for e, times in self.runs.items() for v in e.outputs}
        self._group_runs = [max(producer_runs.get(v, 0) for v in group) for group in self.groups.members]
        self._group_kinds = [tuple(dict.fromkeys(self._kinds[v] for v in group)) for group in self.groups.members]
        # for each group, its shardings
        self.states = tuple(self._states_of(group) for group in range(len(self.groups.members)))

    @functools.cached_property
    def _body_inputs(self) -> set[Value]:
        return {v for block in self.program.block.blocks() for v in block.inputs} - self.inputs

    def _sharding_groups(self) -> ShardingGroups:
        """The sharding groups. Arguments, marked values and inputs of bodies start groups of their own."""
        unreduced = {v: required[0].unreduced[0][1] for v, required in self.demands_of.items() if required[0].unreduced}
        entering_once = self._body_inputs - {c.edge.inner for _, c in self.crossings if c.each_round}
        finished = {*self.inputs, *(self.demands_of.keys() - unreduced.keys()), *entering_once}
        alone = {*finished, *self._body_inputs, *unreduced}
        return sharding_groups_of(self.program, alone, finished, unreduced, fused=self.objective.fuses)

    def states_of(self, v: Value) -> tuple[Sharding, ...]:
        """The shardings of the group of a value."""
        return self.states[self.groups.of[v]]

    # States

    def _states_of(self, group: int) -> tuple[Sharding, ...]:
        """The shardings of a group that the marks allow."""
        values = self.groups.members[group]
        monoids = self.groups.unreduced.get(group, ())
        demands = [demand for v in values for demand in self.demands_of.get(v, ())]
        suggested = tuple(s for v in values for s in self._suggested.get(v, ()))
        is_input = values[0] in self.inputs
        marked_group = group if demands else -1
        key = self._group_kinds[group], monoids, is_input, suggested, marked_group, self._manual.of_any(values)
        return self.interned.states(key, lambda: self._allowed(values, monoids, suggested, demands))

    def _allowed(
        self, values: Sequence[Value], monoids: Sequence[str], suggested: Sequence[Sharding], demands: Sequence[Demand]
    ) -> Sequence[Sharding]:
        v, propagated = values[0], self.propagated
        found = self._over_whole_axes(values, monoids, even=v in self.inputs)
        if propagated is not None and v in self.inputs:
            allowed = (s for s in found if propagated.allow(v, s))
            return tuple(dict.fromkeys((propagated.shardings[v], *allowed)))
        if propagated is not None:
            fitting = (s for s in suggested if {m for _, m in s.unreduced} <= {*monoids})
            moved = (propagated.moved[v] for v in values if v in propagated.moved)
            known = (*(propagated.shardings[v] for v in values), *moved)
            wide = (opened(v, propagated, self.objective.axes) for v in values)
            found = tuple(dict.fromkeys((*known, *wide, *found, *fitting)))
        return allowed_by_marks(found, demands, self._manual.of_any(values))

    def _over_whole_axes(
        self, values: Sequence[Value], monoids: Sequence[str] = (), *, even: bool = False
    ) -> tuple[Sharding, ...]:
        """Shardings over whole axes of values of one group, without the axes that are manual for any of that group."""
        barred = self._manual.of_any(self.groups.members[self.groups.of[values[0]]])
        axes = axes_without(self.objective.axes, barred)
        return group_shardings(values, self.propagated, self.mesh, axes, monoids, even=even, runs=self._runs)

    def read_states(self, v: Value) -> tuple[Sharding, ...]:
        """The shardings of a shared reshard of a value."""
        states = self.states_of(v)
        monoids = self.groups.unreduced.get(self.groups.of[v], ())
        key = "read", self._kinds[v], id(states), monoids
        return self.interned.states(key, lambda: dict.fromkeys((*states, *self._over_whole_axes((v,), monoids))))

    def result_states(self, v: Value, arguments: Mapping[Value, Value]) -> tuple[Sharding, ...]:
        """The shardings in which a result of the program may leave."""
        states = self.states_of(v)
        kept = self._kept(v, arguments)

        def find() -> Iterable[Sharding]:
            if kept is not None:
                return (kept,)
            every = *self._over_whole_axes((v,), even=True), *(s for s in states if not s.unreduced)
            return dict.fromkeys(self._returned(v, s) for s in every)

        return self.interned.states(("leaves", self._kinds[v], id(states), kept), find)

    def _kept(self, v: Value, arguments: Mapping[Value, Value]) -> Sharding | None:
        """The sharding of a result that has no choice: that of the argument it replaces, or the propagated one."""
        if self.propagated is None:
            return self._returned(v, Sharding(self.demands_of[v][0].dims)) if v in self.demands_of else None
        argument = arguments.get(v)
        known = self.propagated.shardings
        if argument in self.propagated.undecided:
            return None
        if argument is not None and known[argument].is_even(self.mesh, v.shape):
            is_placed = argument in self.demands_of
            return known[argument] if is_placed else self._returned(v, known[argument])
        if v not in self.propagated.kept:
            return None
        return self._returned(v, Sharding(known[v].dims))  # without unreduced axes: a result is finished

    def _returned(self, v: Value, s: Sharding) -> Sharding:
        return as_returned(s, v.shape, self.mesh)

    def splits_of(self, e: Equation, component: Component) -> tuple[tuple[Split, ...], float]:
        """The splits of a component of an equation, and the largest share of its work on one device under the marks."""
        rule = e.operator_rule
        reads_unreduced = any(isinstance(v, Value) and self.groups.of[v] in self.groups.unreduced for v in e.inputs)
        sums = [key for key in component.factors if key < 0] if reads_unreduced else []
        passing = frozenset(key for key in sums if self._may_pass(e, *rule.linear[-1 - key]))
        barred = self._manual.at(e)
        kinds = () if self.propagated is None else kinds_at(e, self._kinds)
        key = rule, component, passing, kinds, barred
        if key not in self._splits:
            arrays = () if self.propagated is None else propagated_arrays(e, self.propagated, self.objective.axes)
            axes = axes_without(self.objective.axes, barred)
            pinned = tuple(self._manual.pinned(e).items())
            self._splits[key] = component_splits(
                rule, component, passing, arrays, self.mesh, axes, barred, pinned, self._runs
            )
        return self._splits[key]

    def _may_pass(self, e: Equation, monoid: str, operands: Collection[int]) -> bool:
        """Whether a value among these operands may be unreduced with this monoid."""
        values = [v for i in operands if isinstance(v := e.inputs[i], Value)]
        return any(monoid in self.groups.unreduced.get(self.groups.of[v], ()) for v in values)

    # Cost tables

    def extra_bytes(self, e: Equation, edge: Edge, sizes: Sequence[int]) -> Floats | None:
        """float64 [states]: bytes of a value at a loop's boundary beyond those of the marks."""
        if self.propagated is None or e not in self._loops:
            return None
        shardings, stacked_dims = self.propagated.shardings, len(edge.outer.shape) - len(edge.inner.shape)
        least = local_bytes(edge.outer, shardings[edge.outer], self.mesh)
        if stacked_dims:
            inside = Sharding(((),) * stacked_dims + shardings[edge.inner].dims)
            least = max(least, local_bytes(edge.outer, inside, self.mesh))
        return np.array(sizes, float) - least

    def _extra_bytes_of_group(self, group: Sequence[Value], states: Sequence[Sharding]) -> Floats:
        """float64 [states]: bytes of the largest value of a group beyond those of the marks, at least 0."""
        if self.propagated is None:
            return np.zeros(len(states))
        v = max(group, key=lambda v: v.bytes)
        sizes = np.array([local_bytes(v, s, self.mesh) for s in states], float)
        return (sizes - local_bytes(v, self.propagated.shardings[v], self.mesh)).clip(0)

    def group_costs(self, group: int) -> Floats:
        """float64 [states]: a tie-break for shardings that propagation did not find, and the price of extra bytes."""
        values, states, propagated = self.groups.members[group], self.states[group], self.propagated
        runs = self._group_runs[group]

        def find() -> Floats:
            is_free = propagated is None or any(v in propagated.undecided for v in values)
            known = set() if is_free or propagated is None else {propagated.shardings[v] for v in values}
            ties = np.array([0.0 if is_free or s in known else self.objective.tie for s in states])
            return ties + runs * self.objective.extra_byte_cost * self._extra_bytes_of_group(values, states)

        return self.interned.table(("otherwise", self._group_kinds[group], runs, id(states)), find)

    def held_costs(self, v: Value, states: Sequence[Sharding], byte_cost: float) -> Floats:
        """float64 [states]: the cost of the bytes of a value on one device."""
        key = "held", v.shape, itemsize(v.dtype), id(states), byte_cost
        return self.interned.table(key, lambda: np.array([local_bytes(v, s, self.mesh) for s in states]) * byte_cost)

    def move_costs(self, sources: tuple[Sharding, ...], targets: tuple[Sharding, ...], v: Value) -> Floats:
        """float64 [sources, targets]: reshards of a value. Both tuples are interned, so their identities stay valid.

        It is ``inf`` to scatter a sum only to let it leave split, without a mark: an unmarked result that is a sum over
        devices leaves on all of these devices.
        """
        is_free = self.groups.of[v] in self._free_groups
        key = "moves", id(sources), id(targets), v.shape, itemsize(v.dtype), self._kinds[v] if is_free else -1

        def find() -> Floats:
            costs = self.objective.table(sources, targets, v.shape, itemsize(v.dtype))
            if self.propagated is None or not is_free:
                return costs
            undecided = (a for atoms in self.propagated.could(v).values() for a in atoms)
            marked = {*self.propagated.shardings[v].atoms, *undecided}
            summed = [{a for a, _ in s.unreduced} - marked for s in sources]
            cut = [{a for atoms in s.dims for a in atoms} for s in targets]
            return costs + np.array([[np.inf if over & own else 0.0 for own in cut] for over in summed])

        return self.interned.table(key, find)

    def caller_costs(self, v: Value, states: tuple[Sharding, ...]) -> Floats:
        """float64 [states]: the reshards of a result to its propagated sharding, which some callers need."""
        known = None if self.propagated is None or v in self.propagated.undecided else self.propagated.shardings[v]
        if known is None or not known.is_even(self.mesh, v.shape):
            return np.zeros(len(states))
        return _AFTERWARDS * self.move_costs(states, self.interned.states(("caller", known), lambda: (known,)), v)[:, 0]

    def operand_costs(self, e: Equation, splits: Sequence[Split], i: int, states: tuple[Sharding, ...]) -> Floats:
        """float64 [states, splits]: reshards from some states to the sharding in which an equation reads an operand."""
        v, read = e.inputs[i], self._under(e, i, splits)
        assert isinstance(v, Value)
        return self.interned.often(self.runs[e], self.move_costs(states, read, v))

    def result_costs(self, e: Equation, splits: Sequence[Split], i: int) -> Floats:
        """float64 [splits, states]: reshards from the sharding in which an equation makes a result to its group's."""
        v, made = e.outputs[i], self._under(e, len(e.inputs) + i, splits)
        return self.interned.often(self.runs[e], self.move_costs(made, self.states_of(v), v))

    def _under(self, e: Equation, i: int, splits: Sequence[Split]) -> tuple[Sharding, ...]:
        """The shardings of an array under each split; the arrays are the operands, then the results."""
        rule = e.operator_rule
        return self.interned.states((rule, id(splits), i), lambda: array_shardings(rule, splits)[i])


def graph_of(
    program: Program,
    objective: Objective,
    *,
    propagated: Propagated | None = None,
    boundary: Boundary = AS_MARKED,
) -> Graph:
    """Builds the planning problem of a program."""
    return _Builder(program, objective, propagated, boundary).graph()


class _Builder(ChoiceTables):
    """The nodes and edges so far. Nodes are numbered in the order of their creation; groups come first."""

    def __init__(self, program: Program, objective: Objective, propagated: Propagated | None, boundary: Boundary):
        super().__init__(program, objective, propagated, boundary)
        self.costs: list[Floats] = [self.group_costs(group) for group in range(len(self.states))]
        self.edges: list[tuple[int, int, Floats]] = []
        self.strategies: dict[tuple[Equation, Component], tuple[int, tuple[Split, ...]]] = {}
        self.shared_reshards: dict[Value, tuple[int, Sequence[Sharding]]] = {}
        self.leaves: dict[Value, tuple[int, Sequence[Sharding]]] = {}
        self.held: list[tuple[int, Equation, Sequence[int]]] = []
        self.loop_bytes: list[LoopBytes] = []

    def graph(self) -> Graph:
        marked_shares = self._add_strategies()
        if self.is_limited or any(len(parts) > FEW_PARTS for parts in parts_of(self.mesh, self.objective.axes)):
            self.objective = self.objective.through(self._shardings())
        for kernel, runs in self.objective.kernels(self.program.block):
            self._add_kernel(kernel, runs, marked_shares.get(kernel.equation, np.inf))
        for stack in self.objective.stack_costs(self.program.block):
            self._add_stack(stack)
        for (e, component), (node, splits) in self.strategies.items():
            for i in component.results:
                self.edges.append((node, self.groups.of[e.outputs[i]], self.result_costs(e, splits, i)))
        self._add_operands()
        for e, crossing in self.crossings:
            self._add_crossing(e, crossing)
        donated_results = self._add_results()
        for k, group in enumerate(self.groups.members):
            held = self.held_costs(group[0], self.states[k], self.objective.held_byte_cost)
            self.costs[k] = self.costs[k] + len(group) * held
        return Graph(
            program=self.program,
            mesh=self.objective.mesh,
            problem=Problem.of(self.costs, self.edges),
            groups=self.groups,
            states=self.states,
            strategies=self.strategies,
            shared_reshards=self.shared_reshards,
            leaves=self.leaves,
            held=self.held,
            loop_bytes=self.loop_bytes,
            donated_results=donated_results,
            is_limited=self.is_limited,
        )

    def _shardings(self) -> Iterator[Sharding]:
        """The states of groups, and the shardings in which equations read and make arrays under each split."""
        yield from itertools.chain(*dict.fromkeys(self.states))
        for rule, splits in {
            (id(e.rule), id(s)): (e.operator_rule, s) for (e, _), (_, s) in self.strategies.items()
        }.values():
            yield from itertools.chain(*array_shardings(rule, splits))

    def _add_node(self, states: int) -> int:
        self.costs.append(self.interned.table(("free", states), lambda: np.zeros(states)))
        return len(self.costs) - 1

    def _add_strategies(self) -> dict[Equation, float]:
        """Adds a node for each component of each equation outside of the groups."""
        marked_shares: dict[Equation, float] = {}
        for e in self.program.block.walk():
            if e.rule is None or e in self.groups.tied:
                continue
            for component in components(e.rule):
                splits, marked_shares[e] = self.splits_of(e, component)
                self.strategies[e, component] = self._add_node(len(splits)), splits
        return marked_shares

    def _add_kernel(self, kernel: Kernel, runs: int, marked_share: float) -> None:
        """Adds the cost of a kernel to the node that decides how much of it a device runs: a strategy, or a group."""
        e = kernel.equation
        if kernel.kind in (REGION, PASSING) or e.rule is None:
            return
        objective, cost_key = self.objective, self.objective.cost_key(kernel)
        choices: Sequence[object]
        if e in self.groups.tied:
            node = self.groups.of[e.outputs[0]]
            choices = states = self.states[node]
            find = functools.partial(objective.sharding_costs, kernel, states)
        else:
            node, splits = self.strategies[e, components(e.rule)[0]]
            choices, find = splits, functools.partial(objective.split_costs, kernel, splits, marked_share)
        self.costs[node] = self.costs[node] + runs * self.interned.table(("work", cost_key, id(choices)), find)

    def _add_stack(self, stack: StackCost) -> None:
        """Adds what a loop moves for a slice of its stacks to the group of the slice."""
        group = self.groups.of[stack.value]
        states = self.states[group]
        table = self.held_costs(stack.value, states, stack.byte_cost)
        self.costs[group] = self.costs[group] + stack.runs * (table + stack.run_cost)

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
            if len(reads) > 1 and (len(states) > 1 or self.propagated is not None):
                runs = min(self.runs[e] for e, _, _ in reads)
                source, states = self._add_shared_reshard(v, runs)
            for e, component, i in reads:
                node, splits = self.strategies[e, component]
                self.edges.append((source, node, self.operand_costs(e, splits, i, states)))

    def _add_shared_reshard(self, v: Value, runs: int) -> tuple[int, tuple[Sharding, ...]]:
        """Adds a node for the sharding in which several equations read a value."""
        group = self.groups.of[v]
        states = self.read_states(v)
        node = self._add_node(len(states))
        self.shared_reshards[v] = node, states
        moves = self.move_costs(self.states[group], states, v)
        self.edges.append((group, node, self.interned.often(runs, moves)))
        return node, states

    def _add_crossing(self, e: Equation, crossing: Crossing) -> None:
        """Adds the reshards between a value outside of a region and one inside, and the bytes that a loop holds."""
        outer, inner = crossing.edge.outer, crossing.edge.inner
        outside, inside = self.groups.of[outer], self.groups.of[inner]
        stacked_dims = len(outer.shape) - len(inner.shape)
        at_boundary = self.interned.states(
            ("at a boundary", stacked_dims, id(self.states[inside])),
            lambda: [Sharding(((),) * stacked_dims + s.dims, s.unreduced) for s in self.states[inside]],
        )
        if crossing.inward and not crossing.each_round:
            self._add_region_input(e, crossing.edge, at_boundary)
            return
        runs = self.runs[e] * (e.trip_count if crossing.each_round else 1)
        if crossing.inward:
            moves = self.move_costs(self.states[outside], at_boundary, outer)
            self.edges.append((outside, inside, self.interned.often(runs, moves)))
            return
        moves = self.move_costs(at_boundary, self.states[outside], outer)
        self.edges.append((inside, outside, self.interned.often(runs, moves)))
        if stacked_dims or inner in self.carried:
            sizes = [local_bytes(outer, s, self.mesh) for s in at_boundary]
            self.held.append((inside, e, sizes))
            extra = self.extra_bytes(e, crossing.edge, sizes)
            if extra is not None:
                self.loop_bytes.append(LoopBytes(inside, e, extra, STACKED if stacked_dims else CARRIED))
        if stacked_dims:
            held = self.held_costs(inner, self.states[inside], self.objective.stacked_byte_cost)
            self.costs[inside] = self.costs[inside] + self.runs[e] * outer.shape[0] * held

    def _add_region_input(self, e: Equation, edge: Edge, at_boundary: tuple[Sharding, ...]) -> None:
        """Adds a node for a value that a region reads: the value itself, or a copy that the region holds to its end."""
        outer, inner = edge.outer, edge.inner
        outside, inside = self.groups.of[outer], self.groups.of[inner]
        is_stacked = len(outer.shape) > len(inner.shape)
        runs = self.runs[e]
        sizes = [local_bytes(outer, s, self.mesh) for s in at_boundary]
        copy = self._add_node(2 * len(at_boundary))
        moves = self.move_costs(self.states[outside], at_boundary, outer)
        same = np.array([[0.0 if a == b else np.inf for b in at_boundary] for a in self.states[outside]])
        extra = self.extra_bytes(e, edge, sizes)
        if extra is not None and inner not in self.carried:
            # Memory holds a stack until the loop ends; of another array the loop reads the buffer that is there.
            unchanged = extra if is_stacked else np.zeros(len(extra))
            held = LoopBytes(copy, e, np.concatenate([unchanged, extra]), STACKED if is_stacked else WHOLE)
            self.loop_bytes.append(held)
            self.costs[copy] = runs * self.objective.stacked_byte_cost * held.extra_bytes.clip(0)
        before = _BEFORE * runs if e in self.open_ended else runs
        self.edges.append((outside, copy, self.interned.often(before, np.hstack([same, moves]))))
        equal = np.where(np.eye(len(at_boundary), dtype=bool), 0.0, np.inf)
        self.edges.append((copy, inside, np.vstack([equal, equal])))
        self.held.append((copy, e, [0] * len(sizes) + sizes))

    def _add_results(self) -> set[Value]:
        """Adds a node for the sharding in which each unmarked result of the program leaves."""
        inputs, donated = self.program.block.inputs, self.boundary.donated
        undecided = {} if self.propagated is None else self.propagated.undecided
        state = [*donated, *(i for i, v in enumerate(inputs) if v in undecided and i not in donated)]
        pairs = self.program.state(state)
        arguments = {v: inputs[i] for i, v in pairs}
        donated_results = {v for i, v in pairs if i in donated}
        for v in dict.fromkeys(v for v in self.program.block.outputs if isinstance(v, Value)):
            if v in self.inputs or (v in self.demands_of and not self.demands_of[v][0].unreduced):
                continue
            group = self.groups.of[v]
            states = self.result_states(v, arguments)
            node = self._add_node(len(states))
            self.leaves[v] = node, states
            self.costs[node] = self.costs[node] + self.caller_costs(v, states)
            self.edges.append((group, node, self.move_costs(self.states[group], states, v)))
            if v in arguments:
                self._add_next_argument(v, arguments[v], node, states, is_donated=v in donated_results)
        return donated_results

    def _add_next_argument(
        self, v: Value, argument: Value, node: int, states: tuple[Sharding, ...], *, is_donated: bool
    ) -> None:
        """Adds the edge between a result and the argument that it becomes in the next call."""
        group = self.groups.of[argument]
        if not is_donated:
            moves = self.move_costs(states, self.states_of(argument), v)
            self.edges.append((group, node, _AFTERWARDS * moves.T))  # the reshards that the next call may need
            return
        same = np.array([[0.0 if s == t else np.inf for t in states] for s in self.states[group]])
        if np.isfinite(same).any():
            self.edges.append((group, node, same))
