"""Moves the widening of a stack into the loop that reads its slices.

    scan(f, f32(q) * s)     ->     scan(lambda q, s: f(f32(q) * s), (q, s))

Each iteration gathers a slice of what the loop reads. So it gathers the narrow arrays, and widens them afterwards, and
no wide stack is in memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from gshard.core.jax_adapter import scan_counts
from gshard.core.program import Block, Equation, Value
from gshard.language.region import with_edges
from gshard.rewrite.driver import at
from gshard.rewrite.equation_graph import Array, Graph, written
from gshard.rewrite.widening import computed_from, is_only_sliced, narrow_sources


@at("scan")
def widen_slices(graph: Graph, e: Equation) -> Sequence[Equation] | None:
    """Replaces each stack that is computed from narrower stacks by these."""
    (body,) = e.blocks
    before = sum(scan_counts(e.params))
    inputs: list[Array] = list(e.inputs[:before])
    slices: list[Value] = list(body.inputs[:before])
    widenings: list[Equation] = []
    for stack, inner in zip(e.inputs[before:], body.inputs[before:], strict=True):
        sources = None
        if isinstance(stack, Value) and e.trip_count > 1 and is_only_sliced(graph, stack):
            sources = narrow_sources(graph, stack, e.trip_count)
        if sources is None:
            inputs.append(stack)
            slices.append(inner)
            continue
        narrow = [graph.writer.fresh(v.shape[1:], v.dtype) for v in sources]
        inputs += sources
        slices += narrow
        producer = graph.producer(stack)
        assert producer is not None, "what nothing produces has no narrower sources"
        function = computed_from(graph, stack, sources, slices=True)
        widenings += written(graph.writer, function, narrow, [inner], producer)
    if not widenings:
        return None
    loop = Block(tuple(slices), (*widenings, *body.equations), body.outputs)
    return [with_edges(dataclasses.replace(e, inputs=tuple(inputs), blocks=(loop,)))]
