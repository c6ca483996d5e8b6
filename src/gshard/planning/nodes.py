"""Represents equations and edges of regions for propagation: factors, and arrays with their factors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gshard.core.mesh import Atoms, Mesh
from gshard.core.program import Constant, Edge, Equation, Value
from gshard.core.rule import COMMUNICATE, REDUCE, Dims, Factor, Rule
from gshard.core.split import Split


class Change(NamedTuple):
    """A refinement: a dimension of a node's array, the atoms that it gets, and the array they come from."""

    tensor: int  # the index of the array in ``Node.tensors``
    dim: int  # the dimension
    atoms: Atoms  # all atoms of the dimension after the change
    source: int | None  # the index of the array that had the atoms; None if no other array has them


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Node:
    """An equation or an edge of a region."""

    alike: int  # a number; nodes with the same number differ in nothing but their values
    factors: tuple[Factor, ...]  # the factors of its rule
    component: tuple[int, ...]  # for each factor, the component of the rule that it belongs to
    tensors: tuple[tuple[Value, Dims], ...]  # the arrays, each with the factors of its dimensions
    priority: int  # 0, 1 or 2; nodes of lower numbers are refined first
    equation: Equation | None  # the equation; None for an edge
    line_of: Equation | None  # the equation that has the user's line
    fixed: Callable[[Mesh], Split] | None = None  # the only split of the equation on a mesh, if the rule has one


def nodes_of(equation: Equation, alike: dict[object, int]) -> list[Node]:
    """The nodes of an equation. ``alike`` maps a rule and shapes to the number of nodes that have them; it grows."""
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
    """The number of the nodes that have this rule, arrays of these shapes, and the same arrays more than once."""
    first: dict[Value, int] = {}
    key = rule, tuple([(v.shape, first.setdefault(v, i)) if isinstance(v, Value) else () for i, v in enumerate(values)])
    return alike.setdefault(key, len(alike))


def _priority(rule: Rule) -> int:
    """0 if elements stay or combine in place, 1 if some are summed or sent, 2 if few elements become many."""
    if any(f.kind in (REDUCE, COMMUNICATE) for f in rule.factors):
        return 1
    of_operands = {f for dims in rule.operands for dim in dims for f in dim}
    new_factors = (f for dims in rule.results for dim in dims for f in dim if f not in of_operands)
    return 2 if of_operands and any(rule.factors[f].size > 1 for f in new_factors) else 0


def _edge_node(edge: Edge, equation: Equation, alike: dict[object, int]) -> Node:
    rule = edge.rule
    tensors = ((edge.outer, rule.operands[0]), (edge.inner, rule.results[0]))
    number = _number(rule, (edge.outer, edge.inner), alike)
    return Node(number, rule.factors, rule.component, tensors, 0, None, equation)
