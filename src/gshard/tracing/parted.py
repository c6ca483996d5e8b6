"""Parted: products whose results are taken apart in equal parts.

    gate, up = jnp.split(x @ w, 2, -1)          w (D, 2 F) in fine form (D, 2, F), and the product (..., 2, F)

Split along its columns, such a product has one part on some devices and the next on others, and all of it would have
to move so that parts of the same columns meet. In fine form (``tracing.fine``) the columns of a part may be split, and
parts meet where they are made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gshard.core.program import Equation, Value
from gshard.tracing.fine import ELEMENTWISE

_FAR = 16  # equations between a product and what takes it apart


def parted_products(equations: Sequence[Equation]) -> dict[Equation, tuple[int, int, tuple[int, ...]]]:
    """For each product that is taken apart: which operand has the dimension, which one it is, and its groups."""
    producers: dict[Any, Equation] = {y: e for e in equations for y in e.outputs}
    found: dict[Equation, tuple[int, int, tuple[int, ...]]] = {}
    for e in equations:
        for value, d, group in _parts(e):
            product = _product(value, producers)
            place = None if product is None else _place(product, d)
            if product is not None and place is not None:
                found.setdefault(product, (*place, group))
    return found


def _parts(e: Equation) -> Iterator[tuple[Any, int, tuple[int, ...]]]:
    """The dimension of its operand that an equation takes apart, and how."""
    if e.name == "split":
        sizes = {int(n) for n in e.params["sizes"]}
        if len(sizes) == 1 and len(e.outputs) > 1:
            yield e.inputs[0], int(e.params["axis"]), (len(e.outputs), *sizes)
    if e.name == "slice" and set(e.params["strides"] or (1,)) == {1}:
        every = enumerate(zip(e.inputs[0].shape, e.outputs[0].shape, e.params["start_indices"], strict=True))
        cut = [(d, n, m, int(start)) for d, (n, m, start) in every if m != n]
        if len(cut) == 1 and all(m and not n % m and not start % m for _, n, m, start in cut):
            ((d, n, m, _),) = cut
            yield e.inputs[0], d, (n // m, m)


def _product(value: Any, producers: Mapping[Any, Equation]) -> Equation | None:
    """The product that a value is, but for what is elementwise."""
    for _ in range(_FAR):
        e = producers.get(value)
        if e is None or e.mark is not None:
            return None
        if e.name == "dot_general":
            return e
        rest = [x for x in e.inputs if x.shape == value.shape and x in producers]
        rest = [x for x in rest if producers[x].name not in ("broadcast_in_dim", "iota")]
        if e.name not in ELEMENTWISE or len(rest) != 1 or len(e.outputs) > 1:
            return None
        (value,) = rest
    return None


def _place(product: Equation, d: int) -> tuple[int, int] | None:
    """Which operand of a product a dimension of its result is from, and which one it is there; None for a batch's."""
    summed, batch = product.params["dimension_numbers"]
    d -= len(batch[0])
    for i, x in enumerate(product.inputs):
        free = [k for k in range(len(x.shape)) if k not in (*summed[i], *batch[i])]
        if 0 <= d < len(free):
            return (i, free[d]) if isinstance(x, Value) else None
        d -= len(free)
    return None
