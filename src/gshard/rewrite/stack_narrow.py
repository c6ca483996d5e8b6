"""Stacks narrow arrays instead of the wide one that a later loop computes from them.

    ys = scan(x -> f32(q(x)) * s(x))[1]     ->     qs, ss = scan(x -> (q(x), s(x)))[1]; ys = f32(qs) * ss

The residuals of a loop's gradient have this form: the forward loop stacks them, and the backward loop reads the stack.
The numbers are the same, the stack takes fewer bytes, and ``widen_slices`` moves the widening into the backward loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

from gshard.core.jax_adapter import scan_counts
from gshard.core.program import Block, Equation, Value
from gshard.language.region import with_edges
from gshard.rewrite.driver import at
from gshard.rewrite.equation_graph import Array, Graph, written
from gshard.rewrite.widening import computed_from, is_only_sliced, narrow_sources


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
    return [with_edges(dataclasses.replace(e, outputs=tuple(results), blocks=(loop,))), *widenings]
