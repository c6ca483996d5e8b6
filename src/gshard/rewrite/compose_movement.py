"""Composes slices, pads and concatenations that follow each other into one equation, so that elements move once.

Rotations (``jnp.roll``), borders (``jnp.pad``, also ``mode="wrap"``), shifts and stencils are cuts that are joined, and
joins that are cut again. One by one, each result would be spread evenly over the devices: an array that is longer by
one element has other parts, and nearly all elements would move. So each result is followed to the sources of its
elements, one dimension after the other:

    pad(x[:-1], (1, 0))                       a number, x[0:7]           pad by 1 and -1
    concatenate([x[-1:], x, x[:1]])[2:]       x[1:8], x[0:1]             concatenate_slices
    concatenate([first, x])[1:]               x[0:8]                     a slice of everything
    pad(a, (0, 3)) + pad(b, (5, 0))           a, b (in derivatives)      concatenate_slices

A value with many segments and other readers is computed anyway, and not followed further.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from gshard.core.program import Constant, Equation, Value
from gshard.core.rule import Span
from gshard.language.traits import names_where, traits_of
from gshard.rewrite.driver import over
from gshard.rewrite.element_source import Segment, Window, cut, ends, is_zero, tidy
from gshard.rewrite.equation_graph import Array, Graph, Others
from gshard.rules.concatenate_slices import concatenate_slices_p
from gshard.rules.movement import index_of

_MOST, _FEW = 32, 3  # segments that a result is followed to; the same where the result is computed anyway


@over(*names_where(lambda traits: traits.moves))
def compose_movement(graph: Graph) -> Others:
    """Equations that move elements which others moved before become one each."""
    movement = _Movement(graph)
    tried = ((e, movement.instead_of(e)) for e in graph.equations)
    return {e: new for e, new in tried if new is not None}


class _Movement:
    """The sources of the elements of a block's values."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.producers: dict[Any, Equation] = {}
        self.numbers: dict[Any, Array] = {}  # scalars, and arrays of copies of one
        self.result: Value | None = None  # what is being made
        self.needed: set[Any] = set(graph.outputs)  # values that are computed anyway
        for e in graph.equations:
            if (number := self._number(e)) is not None:
                self.numbers[e.outputs[0]] = number
            if self._is_followed(e):
                self.producers.update(dict.fromkeys(e.outputs, e))
            else:
                self.needed.update(e.inputs)
        self.segments: dict[tuple[Any, int, bool], list[Segment]] = {}
        self.made: dict[Any, Array] = {}  # values of windows, and those of windows of one equation
        self.made_now: dict[Any, Array] = {}

    def instead_of(self, e: Equation) -> list[Equation] | None:
        """The equations that replace one; None if it stays."""
        if not e.outputs:
            return None
        result = e.outputs[0]
        if result not in self.producers or result in self.numbers or not any(x in self.producers for x in e.inputs):
            return None
        if any(0 in v.shape for v in e.outputs):
            return None
        if e.name == "split" and not self._comes_from_elsewhere(e.inputs[0]):
            return None
        found = self._instead_of(e)
        if found is not None:
            self.made.update((x, v) for x, v in self.made_now.items() if v not in e.outputs)
        self.made_now.clear()
        return found

    def _instead_of(self, e: Equation) -> list[Equation] | None:
        found: list[Equation] = []
        for v in e.outputs:
            self.result = v
            if traits_of(e.name).adds:
                if (side_by_side := self._addends(v)) is not None:
                    self._join(v, *side_by_side, e, found, result=v, added=True)
            else:
                self._make(v, v, e, found)
            if not found or v not in found[-1].outputs:
                return None
        # What is there already stays: new copies of it would be composed again, without an end.
        new = {q.outputs[0]: q for q in found}
        return None if all(self._is_there(v, v, new) for v in e.outputs) else found

    def _is_there(self, x: Array, y: Array, new: dict[Any, Equation]) -> bool:
        """Whether an array of this block is what new equations compute as another one."""
        if y not in new:
            return Segment(x, 0, 0).is_like(Segment(y, 0, 0))
        p, q = self.producers.get(x), new[y]
        return (
            p is not None
            and (p.name, len(p.inputs)) == (q.name, len(q.inputs))
            and (x is y or p.params == q.params)  # of what is replaced they say the same, in other words
            and all(self._is_there(own, other, new) for own, other in zip(p.inputs, q.inputs, strict=True))
        )

    def _is_followed(self, e: Equation) -> bool:
        if traits_of(e.name).adds:
            makers = [self.producers.get(x) for x in e.inputs]
            return all(p is not None and (p.name == "pad" or traits_of(p.name).adds) for p in makers)
        if (index := index_of(e)) is not None and e.primitive is not concatenate_slices_p:
            return all(span.step == 1 for own in index for spans in own for span in spans)
        return bool(e.outputs) and e.outputs[0] in self.numbers

    def _number(self, e: Equation) -> Array | None:
        """The number that all results of an equation are copies of, if there is one."""
        if e.name not in ("broadcast_in_dim", "convert_element_type"):
            return None
        number = self.numbers.get(e.inputs[0], e.inputs[0])
        if e.name == "broadcast_in_dim":
            return number if not number.shape else None
        if isinstance(number, Constant) and not number.shape:
            return Constant(np.asarray(number.value).astype(e.outputs[0].dtype))
        return None

    def _comes_from_elsewhere(self, x: Array) -> bool:
        return any(self.along(x, d) != [Segment(x, 0, n)] for d, n in enumerate(x.shape))

    # Where elements come from.

    def along(self, x: Array | Window, axis: int) -> list[Segment]:
        """The segments that make up an array along a dimension; the array itself if nothing is known."""
        key = (x, axis, x is self.result)
        if key not in self.segments:
            itself = [Segment(x, 0, x.shape[axis])]
            found = tidy(self._windowed(x, axis) if isinstance(x, Window) else self._made_of(x, axis) or itself)
            goes = isinstance(x, Window) or x not in self.needed or x is self.result
            self.segments[key] = found if len(found) <= (_MOST if goes else _FEW) else itself
        return self.segments[key]

    def _windowed(self, x: Window, axis: int) -> list[Segment]:
        inner = self.along(x.source, axis)
        if x.axis != axis:
            number = x.number
            if number is not None and any(p.is_number and not Segment(number, 0, 1).is_like(p) for p in inner):
                return [Segment(x, 0, x.shape[axis])]
            return [p if p.is_number else dataclasses.replace(p, source=x.of(p.source)) for p in inner]
        low, high = max(x.low, 0), max(x.high, 0)
        kept = cut(inner, max(-x.low, 0), x.source.shape[axis] - max(-x.high, 0))
        if x.number is None:
            return kept
        return [Segment(x.number, 0, low), *kept, Segment(x.number, 0, high)]

    def _made_of(self, x: Array, axis: int) -> list[Segment] | None:
        e = self.producers.get(x)
        if x in self.numbers:
            return [Segment(self.numbers[x], 0, x.shape[axis])]
        index = None if e is None else index_of(e)
        if e is None or index is None:
            return None
        own = index[e.outputs.index(x)]  # type: ignore[arg-type]
        moved = [d for d, spans in enumerate(own) if spans]
        if moved == [axis]:
            return [p for span in own[axis] for p in self._spanned(self._scalar(e.inputs[span.operand]), axis, span)]
        if any(sum(bool(e.inputs[span.operand].shape) for span in own[d]) != 1 for d in moved):
            return None
        source, number = e.inputs[0], self._scalar(e.inputs[-1])
        if len(moved) > 1 and not number.shape:
            around = (p for d in moved for p in self.along(source, d) if p.is_number)
            if not all(p.is_like(Segment(number, 0, 1)) for p in around):
                return None  # the corners of what is padded along several dimensions differ
        window: Array | Window = source
        for d in moved:
            (at,) = (i for i, span in enumerate(own[d]) if e.inputs[span.operand].shape)
            span, before, after = own[d][at], own[d][:at], own[d][at + 1 :]
            low = sum(p.count for p in before) - span.start
            high = sum(p.count for p in after) - (source.shape[d] - span.start - span.count)
            window = Window(window, d, low, high, number if max(low, high) > 0 else None)
        return self.along(window, axis)

    def _scalar(self, x: Array) -> Array:
        """The number that an array consists of copies of; itself if there is none."""
        return self.numbers.get(x, x)

    def _spanned(self, x: Array, axis: int, span: Span) -> list[Segment]:
        """The segments of a span of an operand."""
        if not x.shape:
            return [Segment(x, 0, span.count)]
        return cut(self.along(x, axis), span.start, span.start + span.count)

    def _addends(self, result: Value) -> tuple[int, list[Segment]] | None:
        """Along which dimension a sum is of arrays side by side, zeros in the place of the others; the arrays."""
        for axis in range(len(result.shape)):
            segments = self._side_by_side(result, axis)
            if segments is not None and any(not p.is_number for p in segments) and len(segments) <= _MOST:
                return axis, segments
        return None

    def _side_by_side(self, x: Array, axis: int) -> list[Segment] | None:
        e = self.producers.get(x)
        if e is None or not traits_of(e.name).adds:
            return self.along(x, axis)
        one, other = (self._side_by_side(y, axis) for y in e.inputs)
        if one is None or other is None:
            return None
        found = []
        for start, end in itertools.pairwise((0, *sorted({*ends(one), *ends(other)}))):
            pair = [*cut(one, start, end), *cut(other, start, end)]
            there = [p for p in pair if not p.is_number]
            if len(there) > 1 or any(p.is_number and not is_zero(p.source) for p in pair):
                return None
            found += there or pair[:1]
        return tidy(found)

    # What is made of them.

    def _make(self, x: Array | Window, result: Value | None, e: Equation, out: list[Equation]) -> Array | None:
        """An array that consists of segments, as ``result`` or as a new value; None if it cannot be one."""
        if result is None and x in self.needed:
            return x if isinstance(x, Value) else None
        if result is None and (made := self.made.get(x, self.made_now.get(x))) is not None:
            return made
        window = self._as_window(x)
        if window is not None:
            source, config, number = window
            if result is None and all(c == (0, 0) for c in config):
                return source
            return self._moved(x, source, config, number, e, out, result)
        ways = [(axis, self.along(x, axis)) for axis in range(len(x.shape))]
        ways = [(axis, segments) for axis, segments in ways if segments[0].source != x]
        if any(all(p.is_number for p in segments) for _, segments in ways):
            return None
        if not ways:
            return x if isinstance(x, Value) and result is None else None
        # A mere cut comes last: what is cut may be joined along another dimension.
        axis, segments = min(ways, key=lambda way: len(way[1]) == 1 and not way[1][0].is_all_of(way[0]))
        if len(segments) == 1 and segments[0].is_all_of(axis):
            return self._make(segments[0].source, result, e, out)
        return self._join(x, axis, segments, e, out, result=result)

    def _join(self, x: Array | Window, axis: int, segments: Sequence[Segment], e: Equation, out: list[Equation], *,
              result: Value | None = None, added: bool = False) -> Array | None:  # fmt: skip
        sources = [p.source if p.is_number else self._make(p.source, None, e, out) for p in segments]
        if any(s is None for s in sources):
            return None
        given = tuple(s for s in sources if isinstance(s, Value | Constant))
        array = next(s for s in given if s.shape)
        if not added and all(p.is_all_of(axis) for p in segments):
            return self._add(x, lax.concatenate_p, {"dimension": axis}, given, array.dtype, e, out, result)
        cuts = tuple((p.start, p.end) for p in segments)
        params = {"dimension": axis, "slices": cuts, "added": added}
        return self._add(x, concatenate_slices_p, params, given, array.dtype, e, out, result)

    def _as_window(self, x: Array | Window) -> tuple[Value, list[tuple[int, int]], Any] | None:
        """An array as what ``lax.pad`` can make of another one, if it can."""
        shape, number, source = x.shape, None, x
        config = [(0, 0)] * len(shape)
        while not isinstance(source, Value) or self._comes_from_elsewhere(source):
            before = source
            for axis in range(len(shape)):
                segments = self.along(source, axis)
                numbers, arrays = [p for p in segments if p.is_number], [p for p in segments if not p.is_number]
                number = number or next(iter(numbers), None)
                if len(arrays) != 1 or not all(p.is_like(number) for p in numbers if number is not None):
                    return None
                (array,) = arrays
                at, (low, high) = segments.index(array), config[axis]
                cut_low, cut_high = array.start, array.source.shape[axis] - array.end
                low += sum(p.length for p in segments[:at]) - cut_low
                high += sum(p.length for p in segments[at + 1 :]) - cut_high
                if (cut_low and low > -cut_low) or (cut_high and high > -cut_high):
                    return None
                config[axis], source = (low, high), array.source
            if source == before:
                return None
        return None if source is x else (source, config, None if number is None else number.source)

    def _moved(self, x: Array | Window, source: Value, config: Sequence[tuple[int, int]], number: Array | None,
               e: Equation, out: list[Equation], result: Value | None) -> Value:  # fmt: skip
        if number is not None:
            params: dict[str, Any] = {"padding_config": tuple((low, high, 0) for low, high in config)}
            return self._add(x, lax.pad_p, params, (source, number), source.dtype, e, out, result)
        starts = tuple(-low for low, _ in config)
        limits = tuple(n + high for n, (_, high) in zip(source.shape, config, strict=True))
        params = {"start_indices": starts, "limit_indices": limits, "strides": None}
        return self._add(x, lax.slice_p, params, (source,), source.dtype, e, out, result)

    def _add(self, x: Array | Window, primitive: Any, params: dict[str, Any], inputs: Sequence[Array], dtype: Any,
             e: Equation, out: list[Equation], result: Value | None) -> Value:  # fmt: skip
        self.made_now[x] = value = self.graph.add(out, e, primitive, params, inputs, x.shape, dtype, result)
        return value
