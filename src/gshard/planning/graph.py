"""The planning problem of a program as a graph, and the plan that a solution of it stands for.

Kinds of nodes:

    group             values with one sharding; its states are shardings        (``planning.sharding_groups``)
    strategy          an equation outside of the groups, or a component of one; its states are splits
                                                                                (``planning.strategies``)
    shared reshard    the sharding in which several equations read a value
    leaf              the sharding in which a result of the program leaves

Edges between a group, its shared reshards and its strategies are reshards (``comm.reshard``); so are edges
between a value outside of a loop and one inside. ``planning.choices`` builds the graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from gshard.core.mesh import Mesh
from gshard.core.plan import local_bytes
from gshard.core.program import Equation, Program, Value
from gshard.core.rule import Split, project
from gshard.core.sharding import Sharding
from gshard.planning.sharding_groups import ShardingGroups
from gshard.planning.strategies import Component
from gshard.solver.problem import Floats, Ints, Problem

WHOLE, STACKED, CARRIED = "whole", "stacked", "carried"
# Of the largest array of an iteration. A device holds that array anyway, so stacks add at most 1/16 to its peak: less
# than the tenth by which temporaries may exceed those of another plan.
SMALL = 1 / 16


@dataclasses.dataclass(frozen=True, eq=False)
class LoopBytes:
    """Bytes that a loop holds while it runs: a value that it reads, that it stacks, or that its iterations pass on."""

    node: int  # the node whose state decides how the value is sharded
    loop: Equation  # the loop
    extra_bytes: Floats  # float64 [states], the bytes on a device beyond those of the marks
    kind: str  # ``WHOLE`` if an iteration reads all of it, ``STACKED``, or ``CARRIED``


@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
    """The planning problem of a program."""

    program: Program  # the program
    mesh: Mesh  # the devices
    problem: Problem  # nodes, costs and tables; the first nodes are the groups
    groups: ShardingGroups  # the sharding groups
    states: tuple[tuple[Sharding, ...], ...]  # for each group, its shardings
    # for each component of an equation, its node and its splits
    strategies: Mapping[tuple[Equation, Component], tuple[int, Sequence[Split]]]
    # for each value that several equations read through one node, the node and its shardings
    shared_reshards: Mapping[Value, tuple[int, Sequence[Sharding]]]
    # for each result that leaves through a node, the node and its shardings
    leaves: Mapping[Value, tuple[int, Sequence[Sharding]]]
    # nodes that hold bytes while a region runs, the region, and the bytes for each state
    held: Sequence[tuple[int, Equation, Sequence[int]]]
    loop_bytes: Sequence[LoopBytes]  # values that may take more bytes in a loop than the marks say
    donated_results: Collection[Value]  # the results that take the memory of donated arguments
    # whether not all choices are compared (``planning.strategies``), or states are forbidden because together they make
    # a loop hold too many bytes
    is_limited: bool

    def shardings(self, chosen: Sequence[int] | Ints) -> dict[Value, Sharding]:
        """The sharding of every value, with these states chosen."""
        return {v: self.states[k][chosen[k]] for v, k in self.groups.of.items()}

    def splits(self, chosen: Sequence[int] | Ints) -> dict[Equation, Split]:
        """The split of every equation, with these states chosen."""
        split_of: dict[Equation, Split] = {}
        for (e, _), (node, splits) in self.strategies.items():
            split_of[e] = {**split_of.get(e, {}), **splits[chosen[node]]}
        for e in self.groups.tied:
            group = self.groups.of[e.outputs[0]]
            split_of[e] = _split_of(e, self.states[group][chosen[group]], self.mesh)
        return split_of

    def moved(self, chosen: Sequence[int] | Ints) -> tuple[dict[Value, Sharding], dict[Value, Sharding]]:
        """The shardings of shared reshards, where they differ from the value's own, and of unmarked results."""
        shardings = self.shardings(chosen)
        read = {v: states[chosen[node]] for v, (node, states) in self.shared_reshards.items()}
        leave = {v: states[chosen[node]] for v, (node, states) in self.leaves.items()}
        return {v: sharding for v, sharding in read.items() if sharding != shardings[v]}, leave


def without_excess_in_loops(graph: Graph, chosen: Sequence[int] | Ints, classes: Ints | None = None) -> Graph | None:
    """Forbids states that make a loop hold too many bytes; None if no loop does with the chosen states.

    A loop may reshard a value before its first iteration and hold it until its end. It may also stack or carry sums and
    finish them after its last iteration. So a step that gathers all weights of a model one after the other, each for a
    moment, could hold all of them at once. The limits are, for one device:

    - for values that an iteration reads whole: in all, the largest array of an iteration, which a device holds anyway
    - for stacked values: ``SMALL`` of that array
    - for carried values, such as gradients: ``SMALL`` of that array, and the bytes of the values that are read whole

    All nodes of a class (of nodes in equal layers, ``planning.propagate``) are limited, or none.
    """
    shardings = graph.shardings(chosen)
    # For each loop, by kind and class: the extra bytes and the node of each value.
    held: dict[Equation, dict[tuple[str, int], list[tuple[float, int]]]] = {}
    for value in graph.loop_bytes:
        size = float(value.extra_bytes[chosen[value.node]])
        if size > 0:
            layers = value.kind, value.node if classes is None else int(classes[value.node])
            held.setdefault(value.loop, {}).setdefault(layers, []).append((size, value.node))
    too_much: set[int] = set()
    for loop, sizes_of in held.items():
        largest = largest_of_iteration(loop, shardings, graph.mesh)
        whole = [size for (kind, _), sizes in sizes_of.items() for size, _ in sizes if kind == WHOLE]
        limits = {WHOLE: max([largest, *whole]), STACKED: SMALL * largest, CARRIED: SMALL * largest + sum(whole)}
        largest_first = sorted(sizes_of.items(), key=lambda pair: (max(pair[1])[0], *pair[0]), reverse=True)
        for (kind, _), sizes in largest_first:
            total = sum(size for size, _ in sizes)
            if total <= limits[kind]:
                limits[kind] -= total
            else:
                too_much.update(node for _, node in sizes)
    if not too_much:
        return None
    costs = list(graph.problem.costs)
    for value in graph.loop_bytes:
        if value.node in too_much:
            costs[value.node] = np.where(value.extra_bytes > 0, np.inf, costs[value.node])
    problem = dataclasses.replace(graph.problem, costs=tuple(costs))
    return dataclasses.replace(graph, problem=problem, is_limited=True)


def largest_of_iteration(loop: Equation, shardings: Mapping[Value, Sharding], mesh: Mesh) -> int:
    """Bytes on one device of the largest array that an iteration of a loop computes."""
    computed = (v for body in loop.blocks for q in body.walk() for v in q.outputs)
    return max((local_bytes(v, shardings[v], mesh) for v in computed), default=0)


def _split_of(e: Equation, sharding: Sharding, mesh: Mesh) -> Split:
    """The split of an equation whose arrays all have this sharding."""
    rule = e.operator_rule
    split = project(rule.results[0], sharding.dims, rule.factors, mesh)
    every = frozenset(i for i, v in enumerate(e.inputs) if isinstance(v, Value))
    for k, (monoid, operands) in enumerate(rule.linear):
        atoms = tuple(a for a, m in sharding.unreduced if m == monoid)
        if operands == every and atoms:
            split[-1 - k] = tuple(a for a in mesh.atoms if a in atoms)
    return split
