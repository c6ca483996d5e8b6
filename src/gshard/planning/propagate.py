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
from gshard.planning.graph import Graph, within_rounds
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

# Rounds of messages at most, where a problem is too large to be solved exactly: as many as go through so many entries
# of tables (half a second), within these bounds. Large problems end after a round that brings little.
_FEWEST, _MOST, _WORK = 3, 32, 8e6
_LITTLE = 5e-3  # of the costs: what a round over all states of a large problem spares is not worth another
_ENOUGH = 1e-8  # of the costs: a gap that is none
_NEARLY = 1e-3  # at which few states are left that could be better
_SAME = 1.02  # costs: that layers are alike is worth a little
_SOLVED_SOON = 1e6  # entries of all tables: a larger problem takes longer to solve again than to price
_ROUNDS = 16  # after which all is priced


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
    """Completes the user's marks to a plan.

    Args:
        program: the traced function.
        mesh: the devices.
        strict: refuse primitives that have no rule instead of gathering their operands, and what is dropped.
        boundary: constraints on arguments and results, besides marks.
        objective: gives the costs of choices, for the mesh and the groups of axes that move together.
        propagated: the settled program with what follows from its marks; None settles it first.

    Returns:
        the plan, of the settled program (``planning.settled``).

    Raises:
        ShardingError: a mark does not fit its value or the mesh.
        PlanError: ``strict``, and a primitive without rule, or something that the program says and gshard drops.
    """
    if strict and program.dropped:
        lost = program.dropped[0]
        hint = f"{lost.why} Leave it out, or allow it with strict=False."
        raise PlanError(f"{lost.what} is not kept.", lost.line, f"it is {lost.value}", hint)
    propagated = propagated or settled(program, mesh)
    if (made := choose(propagated, objective, boundary, every=False)) is None:
        return at_boundary(_whole(propagated), boundary)
    found = decided(made.graph, made.states, propagated)
    plan = at_boundary(dataclasses.replace(found, gap=made.gap, counted=made.objective.counted), boundary)
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
    """What planning chose in the problem of a program.

    Attributes:
        graph: the problem, without the states that would have loops hold too much.
        states: int64 [nodes], those that were chosen.
        gap: how much of their cost could at most be saved, as a part of it.
        propagated: what follows from the marks.
        objective: the costs.
    """

    graph: Graph
    states: Ints
    gap: float
    propagated: Propagated
    objective: Objective

    @property
    def counted(self) -> str:
        """The unit of costs, in words: ``bytes sent``, or ``time on h100:1x8``."""
        return self.objective.counted

    @functools.cached_property
    def cost(self) -> float:
        """What the chosen states cost."""
        return self.graph.problem.value(self.states)

    @functools.cached_property
    def layers(self) -> Ints | None:
        """int64 [nodes]: the classes of nodes that equal layers have alike; None if layers were not chosen alike."""
        classes = classes_of_layers(self.graph)
        if classes is None:
            return None
        of_class = np.zeros(classes.max() + 1, np.int64)
        of_class[classes] = self.states
        return classes if (of_class[classes] == self.states).all() else None

    def tied_to(self, node: int) -> list[int]:
        """The nodes that have the state of this one: those that are alike in equal layers, and itself."""
        return [node] if self.layers is None else np.flatnonzero(self.layers == self.layers[node]).tolist()

    def with_state(self, node: int, state: int) -> Ints | None:
        """The states that cost least where a node, and all that are tied to it, have this one; None if none do.

        They are found as the chosen ones were: exactly in a small problem, and in a large one by messages.
        """
        if self.states[node] == state:
            return self.states
        problem, layers = self.graph.problem, self.layers
        costs, start = list(problem.costs), self.states.copy()
        for i in self.tied_to(node):
            costs[i] = np.where(np.arange(costs[i].size) == state, costs[i], np.inf)
            start[i] = state
        graph = dataclasses.replace(self.graph, problem=dataclasses.replace(problem, costs=tuple(costs)))
        if layers is not None:
            alike = _alike(graph, layers)
            return None if alike is None else alike[1]
        try:
            found, _ = _solved(graph.problem, _from(graph, self.propagated, start))
        except ProblemError:
            return None
        while math.isfinite(graph.problem.value(found)):
            if (less := _with_less_held(graph, found, self.propagated, start)) is None:
                break
            graph, (found, _) = less
        return found if math.isfinite(graph.problem.value(found)) else None


def choose(
    propagated: Propagated,
    objective: Callable[[Mesh, tuple[Atoms, ...]], Objective] = bytes_on,
    boundary: Boundary = AS_MARKED,
    *,
    every: bool = True,
) -> Choice | None:
    """Chooses what the marks leave open in a settled program; None if nothing is split, so that nothing is open.

    Where not ``every`` choice has to be priced, costs that take long to find are assumed to be the least that they can
    be (``Objective.assuming``). Those of the chosen states are found, and states are chosen again, until no chosen one
    has an assumed cost: other states cost at least what was assumed, so they are no better. Large problems take longer
    to solve than to price, and are priced first.

    Args:
        propagated: the settled program with what follows from its marks.
        objective, boundary: as of ``propagate``.
        every: price every choice, as one has to where costs of others than the chosen ones are read.
    """
    if not any(sharding.atoms for sharding in propagated.shardings.values()):
        return None
    known = {*propagated.shardings.values(), *propagated.moved.values()}
    costs = objective(propagated.mesh, joined(propagated.mesh, axes_of(propagated.mesh, known), known))
    size = estimated_entries(propagated.program, propagated.mesh, costs.axes)
    rounds = 0 if every or size > _SOLVED_SOON else _ROUNDS
    while True:
        used = costs.assuming() if rounds else costs
        graph = graph_of(propagated.program, used, propagated=propagated, boundary=boundary)
        graph, chosen, gap = _chosen(graph, propagated)
        if not rounds or not used.price(graph.splits(chosen)):
            return Choice(graph, chosen, gap, propagated, used)
        rounds -= 1


def _whole(propagated: Propagated) -> Plan:
    """The plan of a program without a mark: every device runs the whole program, as with ``jax.jit``."""
    manual = manual_axes(propagated.program.block, propagated.mesh)
    rules = ((e, e.rule) for e in propagated.program.block.walk() if e.rule)
    splits = {e: rule.fixed(propagated.mesh) if rule.fixed else manual.pinned(e) for e, rule in rules}
    return Plan(propagated.program, propagated.mesh, propagated.shardings, splits, {}, propagated.orders)


def _chosen(graph: Graph, propagated: Propagated) -> tuple[Graph, Ints, float]:
    """The problem with loops that hold no more than they may, the cheapest states, and the gap.

    Prefers states in which equal layers are alike, if these cost nearly as little.
    """
    classes = classes_of_layers(graph)
    alike = None if classes is None else _alike(graph, classes)
    cost = math.inf if alike is None else alike[0].problem.value(alike[1])

    start = None if alike is None else alike[1]
    best, gap = _solved(graph.problem, _from(graph, propagated, start))
    while (least := graph.problem.value(best)) * _SAME < cost and (
        less := _with_less_held(graph, best, propagated, start)
    ) is not None:
        graph, (best, gap) = less
    if alike is None or cost > least * _SAME:
        return graph, best, gap
    return *alike, max(0.0, 1 - least * (1 - gap) / cost) if cost else 0.0


def _with_less_held(
    graph: Graph, states: Ints, propagated: Propagated, start: Ints | None
) -> tuple[Graph, tuple[Ints, float]] | None:
    """The problem in which loops hold less than with these states, and its solution.

    None if they hold little enough, or if the marks leave no plan in which they hold less.
    """
    if (less := within_rounds(graph, states)) is None:
        return None
    try:
        return less, _solved(less.problem, _from(less, propagated, start))
    except ProblemError:
        return None


def _from(graph: Graph, propagated: Propagated, start: Ints | None) -> Callable[[Reduced], Iterator[Ints | None]]:
    """Where to begin in the reduced problem: where the marks are followed, and at some states of the whole problem."""

    def places(small: Reduced) -> Iterator[Ints | None]:
        yield followed(graph, propagated, small)
        if start is not None and math.isfinite(graph.problem.value(start)):
            yield small.lower(start)

    return places


def _alike(graph: Graph, classes: Ints) -> tuple[Graph, Ints] | None:
    """The same for states in which equal layers are alike; None if there are none."""
    less: Graph | None = graph
    while less is not None:
        try:
            graph, chosen = less, _solved(tied(less.problem, classes))[0][classes]
        except ProblemError:  # they have to differ in turn
            return None
        if not math.isfinite(graph.problem.value(chosen)):
            return None
        less = within_rounds(graph, chosen, classes)
    return graph, chosen


def _solved(
    problem: Problem, places: Callable[[Reduced], Iterable[Ints | None]] = lambda small: ()
) -> tuple[Ints, float]:
    """The cheapest states, and the gap: exact if the problem is small, else found by some rounds of messages.

    Each round of a large problem is followed by many rounds over the few most promising states of each node.

    Args:
        problem: what is solved.
        places: states of the reduced problem to begin at: the result costs no more than these.
    """
    small = reduce(problem)
    if (found := exact(small.problem)) is not None:
        if not found:
            raise ProblemError("No states are allowed together.")
        return small.lift(found[0]), 0.0
    descent = Descent(small.problem, 0)
    for place in places(small):
        if place is not None:
            descent.offer(place)
    work = entries(small.problem)
    for done in range(int(min(_MOST, max(_FEWEST, _WORK / max(work, 1))))):
        before = descent.value
        descent.round()
        if work >= LARGE:
            best_of_few(descent)
        spared = descent.value - descent.prices.bound
        ends = done > 0 and work >= LARGE and descent.value >= before * (1 - _LITTLE)
        if ends or spared <= _ENOUGH * descent.value:
            break
        if spared <= _NEARLY * descent.value and (best := best_of_rest(descent, _ENOUGH)) is not None:
            return small.lift(best), 0.0
    assert descent.states is not None, "without a limit of memory, messages find states that are allowed"
    return small.lift(descent.states), spared / descent.value if spared > 0 else 0.0


def decided(graph: Graph, chosen: Ints, propagated: Propagated) -> Plan:
    """The plan of some states, with the reasons for what differs from the marks."""
    shardings = graph.shardings(chosen)
    reshards, leaves = graph.moved(chosen)
    reasons = Reasons(graph.program, shardings, propagated)
    return Plan(
        graph.program, propagated.mesh, shardings, graph.splits(chosen), reasons, propagated.orders,
        shared_reshards=reshards, leaves=leaves,
    )  # fmt: skip


@with_tables
def in_best_order(program: Program, mesh: Mesh) -> Mesh:
    """The mesh with its devices in the order that marks ask for; where marks disagree, in the order of most bytes."""
    asked = {demand.order: None for _, demand, _ in demands(program, mesh) if any(demand.dims)}
    if not set(asked) - {mesh.order} or any(e.rule is not None and not e.rule.is_free for e in program.block.walk()):
        return mesh

    def elsewhere(order: Order) -> int:
        found = demands(program, mesh.reordered(order))
        return sum(value.bytes for value, demand, _ in found if any(demand.dims) and demand.order != order)

    # Among equals one that is asked for: what is out of order in both of two orders would be moved twice.
    return mesh.reordered(min((*asked, mesh.order), key=lambda order: (elsewhere(order), order == mesh.order)))
