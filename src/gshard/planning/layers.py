"""Finds equal unknowns in successive layers, so that the planner can choose them alike.

A model whose layers are written out is a sequence of equations that repeats: forward, backward and in the optimizer,
each with its own period. Each equation corresponds to the equation one period later. So do the unknowns at both: their
splits, and how their operands and results are sharded and read. Corresponding unknowns form a class.

``planning.propagate`` decides whether a plan with equal layers is good enough: the first and the last layer have other
neighbours, and it can be better if layers alternate.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence

import numpy as np

from gshard.core.planning_tables import tabulated
from gshard.core.program import Block, Equation, Program, Value, short_dtype
from gshard.device.fusion_model import is_product
from gshard.planning.graph import Graph
from gshard.planning.strategies import components
from gshard.solver.problem import Ints

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
    blocks = list(_blocks(program.block))
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
    return (e.rule is not None and is_product(e.rule)) or any(
        q.rule is not None and is_product(q.rule) for body in e.blocks for q in body.walk()
    )


def _blocks(block: Block) -> Iterator[Block]:
    yield block
    for e in block.equations:
        for body in e.blocks:
            yield from _blocks(body)


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


class _Classes:
    """Classes of nodes, as a union-find structure. Nodes of one class have the same states."""

    def __init__(self, graph: Graph):
        self.graph, self.tied = graph, False
        self.parent = list(range(len(graph.problem.costs)))
        self.states: dict[int, object] = dict(enumerate(graph.states))
        for nodes in (graph.strategies, graph.shared_reshards, graph.leaves):
            self.states.update(nodes.values())

    def root(self, node: int) -> int:
        while self.parent[node] != node:
            self.parent[node] = node = self.parent[self.parent[node]]
        return node

    def tie(self, a: int, b: int) -> None:
        a, b = self.root(a), self.root(b)
        states = self.states.get(a), self.states.get(b)
        if a != b and (states[0] is states[1] or states[0] == states[1]):
            self.parent[max(a, b)] = min(a, b)
            self.tied = True

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
        """The classes, after tying the nodes that are not at an equation."""
        self._tie_equal(self._outside)
        self._tie_equal(self._leaving)
        self._tie_equal(self._between)
        roots = [self.root(node) for node in range(len(self.parent))]
        return np.unique(roots, return_inverse=True)[1].astype(np.int64)

    def _tie_equal(self, keys: Callable[[], Iterator[tuple[Hashable, int]]]) -> None:
        first: dict[Hashable, int] = {}
        for key, node in list(keys()):
            self.tie(first.setdefault(key, node), node)

    def _outside(self) -> Iterator[tuple[Hashable, int]]:
        """Values outside of a region, by the class of the value inside."""
        of = self.graph.groups.of
        for e in self.graph.program.block.walk():
            for edge in e.edges:
                yield (e, self.root(of[edge.inner]), len(edge.outer.shape)), of[edge.outer]

    def _leaving(self) -> Iterator[tuple[Hashable, int]]:
        """Leaves, by the class of their result."""
        for v, (node, _) in self.graph.leaves.items():
            yield self.root(self.graph.groups.of[v]), node

    def _between(self) -> Iterator[tuple[Hashable, int]]:
        """Other nodes (copies that enter a region, windows), by the classes of their neighbours."""
        problem = self.graph.problem
        near: dict[int, list[tuple[bool, int]]] = {i: [] for i in range(len(self.parent)) if i not in self.states}
        for u, v in problem.ends.tolist():
            for node, other in ((u, v), (v, u)):
                if node in near:
                    near[node].append((node < other, self.root(other)))
        for node, others in near.items():
            yield (problem.costs[node].size, tuple(sorted(others))), node
