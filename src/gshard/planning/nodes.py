"""Nodes: equations and edges of regions as propagation reads them: factors, and arrays with factors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gshard.core.mesh import Atoms, Mesh
from gshard.core.program import Constant, Edge, Equation, Value
from gshard.core.rule import COMMUNICATE, REDUCE, Dims, Factor, Rule
from gshard.core.split import Split


class Change(NamedTuple):
    """A dimension of one of a node's arrays that gets atoms, and the array that they came from."""

    tensor: int
    dim: int
    atoms: Atoms
    source: int | None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Node:
    """An equation or an edge, as the analysis sees it. Nodes that are ``alike`` differ in nothing but their values."""

    alike: int
    factors: tuple[Factor, ...]
    component: tuple[int, ...]
    tensors: tuple[tuple[Value, Dims], ...]
    priority: int
    equation: Equation | None
    line_of: Equation | None
    fixed: Callable[[Mesh], Split] | None = None


def nodes_of(equation: Equation, alike: dict[object, int]) -> list[Node]:
    """The nodes of an equation; ``alike`` keeps what the numbers of those that are alike stand for."""
    if equation.rule is None:
        return [_edge_node(edge, equation, alike) for edge in equation.edges]
    rule = equation.rule
    tensors = [
        (value, dims)
        for value, dims in zip((*equation.inputs, *equation.outputs), (*rule.operands, *rule.results), strict=True)
        if isinstance(value, Value) and value.shape
    ]
    number = _number(rule, [*equation.inputs, *equation.outputs], alike)
    node = Node(number, rule.factors, rule.component, tuple(tensors), _priority(rule), equation, equation, rule.fixed)
    return [node] if tensors else []


def _number(rule: Rule, values: Sequence[Value | Constant], alike: dict[object, int]) -> int:
    """One number for all that have a rule, arrays of these shapes, and the same ones among them twice."""
    first: dict[Value, int] = {}
    key = rule, tuple([(v.shape, first.setdefault(v, i)) if isinstance(v, Value) else () for i, v in enumerate(values)])
    return alike.setdefault(key, len(alike))


def _priority(rule: Rule) -> int:
    """0 where elements stay or are combined in place, 1 where some are summed or sent, 2 where few become many."""
    if any(f.kind in (REDUCE, COMMUNICATE) for f in rule.factors):
        return 1
    held = {f for dims in rule.operands for dim in dims for f in dim}
    new = (f for dims in rule.results for dim in dims for f in dim if f not in held)
    return 2 if held and any(rule.factors[f].size > 1 for f in new) else 0


def _edge_node(edge: Edge, equation: Equation, alike: dict[object, int]) -> Node:
    rule = edge.rule
    tensors = ((edge.outer, rule.operands[0]), (edge.inner, rule.results[0]))
    number = _number(rule, (edge.outer, edge.inner), alike)
    return Node(number, rule.factors, rule.component, tensors, 0, None, equation)
