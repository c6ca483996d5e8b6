"""Moves the widening of a stack into the loop that reads its slices.

    scan(f, f32(q) * s)     ->     scan(lambda q, s: f(f32(q) * s), (q, s))

Each iteration gathers a slice of what the loop reads. So it gathers the narrow arrays, and widens them afterwards, and
no wide stack is in memory. A stack of an inner loop that an outer loop only passes on moves into both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from gshard.core.context import Context
from gshard.core.jax_adapter import scan_counts
from gshard.core.program import Block, Equation, Value
from gshard.language.region import with_edges
from gshard.rewrite.driver import at, run
from gshard.rewrite.equation_graph import Array, Graph, written
from gshard.rewrite.segments import in_segments
from gshard.rewrite.widening import computed_from, is_only_sliced, narrow_sources


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
    return [with_edges(dataclasses.replace(e, params=params, inputs=inputs, blocks=(loop,)))]
