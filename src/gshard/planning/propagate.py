"""Completes the user's marks to a plan: a sharding for every value and a split for every equation.

Propagation comes first (``planning.settled``). What it leaves open, and where it disagrees with itself, is one problem
(``planning.graph``): choose a sharding for every value that is not marked, nor an argument whose sharding the marks
decide, and a split for every equation, so that sending and computing cost least (``planning.objective``). Planning
never changes marks, nor the shardings of arguments. Of equal plans it takes the one that follows the marks.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from gshard.core.device_order import Order
from gshard.core.errors import PlanError
from gshard.core.garbage import collected_seldom
from gshard.core.jax_adapter import no_mesh_set
from gshard.core.manual_axes import manual_axes
from gshard.core.mesh import Atoms, Mesh
from gshard.core.plan import Plan
from gshard.core.planning_tables import with_tables
from gshard.core.program import Program
from gshard.core.program_boundary import AS_MARKED, Boundary
from gshard.planning.choices import graph_of
from gshard.planning.demands import demands
from gshard.planning.followed import followed
from gshard.planning.graph import Graph, without_excess_in_loops
from gshard.planning.io_shardings import at_boundary
from gshard.planning.layers import classes_of_layers
from gshard.planning.nearby import estimated_entries
from gshard.planning.objective import Objective, bytes_on
from gshard.planning.propagated import Propagated
from gshard.planning.reasons import Reasons
from gshard.planning.reshard_costs import axes_of, joined
from gshard.planning.settled import settled
from gshard.solver.descent import Descent
from gshard.solver.exact import exact
from gshard.solver.few import LARGE, best_of_few, entries
from gshard.solver.problem import Ints, Problem, ProblemError
from gshard.solver.reduce import reduce
from gshard.solver.reduced import Reduced
from gshard.solver.rest import best_of_rest
from gshard.solver.tied import tied

# The number of rounds of messages for a problem that is too large for an exact solution: rounds that go through _WORK
# entries of tables (half a second), within these bounds. Large problems end after a round that improves little.
_FEWEST, _MOST, _WORK = 3, 32, 8e6
_LITTLE = 5e-3  # of the cost: another round over all states of a large problem must save more than this
_AHEAD = 8  # rounds of messages in which a large problem may show that equal layers are good enough
_ENOUGH = 1e-8  # of the cost: a smaller gap counts as none
_NEARLY = 1e-3  # of the cost: with a smaller gap, few states are left that could be better
_TRIED = 0.5  # of the gap with which too many states were left: they are tried again with a smaller gap
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
    choice = choose(propagated, objective, boundary, every=False)
    if choice is None:
        return at_boundary(_replicated_plan(propagated), boundary)
    chosen = decided(choice.graph, choice.states, propagated)
    chosen = dataclasses.replace(chosen, gap=choice.gap, counted=choice.counted, is_limited=choice.is_limited)
    plan = at_boundary(chosen, boundary)
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


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
    """A solution of the planning problem of a program."""

    graph: Graph  # the problem, without the states with which loops would hold too many bytes
    states: Ints  # int64 [nodes], the chosen states
    gap: float  # the largest share of the cost that another solution could save
    propagated: Propagated  # the shardings that follow from the marks
    objective: Objective  # the costs

    @property
    def counted(self) -> str:
        """The unit of costs, in words: ``bytes sent``, or ``time on h100:1x8``."""
        return self.objective.counted

    @property
    def is_limited(self) -> bool:
        """Whether there are plans over whole axes that were not compared: ``gap`` says nothing of these."""
        known = [*self.propagated.shardings.values(), *self.propagated.moved.values()]
        return self.graph.is_limited or self.objective.axes != axes_of(self.propagated.mesh, known)

    @functools.cached_property
    def cost(self) -> float:
        """The cost of the chosen states."""
        return self.graph.problem.value(self.states)

    @functools.cached_property
    def layers(self) -> Ints | None:
        """int64 [nodes]: the classes of nodes in equal layers; None if equal layers did not get equal choices."""
        classes = classes_of_layers(self.graph)
        if classes is None:
            return None
        of_class = np.zeros(classes.max() + 1, np.int64)
        of_class[classes] = self.states
        return classes if (of_class[classes] == self.states).all() else None

    def tied_to(self, node: int) -> list[int]:
        """The nodes that must have the same state as this one: itself, and its counterparts in equal layers."""
        return [node] if self.layers is None else np.flatnonzero(self.layers == self.layers[node]).tolist()

    def with_state(self, node: int, state: int) -> Ints | None:
        """The cheapest states in which a node and all nodes tied to it have this state; None if there are none.

        The search is the same as for the chosen states: exact for a small problem, by messages for a large one.
        """
        if self.states[node] == state:
            return self.states
        layers, start, tied_nodes = self.layers, self.states.copy(), self.tied_to(node)
        start[tied_nodes] = state
        problem = self.graph.problem.restricted(dict.fromkeys(tied_nodes, state))
        graph = dataclasses.replace(self.graph, problem=problem)
        if layers is not None:
            solution = _with_equal_layers(graph, layers)
            return None if solution is None else solution[1]
        try:
            states, _ = _solved(graph.problem, _starts(graph, self.propagated, start))
        except ProblemError:
            return None
        while math.isfinite(graph.problem.value(states)):
            if (limited := _with_less_held(graph, states, self.propagated, start)) is None:
                break
            graph, (states, _) = limited
        return states if math.isfinite(graph.problem.value(states)) else None


def choose(
    propagated: Propagated,
    objective: Callable[[Mesh, tuple[Atoms, ...]], Objective] = bytes_on,
    boundary: Boundary = AS_MARKED,
    *,
    every: bool = True,
) -> Choice | None:
    """Chooses what the marks leave open in a settled program; None if nothing is split, so that nothing is open.

    Unless ``every`` is true, gshard first assumes the least possible value for costs that take long to compute
    (``Objective.assuming``). It computes these costs for the chosen states and chooses again, until no chosen state has
    an assumed cost. Then no other state is better, because each costs at least what was assumed. Large problems take
    longer to solve than to price, and are priced first.
    """
    if not any(sharding.atoms for sharding in propagated.shardings.values()):
        return None
    known = [*propagated.shardings.values(), *propagated.moved.values()]
    exact_costs = objective(propagated.mesh, joined(propagated.mesh, axes_of(propagated.mesh, known), known))
    size = estimated_entries(propagated.program, propagated.mesh, exact_costs.axes)
    rounds = 0 if every or size > _SOLVED_SOON else _ROUNDS
    while True:
        costs = exact_costs.assuming() if rounds else exact_costs
        graph = graph_of(propagated.program, costs, propagated=propagated, boundary=boundary)
        graph, states, gap = _chosen(graph, propagated)
        if not rounds or not costs.price(graph.splits(states)):
            return Choice(graph, states, gap, propagated, costs)
        rounds -= 1


def _replicated_plan(propagated: Propagated) -> Plan:
    """The plan of a program without a mark: every device runs the whole program, as with ``jax.jit``."""
    manual = manual_axes(propagated.program.block, propagated.mesh)
    rules = ((e, e.rule) for e in propagated.program.block.walk() if e.rule)
    splits = {e: rule.fixed(propagated.mesh) if rule.fixed else manual.pinned(e) for e, rule in rules}
    return Plan(propagated.program, propagated.mesh, propagated.shardings, splits, {}, propagated.orders)


def _chosen(graph: Graph, propagated: Propagated) -> tuple[Graph, Ints, float]:
    """The problem without states that make loops hold too many bytes, its cheapest states, and the gap.

    Prefers states in which equal layers get equal choices, if these cost little more (``_SAME``).
    """
    classes = classes_of_layers(graph)
    equal = None if classes is None else _with_equal_layers(graph, classes)
    equal_cost = math.inf if equal is None else equal[0].problem.value(equal[1])
    start = None if equal is None else equal[1]

    best, gap = _solved(graph.problem, _starts(graph, propagated, start), equal_cost / _SAME, start)
    best_cost = graph.problem.value(best)
    while best_cost * _SAME < equal_cost:
        limited = _with_less_held(graph, best, propagated, start)
        if limited is None:
            break
        graph, (best, gap) = limited
        best_cost = graph.problem.value(best)
    if equal is None or equal_cost > best_cost * _SAME:
        return graph, best, gap
    of_equal = dataclasses.replace(equal[0], is_limited=equal[0].is_limited or graph.is_limited)
    return of_equal, equal[1], max(0.0, 1 - best_cost * (1 - gap) / equal_cost) if equal_cost else 0.0


def _with_less_held(
    graph: Graph, states: Ints, propagated: Propagated, start: Ints | None
) -> tuple[Graph, tuple[Ints, float]] | None:
    """The problem in which loops hold fewer bytes than with these states, and its solution.

    None if loops hold few enough bytes, or if the marks allow no plan in which they hold fewer.
    """
    if (limited := without_excess_in_loops(graph, states)) is None:
        return None
    try:
        return limited, _solved(limited.problem, _starts(limited, propagated, start))
    except ProblemError:
        return None


def _starts(graph: Graph, propagated: Propagated, start: Ints | None) -> Callable[[Reduced], Iterator[Ints | None]]:
    """The states at which to begin in a reduced problem: those that follow the marks, and some of the whole problem."""

    def places(reduced: Reduced) -> Iterator[Ints | None]:
        yield followed(graph, propagated, reduced)
        if start is not None and math.isfinite(graph.problem.value(start)):
            yield reduced.lower(start)

    return places


def _with_equal_layers(graph: Graph, classes: Ints) -> tuple[Graph, Ints] | None:
    """The problem without states that make loops hold too many bytes, and its cheapest states that equal layers share.

    None if there are no such states.
    """
    limited: Graph | None = graph
    while limited is not None:
        try:
            graph, chosen = limited, _solved(tied(limited.problem, classes))[0][classes]
        except ProblemError:  # layers have to alternate
            return None
        if not math.isfinite(graph.problem.value(chosen)):
            return None
        limited = without_excess_in_loops(graph, chosen, classes)
    return graph, chosen


def _solved(
    problem: Problem,
    places: Callable[[Reduced], Iterable[Ints | None]] = lambda reduced: (),
    enough: float = math.inf,
    known: Ints | None = None,
) -> tuple[Ints, float]:
    """The cheapest states, and the gap: exact for a small problem, by rounds of messages for a large one.

    After each round of a large problem follow many rounds over the few most promising states of each node.
    """
    reduced = reduce(problem)
    if (solution := exact(reduced.problem)) is not None:
        if not solution:
            raise ProblemError("No states are allowed together.")
        return reduced.lift(solution[0]), 0.0
    descent, work, tried_gap = Descent(reduced.problem, 0), entries(reduced.problem), math.inf
    if known is not None and work >= LARGE and (bound := descent.bound_ahead(enough, _AHEAD)) >= enough:
        return known, max(0.0, 1 - bound / problem.value(known))
    for place in places(reduced):
        if place is not None:
            descent.offer(place)
    for round_index in range(int(min(_MOST, max(_FEWEST, _WORK / max(work, 1))))):
        before = descent.value
        descent.round()
        if descent.prices.bound >= enough:
            break
        if work >= LARGE:
            best_of_few(descent)
        gap_cost = descent.value - descent.prices.bound
        is_enough = round_index > 0 and work >= LARGE and descent.value >= before * (1 - _LITTLE)
        if is_enough or gap_cost <= _ENOUGH * descent.value:
            break
        if gap_cost <= min(_NEARLY * descent.value, _TRIED * tried_gap):
            if (best := best_of_rest(descent, _ENOUGH)) is not None:
                return reduced.lift(best), 0.0
            tried_gap = gap_cost
    if work < LARGE and descent.value - descent.prices.bound > _NEARLY * descent.value:
        best_of_few(descent)
    assert descent.states is not None, "without a limit of memory, messages find states that are allowed"
    return reduced.lift(descent.states), max(0.0, 1 - descent.prices.bound / descent.value) if descent.value else 0.0


def decided(graph: Graph, chosen: Ints, propagated: Propagated) -> Plan:
    """The plan of chosen states, with the reasons for what differs from the marks."""
    shardings = graph.shardings(chosen)
    reshards, leaves = graph.moved(chosen)
    reasons = Reasons(graph.program, shardings, propagated)
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
