"""Graph: the planning problem of a program, and the plan that a solution stands for.

    group       values with one sharding; its states are shardings             (``planning.sharding_groups``)
    strategy    an equation (or a component of one) in no group; its states are splits (``planning.strategies``)
    reshard     how several users take a value: moved there once, from there each goes its own way
    leaving     how a result of the program leaves

Between a group, its shared reshards and its strategies are moves (``planning.reshard_costs``), as between a
value outside of a loop and inside. ``planning.choices`` makes the problem; here a solution of it is read back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from gshard.core.mesh import Mesh
from gshard.core.plan import local_bytes
from gshard.core.program import Equation, Program, Value
from gshard.core.sharding import Sharding
from gshard.core.split import Split, project
from gshard.planning.sharding_groups import ShardingGroups
from gshard.planning.strategies import Component
from gshard.solver.problem import Floats, Ints, Problem

WHOLE, STACKED, CARRIED = "whole", "stacked", "carried"
# Of the largest array of a round. A device holds that array anyway, so stacks add at most 1/16 to its peak: less than
# the tenth by which temporaries may exceed those of another plan.
SMALL = 1 / 16


@dataclasses.dataclass(frozen=True, eq=False)
class Brought:
    """What a loop holds while it runs: brought there once, stacked, or carried from round to round.

    Attributes:
        node: whose states say how it is sharded.
        loop: the loop.
        more: for each state the bytes that it takes more than it does as the marks say.
        kind: ``WHOLE`` for what a round reads all of, ``STACKED``, or ``CARRIED``.
    """

    node: int
    loop: Equation
    more: Floats
    kind: str


@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
    """A program as a problem.

    Attributes:
        program: the program.
        mesh: what it is for.
        problem: nodes and tables; groups come first.
        groups: the values of each group.
        states: of each group, its shardings.
        strategies: the components of equations, with their nodes and splits.
        shared_reshards: how values are read by several, with their nodes and shardings.
        leaves: how results leave, likewise.
        held: nodes that hold bytes while a region runs: for each state how many.
        brought: what loops hold that may be more than marks say.
        after: the results that take the place of arguments.
    """

    program: Program
    mesh: Mesh
    problem: Problem
    groups: ShardingGroups
    states: tuple[tuple[Sharding, ...], ...]
    strategies: Mapping[tuple[Equation, Component], tuple[int, Sequence[Split]]]
    shared_reshards: Mapping[Value, tuple[int, Sequence[Sharding]]]
    leaves: Mapping[Value, tuple[int, Sequence[Sharding]]]
    held: Sequence[tuple[int, Equation, Sequence[int]]]
    brought: Sequence[Brought]
    after: Collection[Value]

    def shardings(self, chosen: Sequence[int] | Ints) -> dict[Value, Sharding]:
        """The sharding of every value, where these states are chosen."""
        return {v: self.states[k][chosen[k]] for v, k in self.groups.of.items()}

    def splits(self, chosen: Sequence[int] | Ints) -> dict[Equation, Split]:
        """The split of every equation."""
        found: dict[Equation, Split] = {}
        for (e, _), (node, ways) in self.strategies.items():
            found[e] = {**found.get(e, {}), **ways[chosen[node]]}
        for e in self.groups.tied:
            k = self.groups.of[e.outputs[0]]
            found[e] = _split_of(e, self.states[k][chosen[k]], self.mesh)
        return found

    def moved(self, chosen: Sequence[int] | Ints) -> tuple[dict[Value, Sharding], dict[Value, Sharding]]:
        """Where values are read otherwise than they are sharded, and how unmarked results leave."""
        here = self.shardings(chosen)
        read = {v: states[chosen[node]] for v, (node, states) in self.shared_reshards.items()}
        leave = {v: states[chosen[node]] for v, (node, states) in self.leaves.items()}
        return {v: way for v, way in read.items() if way != here[v]}, leave


def within_rounds(graph: Graph, chosen: Sequence[int] | Ints, classes: Ints | None = None) -> Graph | None:
    """The problem without some of what these states have loops hold; None if that is not too much.

    What a round needs otherwise than it is sharded outside can be brought there once, and stay while the loop runs.
    Sums can be stacked or carried, and finished once. So a step that gathers all weights of a model, one after the
    other and each for a moment, could come to hold them all. What is brought that a round needs all of is therefore, in
    all, no more than the largest array that a round holds on one device anyway; what is stacked is small beside that,
    and what is carried, such as gradients of what is brought, no more than that besides.

    Args:
        graph: the problem.
        chosen: int64 [nodes].
        classes: int64 [nodes], those that equal layers have alike (``planning.layers``): all of them or none.
    """
    here = graph.shardings(chosen)
    held: dict[Equation, dict[tuple[str, int], list[tuple[float, int]]]] = {}
    for own in graph.brought:
        if (size := float(own.more[chosen[own.node]])) > 0:
            layers = own.kind, own.node if classes is None else int(classes[own.node])
            held.setdefault(own.loop, {}).setdefault(layers, []).append((size, own.node))
    too_much: set[int] = set()
    for e, found in held.items():
        largest = largest_of_round(e, here, graph.mesh)
        brought = [size for (kind, _), sizes in found.items() for size, _ in sizes if kind == WHOLE]
        rooms = {WHOLE: max([largest, *brought]), STACKED: SMALL * largest, CARRIED: SMALL * largest + sum(brought)}
        for (kind, _), sizes in sorted(found.items(), key=lambda pair: (max(pair[1])[0], *pair[0]), reverse=True):
            if (every := sum(size for size, _ in sizes)) <= rooms[kind]:
                rooms[kind] -= every
            else:
                too_much.update(node for _, node in sizes)
    if not too_much:
        return None
    costs = list(graph.problem.costs)
    for own in graph.brought:
        if own.node in too_much:
            costs[own.node] = np.where(own.more > 0, np.inf, costs[own.node])
    return dataclasses.replace(graph, problem=dataclasses.replace(graph.problem, costs=tuple(costs)))


def largest_of_round(loop: Equation, shardings: Mapping[Value, Sharding], mesh: Mesh) -> int:
    """Bytes on one device of the largest array that a round of a loop makes."""
    made = (v for body in loop.blocks for q in body.walk() for v in q.outputs)
    return max((local_bytes(v, shardings[v], mesh) for v in made), default=0)


def _split_of(e: Equation, sharding: Sharding, mesh: Mesh) -> Split:
    """The split of an equation all of whose arrays are sharded alike."""
    rule = e.rule
    assert rule is not None
    split = project(rule.results[0], sharding.dims, rule.factors, mesh)
    every = frozenset(i for i, v in enumerate(e.inputs) if isinstance(v, Value))
    for k, (monoid, operands) in enumerate(rule.linear):
        atoms = tuple(a for a, m in sharding.unreduced if m == monoid)
        if operands == every and atoms:
            split[-1 - k] = tuple(a for a in mesh.atoms if a in atoms)
    return split
