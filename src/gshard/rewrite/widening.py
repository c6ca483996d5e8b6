"""Keeps arrays narrow until their elements are needed wide: in stacks of loops, in slices, and after ``send=``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from gshard.core.jax_adapter import scan_counts
from gshard.core.program import Block, Constant, Context, Equation, Value
from gshard.language.mark_primitive import mark_p
from gshard.language.region import with_edges
from gshard.language.traits import traits_of
from gshard.rewrite.driver import at, over, run
from gshard.rewrite.equation_graph import Array, Graph, Others, again, operands_first, written

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


# Stacks narrow arrays instead of the wide one that a later loop computes from them.


@at("scan")
def stack_narrow(graph: Graph, e: Equation) -> Sequence[Equation] | None:
    """Replaces each stack that only loops read by the narrower stacks from which it is computed."""
    (body,) = e.blocks
    consts, carry = scan_counts(e.params)
    inside = Graph(body.equations, body.outputs, graph.writer)
    stack_of = dict(zip(body.inputs[consts + carry :], e.inputs[consts + carry :], strict=True))
    results: list[Value] = list(e.outputs[:carry])
    ends: list[Array] = list(body.outputs[:carry])
    widenings: list[Equation] = []
    for stack, end in zip(e.outputs[carry:], body.outputs[carry:], strict=True):
        sources = None
        if isinstance(end, Value) and e.trip_count > 1 and is_only_sliced(graph, stack):
            sources = narrow_sources(inside, end)
        if sources is None:
            results.append(stack)
            ends.append(end)
            continue
        narrow: list[Array] = []
        for v in sources:
            if v in stack_of:  # a slice of a stack that the loop reads
                narrow.append(stack_of[v])
                continue
            narrow.append(result := graph.writer.fresh((e.trip_count, *v.shape), v.dtype, v.weak))
            results.append(result)
            ends.append(v)
        assert isinstance(end, Value)
        function = jax.vmap(computed_from(inside, end, sources, slices=False))
        widenings += written(graph.writer, function, narrow, [stack], e)
    if not widenings:
        return None
    loop = Block(body.inputs, body.equations, tuple(ends))
    return [with_edges(e, outputs=tuple(results), blocks=(loop,)), *widenings]


# Widens an array that a mark with ``send`` rounds just before the first equation that reads it.


@over(mark_p.name)
def widen_late(graph: Graph) -> Others:
    """Moves the equations that widen a marked array to the first equation that reads the result."""
    position = {e: i for i, e in enumerate(graph.equations)}
    chains: dict[Equation, list[list[Equation]]] = {}  # by the first equation that reads the result
    for e in graph.equations:
        chain = _widening(graph, e.outputs[0]) if e.mark is not None and e.mark.send else []
        readers = graph.readers(chain[-1].outputs[0]) if chain else ()
        if readers:
            chains.setdefault(min(readers, key=position.__getitem__), []).append(chain)
    others: dict[Equation, Sequence[Equation]] = {}
    for reader, widenings in chains.items():
        moved = [e for chain in widenings for e in chain]
        if position[reader] - min(map(position.__getitem__, moved)) != len(moved):
            others |= dict.fromkeys(moved, ())
            others[reader] = (*moved, reader)
    return others


def _widening(graph: Graph, x: Value) -> list[Equation]:
    """The elementwise equations that make one wide array of a narrow one and of smaller ones (scales)."""
    chain: list[Equation] = []
    while graph.is_read_once(x):
        (e,) = graph.readers(x)
        of_its_shape = [v for v in e.inputs if v.shape == x.shape]
        if (
            e.mark is not None
            or e.blocks
            or not traits_of(e.name).computes
            or of_its_shape != [x]
            or len(e.outputs) > 1
        ):
            break
        chain.append(e)
        (x,) = e.outputs
    return chain


# Divides a block into segments: maximal runs of equations with the same context.

Rewrite = Callable[[Context, Sequence[Equation], Sequence[Any]], Sequence[Equation]]


def in_segments(equations: Sequence[Equation], outputs: Sequence[Any], rewrite: Rewrite) -> list[Equation]:
    """Rewrites each segment of a block separately."""
    segments = [(context, list(part)) for context, part in itertools.groupby(equations, lambda e: e.context)]
    read = set(outputs)
    rewritten = list[list[Equation]]()
    for context, part in reversed(segments):
        results = outputs if len(segments) == 1 else [v for e in part for v in e.outputs if v in read]
        read.update(v for e in part for v in e.inputs)
        rewritten.append(list(rewrite(context, part, results)))
    return [e for part in reversed(rewritten) for e in part]


# Moves the widening of a stack into the loop that reads its slices.


@at("scan")
def widen_slices(graph: Graph, e: Equation) -> Sequence[Equation] | None:
    """Replaces each stack that is computed from narrower stacks by these."""
    (body,) = e.blocks
    consts, carry = scan_counts(e.params)
    # For constants, the carry, and stacks: the operands, and the inputs of the body.
    operands: tuple[list[Array], ...] = ([], [], [])
    inner_operands: tuple[list[Value], ...] = ([], [], [])
    widenings: dict[Value, list[Equation]] = {}
    for i, (x, inner) in enumerate(zip(e.inputs, body.inputs, strict=True)):
        kind = (i >= consts) + (i >= consts + carry)
        sources = None
        if kind != 1 and e.trip_count > 1 and isinstance(x, Value) and x.shape and is_only_sliced(graph, x):
            sources = narrow_sources(graph, x, x.shape[0])
        if sources is None:
            operands[kind].append(x)
            inner_operands[kind].append(inner)
            continue
        assert isinstance(x, Value)
        is_stack = kind == 2
        narrow = [graph.writer.fresh(v.shape[is_stack:], v.dtype, v.weak) for v in sources]
        operands[kind].extend(sources)
        inner_operands[kind].extend(narrow)
        producer = graph.producer(x)
        assert producer is not None, "what nothing produces has no narrower sources"
        function = computed_from(graph, x, sources, slices=is_stack)
        widenings[inner] = written(graph.writer, function, narrow, [inner], producer)
    if not widenings:
        return None

    def widened_inside(context: Context, equations: Sequence[Equation], outputs: Sequence[Any]) -> Sequence[Equation]:
        return run((widen_slices,), equations, outputs, graph.writer)[0]

    late: list[Equation] = []  # each slice is gathered where it is widened, so not before it is read
    for q in body.equations:
        for v in q.inputs:
            if isinstance(v, Value):
                late += widenings.pop(v, ())
        late.append(q)
    late += [q for widening in widenings.values() for q in widening]
    equations = in_segments(late, body.outputs, widened_inside)
    loop = Block(tuple(v for group in inner_operands for v in group), tuple(equations), body.outputs)
    inputs = tuple(x for group in operands for x in group)
    params = {**e.params, "num_consts": len(operands[0]), "num_carry": carry}
    return [with_edges(e, params=params, inputs=inputs, blocks=(loop,))]
