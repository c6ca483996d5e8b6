"""Completes the user's marks to a plan: a sharding for every value and a split for every equation, with reasons."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from gshard.comm.reshard import axes_of, joined
from gshard.core.errors import PlanError
from gshard.core.jax_adapter import no_mesh_set
from gshard.core.mark import Order
from gshard.core.mesh import Atoms, Mesh
from gshard.core.phases import collected_seldom
from gshard.core.plan import AS_MARKED, Boundary, Plan, Reason, manual_axes
from gshard.core.planning_tables import tabulated, with_tables
from gshard.core.program import Block, Equation, Program, Value, short_dtype
from gshard.core.rule import UnionFind
from gshard.core.sharding import Sharding
from gshard.core.time_budget import EFFORT
from gshard.device.fusion_model import is_product
from gshard.planning.choices import graph_of
from gshard.planning.demands import at_boundary, demands
from gshard.planning.graph import Graph, without_excess_in_loops
from gshard.planning.objective import Objective, bytes_on
from gshard.planning.propagated import Propagated
from gshard.planning.settled import settled
from gshard.planning.strategies import components, estimated_entries
from gshard.solver.problem import Ints, ProblemError
from gshard.solver.solve import solve, tied

# Finds equal unknowns in successive layers, so that the planner can choose them alike.

_PERIODS = 64  # periods that are tried in each block, the most frequent ones


def classes_of_layers(graph: Graph) -> Ints | None:
    """int64 [nodes]: the class of each node of the problem; None if every class has one node."""
    classes = _Classes(graph)
    for e, later in _in_layers(graph.program):
        classes.tie_equations(e, later)
    return classes.numbered() if classes.tied else None


@tabulated(16)
def _in_layers(program: Program) -> tuple[tuple[Equation, Equation], ...]:
    """Pairs of an equation and the equation one period later, of a program with layers; none of other programs."""
    blocks = list(program.block.blocks())
    pairs = [list(_repeated(block.equations)) for block in blocks]
    return tuple(itertools.chain(*pairs)) if any(map(_has_layers, blocks, pairs)) else ()


def _has_layers(block: Block, pairs: Sequence[tuple[Equation, Equation]]) -> bool:
    """Whether a block contains written-out layers: most of its products repeat.

    Equations also repeat inside a layer, for example the projections of keys and values, and in the updates of an
    optimizer. That is no reason to plan them alike.
    """
    repeated = {e for pair in pairs for e in pair}
    products = [e for e in block.equations if _multiplies(e)]
    return 2 * sum(e in repeated for e in products) > len(products)


def _multiplies(e: Equation) -> bool:
    every = (e, *(q for body in e.blocks for q in body.walk()))
    return any(q.rule is not None and is_product(q.rule) for q in every)


def _repeated(equations: Sequence[Equation]) -> Iterator[tuple[Equation, Equation]]:
    """Pairs of an equation and the equation one period later.

    Of overlapping sequences, the one in which more equations repeat wins: a layer, not what repeats inside it.
    """
    numbers: dict[Hashable, int] = {}
    kinds = np.array([numbers.setdefault(_signature(e), len(numbers)) for e in equations], dtype=np.int64)
    last_position: dict[int, int] = {}
    frequency: dict[int, int] = {}
    for i, number in enumerate(kinds.tolist()):
        if number in last_position:
            frequency[i - last_position[number]] = frequency.get(i - last_position[number], 0) + 1
        last_position[number] = i
    runs: list[tuple[int, int, int]] = []
    for period in sorted(frequency, key=lambda p: (-frequency[p] * p, p))[:_PERIODS]:
        same = np.concatenate([[False], kinds[period:] == kinds[:-period], [False]])
        starts, ends = np.flatnonzero(same[1:] & ~same[:-1]), np.flatnonzero(same[:-1] & ~same[1:])
        runs += [(int(end - start), period, int(start)) for start, end in zip(starts, ends, strict=True)]
    period_at = np.zeros(len(kinds), dtype=np.int64)  # the period of the sequence that contains an equation; 0: none
    for length, period, start in sorted(runs, key=lambda run: (-run[0], run[1], run[2])):
        inside = period_at[start : start + length + period]
        # Layers need not correspond completely: the first one, for example, has no gradient with respect to its input.
        if np.isin(inside, (0, period)).all() and (2 * length >= period or (inside == period).any()):
            inside[:] = period
            yield from ((equations[i], equations[i + period]) for i in range(start, start + length))


def _signature(e: Equation) -> Hashable:
    """A key: equations with equal keys do the same with other arrays of the same shapes."""
    bodies = tuple(tuple(map(_signature, body.equations)) for body in e.blocks)
    arrays = tuple((v.shape, short_dtype(v.dtype)) for v in (*e.inputs, *e.outputs))
    return e.name, e.rule, arrays, e.mark is None, e.trip_count, bodies


class _Classes(UnionFind[int]):
    """Classes of nodes. Nodes of one class have the same states."""

    def __init__(self, graph: Graph):
        super().__init__()
        self.graph, self.tied, self.count = graph, False, len(graph.problem.costs)
        self.states: dict[int, object] = dict(enumerate(graph.states))
        for nodes in (graph.strategies, graph.shared_reshards):
            self.states.update(nodes.values())

    def tie(self, a: int, b: int) -> None:
        a, b = self.root(a), self.root(b)
        states = self.states.get(a), self.states.get(b)
        if a != b and (states[0] is states[1] or states[0] == states[1]):
            self.tied = self.join(min(a, b), max(a, b))

    def tie_values(self, v: object, w: object) -> None:
        if not (isinstance(v, Value) and isinstance(w, Value)):
            return
        of, reshards = self.graph.groups.of, self.graph.shared_reshards
        self.tie(of[v], of[w])
        if v in reshards and w in reshards:
            self.tie(reshards[v][0], reshards[w][0])

    def tie_equations(self, e: Equation, f: Equation) -> None:
        """Ties the unknowns at two equations, including those in their bodies."""
        for v, w in zip((*e.inputs, *e.outputs), (*f.inputs, *f.outputs), strict=True):
            self.tie_values(v, w)
        for c in () if e.rule is None else components(e.rule):
            if (e, c) in self.graph.strategies and (f, c) in self.graph.strategies:
                self.tie(self.graph.strategies[e, c][0], self.graph.strategies[f, c][0])
        for one, other in zip(e.blocks, f.blocks, strict=True):
            for v, w in zip(one.inputs, other.inputs, strict=True):
                self.tie_values(v, w)
            for q, r in zip(one.equations, other.equations, strict=True):
                self.tie_equations(q, r)

    def numbered(self) -> Ints:
        """The classes of all nodes.

        Values outside of regions are tied by the classes of the values inside. Copies that loops read share a limit of
        bytes, so they are tied by the classes of their neighbours. Results that leave follow from these and stay alone.
        """
        of, problem = self.graph.groups.of, self.graph.problem
        edges = [(e, edge) for e in self.graph.program.block.walk() for edge in e.edges]
        self._tie_equal(((e, self.root(of[a.inner]), len(a.outer.shape)), of[a.outer]) for e, a in edges)
        copies = {held.node: list[int]() for held in self.graph.loop_bytes if held.node not in self.states}
        for u, v in problem.ends.tolist():
            for node, other in ((u, v), (v, u)):
                if node in copies:
                    copies[node].append(self.root(other))
        self._tie_equal(((problem.costs[node].size, *others), node) for node, others in copies.items())
        return np.unique([self.root(node) for node in range(self.count)], return_inverse=True)[1].astype(np.int64)

    def _tie_equal(self, keys: Iterable[tuple[Hashable, int]]) -> None:
        first: dict[Hashable, int] = {}
        for key, node in [*keys]:
            self.tie(first.setdefault(key, node), node)


# Traces the sharding of each value of a plan back to a mark or argument.


def reasons_of(
    program: Program, shardings: Mapping[Value, Sharding], propagated: Propagated
) -> dict[tuple[Value, int], Reason]:
    """Why each dimension is split: the equation through which its atoms came, and the value from which they came.

    Where values have their propagated shardings, these are the steps of propagation. Otherwise atoms come from any
    array at an equation that has some of them.
    """
    reasons: dict[tuple[Value, int], Reason] = {}
    same = {v for v, s in shardings.items() if s.dims == propagated.shardings[v].dims}
    followed = {(v, d): reason for (v, d), reason in propagated.reasons.items() if v in same}
    before = -1
    while before != len(reasons):  # mostly once: sources come first
        before = len(reasons)
        for at, reason in [*followed.items()]:
            source = reason.source
            if source is None or any((source, d) in reasons for d in range(len(source.shape))):
                reasons[at] = followed.pop(at)
    missing = {
        v: [d for d, atoms in enumerate(s.dims) if atoms and (v, d) not in reasons] for v, s in shardings.items()
    }
    meetings = [pair for pair in _meetings(program) if any(missing[v] for v in pair[1])]
    is_new = True
    while is_new:
        is_new = False
        for e, arrays in meetings:
            for v in arrays:
                for d in [*missing[v]]:
                    near = next((x for x in arrays if x is not v and _share(x, shardings, v, d, reasons)), None)
                    if near is not None:
                        reasons[v, d], is_new = Reason("cost", e.line, e.name, near), True
                        missing[v].remove(d)
        meetings.reverse()
    for e in program.block.walk():
        for v in e.outputs:
            reasons.update({(v, d): Reason("cost", e.line, e.name) for d in missing[v]})
    return reasons


def _share(
    x: Value, shardings: Mapping[Value, Sharding], v: Value, d: int, reasons: Mapping[tuple[Value, int], Reason]
) -> bool:
    """Whether a dimension of ``x`` that has a reason has atoms of dimension ``d`` of ``v``."""
    atoms = shardings[v].dims[d]
    return any((x, i) in reasons and not set(own).isdisjoint(atoms) for i, own in enumerate(shardings[x].dims))


def _meetings(program: Program) -> Iterator[tuple[Equation, Sequence[Value]]]:
    """The arrays that meet at each equation, and at each boundary of a region."""
    for e in program.block.walk():
        if e.rule is not None:
            yield e, [*dict.fromkeys(v for v in (*e.inputs, *e.outputs) if isinstance(v, Value))]
        yield from ((e, (edge.outer, edge.inner)) for edge in e.edges)


_SAME = 1.02  # ratio of costs: equal choices for equal layers may cost this much more
_SOLVED_SOON = 1e6  # entries of all tables: a larger problem takes longer to solve again than to price
_ROUNDS = 16  # solutions with lower bounds of costs, after which all choices are priced


@no_mesh_set()
@collected_seldom()
@with_tables
def propagate(
    program: Program,
    mesh: Mesh,
    *,
    strict: bool = False,
    boundary: Boundary = AS_MARKED,
    objective: Callable[[Mesh, tuple[Atoms, ...]], Objective] = bytes_on,
    propagated: Propagated | None = None,
) -> Plan:
    """Plans a program: completes the user's marks to a sharding of every value and a split of every equation.

    Args:
        program: the traced function.
        mesh: the devices.
        strict: refuse primitives without a rule instead of gathering their operands, and anything that is dropped.
        boundary: constraints on arguments and results, besides marks.
        objective: makes the objective for the mesh and the axes that move as wholes.
        propagated: the settled program with its propagated shardings; None to settle the program first.

    Returns:
        the plan of the settled program (``planning.settled``).

    Raises:
        ShardingError: a mark does not fit its value or the mesh.
        PlanError: ``strict``, and the program has a primitive without a rule, or something that gshard drops.
    """
    if strict and program.dropped:
        lost = program.dropped[0]
        hint = f"{lost.why} Leave it out, or allow it with strict=False."
        raise PlanError(f"{lost.what} is not kept.", lost.line, f"it is {lost.value}", hint)
    propagated = propagated or settled(program, mesh)
    if not any(sharding.atoms for sharding in propagated.shardings.values()):  # nothing is open
        manual = manual_axes(propagated.program.block, propagated.mesh)
        rules = ((e, e.rule) for e in propagated.program.block.walk() if e.rule)
        splits = {e: rule.fixed(propagated.mesh) if rule.fixed else manual.pinned(e) for e, rule in rules}
        return at_boundary(
            Plan(propagated.program, propagated.mesh, propagated.shardings, splits, {}, propagated.orders), boundary
        )
    plan = at_boundary(_cheapest(propagated, objective, boundary), boundary)
    if strict and plan.gathered:
        e = plan.gathered[0]
        because = "cannot be split" if e.rule is not None and e.rule.why else "has no rule"
        raise PlanError(
            f"primitive '{e.name}' {because}, so its operands would be gathered on every device.",
            e.line,
            plan.gathered_text()[0],
            "Replace the operation, or allow it with strict=False.",
        )
    return plan


def _cheapest(
    propagated: Propagated, objective: Callable[[Mesh, tuple[Atoms, ...]], Objective], boundary: Boundary
) -> Plan:
    """Chooses what the marks leave open in a settled program.

    gshard first assumes the least possible value for costs that take long to compute
    (``Objective.assuming``). It computes these costs for the chosen states and chooses again, until no chosen state has
    an assumed cost. Then no other state is better, because each costs at least what was assumed. Large problems take
    longer to solve than to price, and are priced first.
    """
    mesh, known = propagated.mesh, [*propagated.shardings.values(), *propagated.moved.values()]
    axes = axes_of(mesh, known)
    exact_costs = objective(mesh, joined(mesh, axes, known))
    rounds = 0 if estimated_entries(propagated.program, mesh, exact_costs.axes) > _SOLVED_SOON else _ROUNDS
    while True:
        costs = exact_costs.assuming() if rounds else exact_costs
        graph = graph_of(propagated.program, costs, propagated=propagated, boundary=boundary)
        graph, states, gap = _chosen(graph, propagated)
        if not rounds or not costs.price(graph.splits(states)):
            is_limited = graph.is_limited or costs.axes != axes  # whether plans over whole axes were not compared
            plan = decided(graph, states, propagated)
            return dataclasses.replace(plan, gap=gap, counted=costs.counted, is_limited=is_limited)
        rounds -= 1


def _chosen(graph: Graph, propagated: Propagated) -> tuple[Graph, Ints, float]:
    """The problem without states that make loops hold too many bytes, its cheapest states, and the gap.

    Prefers states in which equal layers get equal choices, if these cost little more (``_SAME``).
    """
    classes, equal, equal_cost = classes_of_layers(graph), None, math.inf
    likely = _propagated_states(graph, propagated)
    if classes is not None:
        with contextlib.suppress(ProblemError):  # layers have to alternate
            equal = _solved(graph, likely, classes)
            equal_cost = equal[0].problem.value(equal[1])
    best, states, bound = _solved(graph, likely, None, equal_cost / _SAME, [] if equal is None else [equal[1]])
    cost = best.problem.value(states)
    if equal is not None and equal_cost <= cost * _SAME:
        limited = equal[0].is_limited or best.is_limited
        best, states, cost = dataclasses.replace(equal[0], is_limited=limited), equal[1], equal_cost
    return best, states, max(0.0, 1 - bound / cost) if cost else 0.0


def _propagated_states(graph: Graph, propagated: Propagated) -> dict[int, int]:
    """For the sharding groups, the states in which values have their propagated shardings."""
    found: dict[int, int] = {}
    for k, (group, states) in enumerate(zip(graph.groups.members, graph.states, strict=True)):
        wanted = {propagated.shardings[v] for v in group}
        found |= [(k, i) for i, sharding in enumerate(states) if sharding in wanted][:1]
    return found


def _solved(
    graph: Graph,
    likely: Mapping[int, int],
    classes: Ints | None = None,
    enough: float = math.inf,
    start: Sequence[Ints] = (),
) -> tuple[Graph, Ints, float]:
    """The problem without states that make loops hold too many bytes, its cheapest states, and a bound of their cost.

    The states may exceed the bytes of loops if the marks allow no others, or if they cost ``enough``. With ``classes``,
    the nodes of a class have the same state, and a ProblemError is raised instead.
    """
    found: tuple[Graph, Ints, float] | None = None
    limited: Graph | None = graph
    likely = likely if classes is None else {int(classes[node]): state for node, state in likely.items()}
    while limited is not None:
        try:
            problem = limited.problem if classes is None else tied(limited.problem, classes)
            solution = solve(problem, start=start, effort=EFFORT, enough=enough, likely=likely)
            if not solution.fits:
                raise ProblemError("No states are allowed together.")
        except ProblemError:
            if found is None or classes is not None:
                raise
            return found
        states = solution.states if classes is None else solution.states[classes]
        found = limited, states, solution.bound
        limited = None if solution.value >= enough else without_excess_in_loops(limited, states, classes)
    assert found is not None
    return found


def decided(graph: Graph, chosen: Ints, propagated: Propagated) -> Plan:
    """The plan of chosen states, with the reasons for what differs from the marks."""
    shardings = graph.shardings(chosen)
    reshards, leaves = graph.moved(chosen)
    reasons = reasons_of(graph.program, shardings, propagated)
    return Plan(
        graph.program, propagated.mesh, shardings, graph.splits(chosen), reasons, propagated.orders,
        shared_reshards=reshards, leaves=leaves,
    )  # fmt: skip


@with_tables
def in_best_order(program: Program, mesh: Mesh) -> Mesh:
    """The mesh with its devices in the order that the marks require; if marks disagree, in the order of most bytes."""
    marked_orders = {demand.order: None for _, demand, _ in demands(program, mesh) if any(demand.dims)}
    if not set(marked_orders) - {mesh.order} or any(
        e.rule is not None and not e.rule.is_free for e in program.block.walk()
    ):
        return mesh

    def bytes_elsewhere(order: Order) -> int:
        all_demands = demands(program, mesh.reordered(order))
        return sum(value.bytes for value, demand, _ in all_demands if any(demand.dims) and demand.order != order)

    # A tie goes to an order of a mark: values that are out of order in both candidates would move twice.
    return mesh.reordered(
        min((*marked_orders, mesh.order), key=lambda order: (bytes_elsewhere(order), order == mesh.order))
    )
