"""Folds a transpose of a product into the product, by swapping its operands.

JAX's derivative of a product by its second operand is a transpose of a product. XLA gives the result of a loop the
layout of the product, and copies it for readers that need another layout. Without this rewrite, the gradients of
stacked layers have a layout that makes the optimizer slower.
"""

from __future__ import annotations

from typing import Any

from jax import lax

from gshard.core.program import Equation
from gshard.rewrite.driver import at
from gshard.rewrite.equation_graph import Graph, Others


@at("transpose")
def transpose_of_dot(graph: Graph, e: Equation) -> Others | None:
    """Replaces ``transpose(dot_general(a, b))`` by ``dot_general(b, a)``, if nothing else reads the product."""
    dot = graph.producer(e.inputs[0], "dot_general")
    if dot is None or not graph.is_read_once(e.inputs[0]) or (params := _swapped(dot, e)) is None:
        return None
    product = graph.writer.equation(dot.primitive, params, dot.inputs[::-1], e.outputs, dot.source_info)
    return {dot: [product], e: []}


def _swapped(dot: Equation, transpose: Equation) -> dict[str, Any] | None:
    """The parameters of the product with swapped operands, if the transpose exactly undoes the swap; otherwise None."""
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
    """Whether a precision is the default, or is given for each operand."""
    return precision is None or isinstance(precision, tuple | lax.Precision)
