"""Propagate: from a few marks to a sharding for every value and a split for every equation.

What follows from the marks is found first (``passes.facts``). What that leaves open, and where it disagrees with
itself, is one problem (``passes.graph``): a sharding for every value that is not marked, nor an argument of which the
facts decide how it comes, and a split for every equation, so that what is sent and computed costs least
(``passes.objective``). Marks, and shardings that arguments came with, are never changed; among equal plans the one that
follows the marks is taken.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator

from gshard.core.border import AS_MARKED, Border
from gshard.core.device_order import Order
from gshard.core.errors import PlanError
from gshard.core.garbage import collected_seldom
from gshard.core.jax_adapter import no_mesh_set
from gshard.core.manual_axes import manual_axes
from gshard.core.mesh import Atoms, Mesh
from gshard.core.plan import Plan
from gshard.core.planning_tables import with_tables
from gshard.core.program import Program
from gshard.passes.at_border import at_border
from gshard.passes.choices import graph_of
from gshard.passes.demands import demands
from gshard.passes.facts import Facts, facts_of
from gshard.passes.followed import followed
from gshard.passes.graph import Graph, within_rounds
from gshard.passes.layers import classes_of_layers
from gshard.passes.moves import axes_of, joined
from gshard.passes.objective import Objective, bytes_on
from gshard.passes.reasons import Reasons
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


@no_mesh_set()
@collected_seldom()
@with_tables
def propagate(
    program: Program,
    mesh: Mesh,
    *,
    strict: bool = False,
    border: Border = AS_MARKED,
    objective: Callable[[Mesh, tuple[Atoms, ...]], Objective] = bytes_on,
    facts: Facts | None = None,
) -> Plan:
    """Completes the user's marks to a plan.

    Args:
        program: the traced function.
        mesh: the devices.
        strict: refuse primitives that have no rule instead of gathering their operands, and what is dropped.
        border: what is asked of arguments and results.
        objective: what choices cost, on the mesh, of which some axes move as wholes.
        facts: what follows from the marks, if that is known.

    Returns:
        the plan. In its program some equations are others, as they are split (``passes.decompose``).

    Raises:
        ShardingError: a mark does not fit its value or the mesh.
        PlanError: ``strict``, and a primitive without rule, or something that the program says and gshard drops.
    """
    if strict and program.dropped:
        lost = program.dropped[0]
        hint = f"{lost.why} Leave it out, or allow it with strict=False."
        raise PlanError(f"{lost.what} is not kept.", lost.line, f"it is {lost.value}", hint)
    facts = facts or facts_of(program, mesh)
    if not any(sharding.atoms for sharding in facts.shardings.values()):
        return at_border(_whole(facts), border)
    known = {*facts.shardings.values(), *facts.moved.values()}
    costs = objective(mesh, joined(mesh, axes_of(mesh, known), known))
    graph = graph_of(facts.program, costs, facts=facts, border=border)
    graph, chosen, gap = _chosen(graph, facts)
    plan = at_border(dataclasses.replace(decided(graph, chosen, facts), gap=gap, counted=costs.counted), border)
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


def _whole(facts: Facts) -> Plan:
    """The plan of a program without a mark: as ``jax.jit`` runs it, the same on every device."""
    manual = manual_axes(facts.program.block, facts.mesh)
    rules = ((e, e.rule) for e in facts.program.block.walk() if e.rule)
    splits = {e: rule.fixed(facts.mesh) if rule.fixed else manual.pinned(e) for e, rule in rules}
    return Plan(facts.program, facts.mesh, facts.shardings, splits, {}, facts.orders)


def _chosen(graph: Graph, facts: Facts) -> tuple[Graph, Ints, float]:
    """The problem with loops that hold no more than they may, states that cost least, and the gap.

    Of states that cost nearly the same those are taken in which layers are alike.
    """
    classes = classes_of_layers(graph)
    alike = None if classes is None else _alike(graph, classes)
    cost = math.inf if alike is None else alike[0].problem.value(alike[1])

    def solved(graph: Graph) -> tuple[Ints, float]:
        def places(small: Reduced) -> Iterator[Ints | None]:
            yield followed(graph, facts, small)
            if alike is not None and math.isfinite(graph.problem.value(alike[1])):
                yield small.lower(alike[1])

        return _solved(graph.problem, places)

    best, gap = solved(graph)
    while (least := graph.problem.value(best)) * _SAME < cost and (less := within_rounds(graph, best)) is not None:
        graph, (best, gap) = less, solved(less)
    if alike is None or cost > least * _SAME:
        return graph, best, gap
    return *alike, max(0.0, 1 - least * (1 - gap) / cost) if cost else 0.0


def _alike(graph: Graph, classes: Ints) -> tuple[Graph, Ints] | None:
    """The same of states in which layers are alike; None if they cannot be."""
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
    """States that cost least, and the gap: exactly, if the problem is small; else what some rounds of messages find.

    Each round of a large problem is followed by many rounds over the few most promising states of each node.

    Args:
        problem: what is solved.
        places: states of the reduced problem to begin at, so that nothing is found that costs more.
    """
    small = reduce(problem)
    if found := exact(small.problem):
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


def decided(graph: Graph, chosen: Ints, facts: Facts) -> Plan:
    """The plan of some states, with the reasons of what is otherwise than the marks say."""
    shardings = graph.shardings(chosen)
    readings, leaves = graph.moved(chosen)
    reasons = Reasons(graph.program, shardings, facts)
    return Plan(
        graph.program, facts.mesh, shardings, graph.splits(chosen), reasons, facts.orders, readings=readings,
        leaves=leaves,
    )  # fmt: skip


@with_tables
def in_best_order(program: Program, mesh: Mesh) -> Mesh:
    """The mesh with its devices in the order that the marks ask for, or most bytes of them where they do not agree."""
    asked = {demand.order: None for _, demand, _ in demands(program, mesh) if any(demand.dims)}
    if not set(asked) - {mesh.order} or any(e.rule is not None and not e.rule.is_free for e in program.block.walk()):
        return mesh

    def elsewhere(order: Order) -> int:
        found = demands(program, mesh.reordered(order))
        return sum(value.bytes for value, demand, _ in found if any(demand.dims) and demand.order != order)

    # Among equals one that is asked for: what is out of order in both of two orders would be moved twice.
    return mesh.reordered(min((*asked, mesh.order), key=lambda order: (elsewhere(order), order == mesh.order)))
