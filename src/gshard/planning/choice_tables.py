"""Computes the states and cost tables of a planning problem, from which ``planning.choices`` builds nodes and edges.

States are the shardings of sharding groups and the splits of equations that the planner compares. Marks, shardings of
arguments and propagated shardings (``planning.propagated``) limit them. Equal states and equal tables are one object
(``planning.interned``), so the solver treats equal layers once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from gshard.core.manual_axes import axes_without, manual_axes
from gshard.core.mark import Demand
from gshard.core.plan import Plan, local_bytes
from gshard.core.program import Equation, Program, Value, itemsize
from gshard.core.program_boundary import Boundary
from gshard.core.rule import Rule
from gshard.core.sharding import Sharding
from gshard.core.split import Split
from gshard.language.region import REGIONS
from gshard.planning.demands import demands
from gshard.planning.interned import Interned
from gshard.planning.io_shardings import as_returned
from gshard.planning.nearby import Runs, is_limited, runs_of
from gshard.planning.objective import Objective
from gshard.planning.propagated import Propagated
from gshard.planning.room import Room
from gshard.planning.seed_strategies import (
    allowed_by_marks,
    component_splits,
    group_shardings,
    opened,
    operand_shardings,
    propagated_arrays,
    result_shardings,
    suggested_shardings,
)
from gshard.planning.sharding_groups import free_result_groups, sharding_groups_of
from gshard.planning.strategies import Component
from gshard.planning.value_classes import kinds_at, kinds_of
from gshard.solver.problem import Floats

# A reshard that a caller may need after the call costs this share of its price.
_AFTERWARDS = 1 / 8


class ChoiceTables:
    """The states and cost tables of the planning problem of one program."""

    def __init__(
        self,
        program: Program,
        objective: Objective,
        propagated: Propagated | None,
        boundary: Boundary,
        near: Plan | None = None,
    ):
        self.program = program
        self.objective = objective
        # All objectives of one mesh have one list of splits: it does not depend on the times of steps.
        self.mesh = dataclasses.replace(objective.mesh, times=None)
        if propagated is not None:
            propagated = dataclasses.replace(propagated, mesh=self.mesh)
        self.propagated = propagated
        self.boundary = boundary
        self.runs = dict(program.block.runs())  # how often each equation runs in one call
        self.inputs = frozenset(program.block.inputs)  # the inputs of the program
        self._manual = manual_axes(program.block, objective.mesh)
        self.demands_of: dict[Value, list[Demand]] = {}  # for each marked value, what its marks require
        for v, demand, _ in demands(program, self.mesh):
            self.demands_of.setdefault(v, []).append(demand)
        regions = [e for e in program.block.walk() if e.rule is None]
        # the values that enter or leave regions, each with the equation of the region
        self.crossings = [(e, crossing) for e in regions for crossing in REGIONS[e.name].crossings(e)]
        # the bytes that loops may hold
        self.room = Room({e for e, c in self.crossings if c.each_round or e.trip_count > 1}, propagated, self.mesh)
        body_inputs = {v for e in program.block.walk() for body in e.blocks for v in body.inputs}
        # inputs of bodies that an iteration passes to the next one
        self.carried = body_inputs & {c.edge.inner for _, c in self.crossings if not c.inward}
        entering_once = body_inputs - {c.edge.inner for _, c in self.crossings if c.each_round}
        marked_unreduced = {
            v: required[0].unreduced[0][1] for v, required in self.demands_of.items() if required[0].unreduced
        }
        finished = {*program.block.inputs, *(self.demands_of.keys() - marked_unreduced.keys()), *entering_once}
        alone = {*finished, *body_inputs, *marked_unreduced}
        # the sharding groups of the program
        self.groups = sharding_groups_of(program, alone, finished, marked_unreduced, fused=objective.fuses)
        self._kinds = kinds_of(program, propagated)
        self._near = near
        # whether not all choices are compared (``planning.nearby``)
        self.is_limited = near is not None or is_limited(program, self.mesh, objective.axes)
        self._runs: Runs | None = None  # as for ``strategies.places_for``; without known shardings, all are compared
        if near is not None:  # what axes in a row allow together was compared for the known plan
            self._runs = ()
        elif propagated is not None and self.is_limited:
            self._runs = runs_of(objective.axes, dict.fromkeys(propagated.shardings.values()))
        self._suggested: dict[Value, dict[Sharding, None]] = {}
        self._free_groups: set[int] = set()
        if propagated is not None:
            self._suggested = suggested_shardings(
                propagated, self._kinds, self.groups.tied, objective.axes, whole_axes=self.is_limited
            )
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
        manual, near = self._manual.of_any(values), self._near_shardings(values)
        key = self._group_kinds[group], monoids, is_input, suggested, marked_group, manual, near
        return self.interned.states(key, lambda: self._allowed(values, monoids, suggested, demands))

    def _allowed(
        self, values: Sequence[Value], monoids: Sequence[str], suggested: Sequence[Sharding], demands: Sequence[Demand]
    ) -> Sequence[Sharding]:
        v, propagated = values[0], self.propagated
        found = self._over_whole_axes(values, monoids, even=v in self.inputs)
        found = tuple(dict.fromkeys((*self._near_shardings(values), *found)))
        if propagated is not None and v in self.inputs:
            allowed = (s for s in found if propagated.allow(v, s))
            return tuple(dict.fromkeys((propagated.shardings[v], *allowed)))
        if propagated is not None:
            fitting = (s for s in suggested if {m for _, m in s.unreduced} <= {*monoids})
            moved = (propagated.moved[v] for v in values if v in propagated.moved)
            known = (
                *(propagated.shardings[v] for v in values),
                *moved,
                *(opened(v, propagated, self.objective.axes) for v in values),
            )
            found = tuple(dict.fromkeys((*known, *found, *fitting)))
        return allowed_by_marks(found, demands, self._manual.of_any(values))

    def _over_whole_axes(
        self, values: Sequence[Value], monoids: Sequence[str] = (), *, even: bool = False
    ) -> tuple[Sharding, ...]:
        """Shardings over whole axes of values of one group, without the axes that are manual for any of that group."""
        barred = self._manual.of_any(self.groups.members[self.groups.of[values[0]]])
        axes = axes_without(self.objective.axes, barred)
        near = self._near_shardings(values)
        return group_shardings(values, self.propagated, self.mesh, axes, monoids, even=even, near=near, runs=self._runs)

    def _near_shardings(self, values: Sequence[Value]) -> tuple[Sharding, ...]:
        """The shardings of these values in the known plan."""
        known = {} if self._near is None else self._near.shardings
        return tuple(dict.fromkeys(known[v] for v in values if v in known))

    def read_states(self, v: Value) -> tuple[tuple[Sharding, ...], object]:
        """The shardings of a shared reshard of a value, and a key that is equal for equal values."""
        states = self.states_of(v)
        monoids = self.groups.unreduced.get(self.groups.of[v], ())
        key = "read", self._kinds[v], id(states), monoids
        found = self.interned.states(key, lambda: dict.fromkeys((*states, *self._over_whole_axes((v,), monoids))))
        return found, key

    def result_states(self, v: Value, arguments: Mapping[Value, Value]) -> tuple[Sharding, ...]:
        """The shardings in which a result of the program may leave."""
        states = self.states_of(v)
        kept = self._kept(v, arguments)

        def find() -> Iterable[Sharding]:
            if kept is not None:
                return (kept,)
            even = not self.boundary.keep_uneven
            every = *self._over_whole_axes((v,), even=even), *(s for s in states if not s.unreduced)
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
        if argument is not None and (self.boundary.keep_uneven or known[argument].is_even(self.mesh, v.shape)):
            is_placed = argument in self.demands_of
            return known[argument] if is_placed else self._returned(v, known[argument])
        if v not in self.propagated.kept:
            return None
        return self._returned(v, Sharding(known[v].dims))  # without unreduced axes: a result is finished

    def _returned(self, v: Value, s: Sharding) -> Sharding:
        return as_returned(s, v.shape, self.mesh, padded=self.boundary.keep_uneven)

    def splits_of(self, e: Equation, component: Component) -> tuple[tuple[Split, ...], float]:
        """The splits of a component of an equation, and the largest share of its work on one device under the marks."""
        rule = rule_of(e)
        reads_unreduced = any(isinstance(v, Value) and self.groups.of[v] in self.groups.unreduced for v in e.inputs)
        sums = [key for key in component.factors if key < 0] if reads_unreduced else []
        passing = frozenset(key for key in sums if self._may_pass(e, *rule.linear[-1 - key]))
        barred = self._manual.at(e)
        kinds = () if self.propagated is None else kinds_at(e, self._kinds)
        near_split = None
        if self._near is not None and (split := self._near.splits.get(e)) is not None:
            near_split = tuple((f, atoms) for f, atoms in split.items() if f in component.factors and atoms)
        key = rule, component, passing, kinds, barred, near_split
        if key not in self._splits:
            arrays = () if self.propagated is None else propagated_arrays(e, self.propagated, self.objective.axes)
            axes = axes_without(self.objective.axes, barred)
            pinned = tuple(self._manual.pinned(e).items())
            self._splits[key] = component_splits(
                rule, component, passing, arrays, self.mesh, axes, barred, pinned, near_split, self._runs
            )
        return self._splits[key]

    def _may_pass(self, e: Equation, monoid: str, operands: Collection[int]) -> bool:
        """Whether a value among these operands may be unreduced with this monoid."""
        values = [v for i in operands if isinstance(v := e.inputs[i], Value)]
        return any(monoid in self.groups.unreduced.get(self.groups.of[v], ()) for v in values)

    # Cost tables

    def group_costs(self, group: int) -> Floats:
        """float64 [states]: a tie-break for shardings that propagation did not find, and the price of extra bytes."""
        values, states, propagated = self.groups.members[group], self.states[group], self.propagated
        runs = self._group_runs[group]

        def find() -> Floats:
            is_free = propagated is None or any(v in propagated.undecided for v in values)
            known = set() if is_free or propagated is None else {propagated.shardings[v] for v in values}
            ties = np.array([0.0 if is_free or s in known else self.objective.tie for s in states])
            return ties + runs * self.objective.extra_byte_cost * self.room.extra_bytes_of_group(values, states)

        return self.interned.table(("otherwise", self._group_kinds[group], runs, id(states)), find)

    def held_costs(self, v: Value, states: Sequence[Sharding], byte_cost: float) -> Floats:
        """float64 [states]: the cost of the bytes of a value on one device."""
        key = "held", v.shape, itemsize(v.dtype), id(states), byte_cost
        return self.interned.table(key, lambda: np.array([local_bytes(v, s, self.mesh) for s in states]) * byte_cost)

    def move_costs(self, sources: Sequence[Sharding], targets: Sequence[Sharding], v: Value) -> Floats:
        """float64 [sources, targets]: reshards of a value."""
        return self.objective.table(sources, targets, v.shape, itemsize(v.dtype))

    def operand_costs(self, e: Equation, splits: Sequence[Split], i: int, states: Sequence[Sharding]) -> Floats:
        """float64 [states, splits]: reshards from some states to the sharding in which an equation reads an operand."""
        rule, v = rule_of(e), e.inputs[i]
        assert isinstance(v, Value)

        def find() -> Floats:
            read = self.interned.states(
                (operand_shardings, rule, id(splits), i), lambda: operand_shardings(rule, i, splits)
            )
            return self._costs_with_cuts(v, states, read)

        key = "taking", rule, id(splits), i, v.shape, itemsize(v.dtype), id(states), self._cut_kind(v)
        return self.interned.often(self.runs[e], self.interned.table(key, find))

    def result_costs(self, e: Equation, splits: Sequence[Split], i: int) -> Floats:
        """float64 [states, splits]: reshards from the sharding in which an equation makes a result to its group's."""
        rule, v = rule_of(e), e.outputs[i]
        states = self.states_of(v)

        def find() -> Floats:
            made = self.interned.states(
                (result_shardings, rule, id(splits), i), lambda: result_shardings(rule, i, splits)
            )
            return self._costs_with_cuts(v, made, states).T

        key = "making", rule, id(splits), i, v.shape, itemsize(v.dtype), id(states), self._cut_kind(v)
        return self.interned.often(self.runs[e], self.interned.table(key, find))

    def leaving_costs(self, v: Value, states: tuple[Sharding, ...]) -> tuple[Floats, Floats]:
        """The costs of the shardings in which a result leaves."""
        group = self.groups.of[v]
        inside = self.states[group]
        key = self._kinds[v], id(inside), id(states), group in self._free_groups
        caller_costs = self.interned.table(("charged", *key), lambda: self._caller_costs(v, states))
        moves = self.interned.table(("leaving", *key), lambda: self._costs_with_cuts(v, inside, states))
        return caller_costs, moves

    def next_call_costs(self, v: Value, states: Sequence[Sharding], argument: Value) -> Floats:
        """float64 [states of the argument, states]: the reshards that the next call may need."""
        return _AFTERWARDS * self.move_costs(states, self.states_of(argument), v).T

    def _caller_costs(self, v: Value, states: Sequence[Sharding]) -> Floats:
        """float64 [states]: the reshards to the propagated sharding, which some callers need."""
        known = None if self.propagated is None or v in self.propagated.undecided else self.propagated.shardings[v]
        if known is None or not (self.boundary.keep_uneven or known.is_even(self.mesh, v.shape)):
            return np.zeros(len(states))
        return _AFTERWARDS * self.move_costs(states, (known,), v)[:, 0]

    def _costs_with_cuts(self, v: Value, sources: Sequence[Sharding], targets: Sequence[Sharding]) -> Floats:
        return self.move_costs(sources, targets, v) + self._cut_costs(v, sources, targets)

    def _cut_kind(self, v: Value) -> int:
        """What ``_cut_costs`` depends on besides the shardings."""
        return self._kinds[v] if self.groups.of[v] in self._free_groups else -1

    def _cut_costs(self, v: Value, sources: Sequence[Sharding], targets: Sequence[Sharding]) -> Floats | float:
        """float64 [sources, targets]: ``inf`` where a sum would be scattered only to leave split, without a mark.

        An unmarked result that is a sum over devices leaves on all of these devices.
        """
        if self.groups.of[v] not in self._free_groups:
            return 0.0
        assert self.propagated is not None
        undecided = (a for atoms in self.propagated.could(v).values() for a in atoms)
        marked = {*self.propagated.shardings[v].atoms, *undecided}
        summed = [{a for a, _ in s.unreduced} - marked for s in sources]
        cut = [{a for atoms in s.dims for a in atoms} for s in targets]
        return np.array([[np.inf if over & own else 0.0 for own in cut] for over in summed])


def rule_of(e: Equation) -> Rule:
    """The rule of an equation that is no region."""
    assert e.rule is not None
    return e.rule
