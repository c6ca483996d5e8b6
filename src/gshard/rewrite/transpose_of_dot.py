"""Swapped: a product that is only transposed is made with its operands swapped.

JAX's derivative of a product by its second operand is a product and a transposition. The compiler gives what comes out
of a loop the layout in which the product makes it, and copies it where it is wanted otherwise: the gradients of stacked
layers, which every step reads, came in a layout that made the optimizer slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax import lax

from gshard.core.program import Constant, Equation, Value


def products_as_wanted(
    equations: Iterable[Equation], outputs: Sequence[Value | Constant], equation: Callable[..., Equation]
) -> list[Equation]:
    """The equations with products in the order of dimensions in which they are read.

    Args:
        equations: of one block.
        outputs: the block's results.
        equation: an equation of a primitive, its parameters, operands, results, and the source that it is blamed on.
    """
    equations = list(equations)
    products: dict[Any, Equation] = {e.outputs[0]: e for e in equations if e.name == "dot_general"}
    readers: dict[Any, int] = dict.fromkeys(outputs, 2)  # a result is read as it is
    for e in equations if products else ():
        for x in e.inputs:
            readers[x] = readers.get(x, 0) + 1
    instead: dict[Equation, Equation | None] = {}
    for e in equations:
        product = products.get(e.inputs[0]) if e.name == "transpose" else None
        if product is None or readers[e.inputs[0]] > 1 or (params := _swapped(product, e)) is None:
            continue
        instead[product] = equation(product.primitive, params, product.inputs[::-1], e.outputs, product.source_info)
        instead[e] = None
    return [new for e in equations if (new := instead.get(e, e)) is not None]


def _swapped(product: Equation, transposition: Equation) -> dict[str, Any] | None:
    """The parameters of the product of the operands in the other order, if the transposition undoes just that."""
    summed, batch = product.params["dimension_numbers"]
    lhs, rhs = (len(x.shape) - len(own) for x, own in zip(product.inputs, summed, strict=True))
    shared = len(batch[0])
    order = (*range(shared), *range(lhs, lhs + rhs - shared), *range(shared, lhs))
    precision = product.params["precision"]
    if tuple(transposition.params["permutation"]) != order or not _is_of_each(precision):
        return None
    if isinstance(precision, tuple):
        precision = precision[::-1]
    return {**product.params, "dimension_numbers": (summed[::-1], batch[::-1]), "precision": precision}


def _is_of_each(precision: Any) -> bool:
    """Whether it says nothing, or the same kind of thing of either operand."""
    return precision is None or isinstance(precision, tuple | lax.Precision)
