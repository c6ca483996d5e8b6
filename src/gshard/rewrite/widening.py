"""Finds the narrow arrays from which elementwise equations compute a wide one.

    q = round(w / s) as int8; y = f32(q) * s          y is computed from q and s, a quarter of its bytes

Two rewrites replace the wide array by the narrow ones where a loop stacks it or reads it as a stack (``widen_slices``,
``stack_narrow``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax import lax

from gshard.core.jax_adapter import scan_counts
from gshard.core.program import Constant, Equation, Value
from gshard.language.traits import traits_of
from gshard.rewrite.equation_graph import Array, Graph, again, operands_first

_BROADCAST = "broadcast_in_dim"


def narrow_sources(graph: Graph, x: Value, length: int | None = None) -> tuple[Value, ...] | None:
    """The arrays from which elementwise equations compute an array, with the fewest bytes; None if it is best."""
    best: dict[Value, tuple[Value, ...]] = {}
    for v in operands_first([x], lambda v: _operands(graph, v, length) or ()):
        operands = _operands(graph, v, length)
        found = dict.fromkeys(s for operand in operands for s in best[operand]) if operands is not None else {v: None}
        best[v] = tuple(found) if sum(s.bytes for s in found) < v.bytes else (v,)
    return None if x in best[x] or not best[x] else best[x]


def computed_from(graph: Graph, x: Value, sources: Sequence[Value], *, slices: bool) -> Callable[..., Any]:
    """The function that computes an array from its narrow sources."""

    def function(*arrays: Any) -> Any:
        known: dict[Array, Any] = dict(zip(sources, arrays, strict=True))

        def operands(v: Array) -> Sequence[Array]:
            e = None if v in known or isinstance(v, Constant) else graph.producer(v)
            return () if e is None else e.inputs

        for v in operands_first([x], operands):
            if isinstance(v, Constant):
                known[v] = v.value
            elif v not in known:
                e = graph.producer(v)
                assert e is not None, "what nothing produces is a source"
                inputs = [known[operand] for operand in e.inputs]
                known[v] = _broadcast(e, inputs[0], slices) if e.name == _BROADCAST else again(e, inputs)
        return known[x]

    return function


def is_only_sliced(graph: Graph, x: Value) -> bool:
    """Whether nothing but loops reads an array, and each iteration a slice of it, perhaps in a loop inside of it."""
    readers = graph.readers(x)
    return bool(readers) and x not in graph.outputs and all(_slices(graph, e, x) for e in readers)


def _slices(graph: Graph, e: Equation, x: Value) -> bool:
    """Whether an equation is a loop that reads only slices of an array."""
    if e.name != "scan":
        return False
    consts, carry = scan_counts(e.params)
    (body,) = e.blocks
    if x in e.inputs[consts : consts + carry]:
        return False
    whole = [inner for outer, inner in zip(e.inputs[:consts], body.inputs, strict=False) if outer is x]
    inside = Graph(body.equations, body.outputs, graph.writer)
    return all(is_only_sliced(inside, v) for v in whole)


def _broadcast(e: Equation, x: Any, slices: bool) -> Any:
    shape, dims = e.params["shape"], e.params["broadcast_dimensions"]
    if slices:
        shape, dims = shape[1:], [d - 1 for d in dims[1:]]
    return lax.broadcast_in_dim(x, shape, dims)


def _operands(graph: Graph, x: Value, length: int | None) -> Sequence[Value] | None:
    """The arrays from which one elementwise equation computes an array; None if none does."""
    e = graph.producer(x)
    if e is None or e.blocks or len(e.outputs) != 1 or not (traits_of(e.name).computes or _keeps_first(e, length)):
        return None
    if not traits_of(e.name).pure or any(isinstance(v, Constant) and v.shape for v in e.inputs):
        return None
    operands = [v for v in e.inputs if isinstance(v, Value)]
    if x.on_host or any(v.on_host for v in operands):
        return None
    if length is not None and any(v.shape[:1] != (length,) for v in operands):
        return None
    return operands


def _keeps_first(e: Equation, length: int | None) -> bool:
    """Whether an equation broadcasts, and keeps dimension 0 of its operand where it must."""
    if e.name != _BROADCAST or len(e.inputs) != 1:
        return False
    if not e.inputs[0].shape:  # a number
        return True
    return length is None or (e.params["broadcast_dimensions"][:1] == (0,) and e.params["shape"][0] == length)
