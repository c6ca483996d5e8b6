"""Folds a transpose of a product into the product, by swapping its operands.

JAX's derivative of a product by its second operand is a product and a transpose. XLA gives a result of a loop the
layout in which the product produces it, and copies it where another one is needed: the gradients of stacked layers,
which every step reads, came in a layout that made the optimizer slower.
"""

from __future__ import annotations

from typing import Any

from jax import lax

from gshard.core.program import Equation
from gshard.rewrite.driver import at
from gshard.rewrite.equation_graph import Graph, Others


@at("transpose")
def transpose_of_dot(graph: Graph, e: Equation) -> Others | None:
    """``transpose(dot_general(a, b))`` becomes ``dot_general(b, a)``, if nothing else reads the product."""
    dot = graph.producer(e.inputs[0], "dot_general")
    if dot is None or not graph.is_read_once(e.inputs[0]) or (params := _swapped(dot, e)) is None:
        return None
    product = graph.writer.equation(dot.primitive, params, dot.inputs[::-1], e.outputs, dot.source_info)
    return {dot: [product], e: []}


def _swapped(dot: Equation, transpose: Equation) -> dict[str, Any] | None:
    """The parameters of the product of the operands in the other order, if the transpose undoes just that."""
    summed, batch = dot.params["dimension_numbers"]
    lhs, rhs = (len(x.shape) - len(own) for x, own in zip(dot.inputs, summed, strict=True))
    shared = len(batch[0])
    order = (*range(shared), *range(lhs, lhs + rhs - shared), *range(shared, lhs))
    precision = dot.params["precision"]
    if tuple(transpose.params["permutation"]) != order or not _is_per_operand(precision):
        return None
    if isinstance(precision, tuple):
        precision = precision[::-1]
    return {**dot.params, "dimension_numbers": (summed[::-1], batch[::-1]), "precision": precision}


def _is_per_operand(precision: Any) -> bool:
    """Whether a precision is the default, or of the same kind for both operands."""
    return precision is None or isinstance(precision, tuple | lax.Precision)
