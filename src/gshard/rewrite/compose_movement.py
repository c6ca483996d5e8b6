"""Composes sequences of slices, pads and concatenations to one equation, so that elements move once.

Rotations (``jnp.roll``), borders (``jnp.pad``, also ``mode="wrap"``), shifts and stencils concatenate slices, and slice
concatenations. Executed one by one, each intermediate array would be split evenly over the devices. An array that is
longer by one element has other parts, so nearly all elements would move. This rewrite follows each result to the
sources of its elements, one dimension after the other:

    pad(x[:-1], (1, 0))                       a number, x[0:7]           pad by 1 and -1
    concatenate([x[-1:], x, x[:1]])[2:]       x[1:8], x[0:1]             concatenate_slices
    concatenate([first, x])[1:]               x[0:8]                     a slice of everything
    pad(a, (0, 3)) + pad(b, (5, 0))           a, b (in derivatives)      concatenate_slices

It does not follow a value with many segments that other equations read, because that value is computed anyway.
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

_MOST = 32  # largest number of segments of a result
_FEW = 3  # largest number of segments of a value that is computed anyway


@over(*names_where(lambda traits: traits.moves))
def compose_movement(graph: Graph) -> Others:
    """Replaces equations that move elements which other equations have moved before."""
    movement = _Movement(graph)
    replacements = ((e, movement.instead_of(e)) for e in graph.equations)
    return {e: new for e, new in replacements if new is not None}


class _Movement:
    """The sources of the elements of a block's values."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.producers: dict[Any, Equation] = {}
        self.numbers: dict[Any, Array] = {}  # the scalar of each array that consists of copies of a scalar
        self.result: Value | None = None  # the result that is being replaced
        self.needed: set[Any] = set(graph.outputs)  # values that are computed anyway
        for e in graph.equations:
            if (number := self._number(e)) is not None:
                self.numbers[e.outputs[0]] = number
            if self._is_followed(e):
                self.producers.update(dict.fromkeys(e.outputs, e))
            else:
                self.needed.update(e.inputs)
        self.segments: dict[tuple[Any, int, bool], list[Segment]] = {}
        self.sums: dict[tuple[Any, int], list[Segment] | None] = {}
        self.made: dict[Any, Array] = {}  # the new value of each array or window, from earlier equations
        self.made_now: dict[Any, Array] = {}  # the same, from the equation that is being replaced

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
        replacement = self._instead_of(e)
        if replacement is not None:
            self.made.update((x, v) for x, v in self.made_now.items() if v not in e.outputs)
        self.made_now.clear()
        return replacement

    def _instead_of(self, e: Equation) -> list[Equation] | None:
        equations: list[Equation] = []
        for v in e.outputs:
            self.result = v
            if traits_of(e.name).adds:
                addends = self._addends(v)
                if addends is not None:
                    self._join(v, *addends, e, equations, result=v, added=True)
            else:
                self._make(v, v, e, equations)
            if not equations or v not in equations[-1].outputs:
                return None
        # Keep equations that would be replaced by equal ones. Otherwise the rewrite would fire again and again.
        new = {q.outputs[0]: q for q in equations}
        return None if all(self._exists(v, v, new) for v in e.outputs) else equations

    def _exists(self, x: Array, y: Array, new: dict[Any, Equation]) -> bool:
        """Whether the equations of the block already compute ``x`` in the way in which new equations compute ``y``."""
        if y not in new:
            return Segment(x, 0, 0).is_like(Segment(y, 0, 0))
        p, q = self.producers.get(x), new[y]
        return (
            p is not None
            and (p.name, len(p.inputs)) == (q.name, len(q.inputs))
            and (x is y or p.params == q.params)  # parameters of the replaced equation may be equivalent but different
            and all(self._exists(p_input, q_input, new) for p_input, q_input in zip(p.inputs, q.inputs, strict=True))
        )

    def _is_followed(self, e: Equation) -> bool:
        if traits_of(e.name).adds:
            producers = [self.producers.get(x) for x in e.inputs]
            return all(p is not None and (p.name == "pad" or traits_of(p.name).adds) for p in producers)
        index = index_of(e)
        if index is not None and e.primitive is not concatenate_slices_p:
            return all(span.step == 1 for spans_of_result in index for spans in spans_of_result for span in spans)
        return bool(e.outputs) and e.outputs[0] in self.numbers

    def _number(self, e: Equation) -> Array | None:
        """The scalar that fills the result of an equation; None if there is none."""
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

    # Segments of arrays.

    def along(self, x: Array | Window, axis: int) -> list[Segment]:
        """The segments of an array along a dimension; one segment of the array itself if its sources are unknown."""
        key = (x, axis, x is self.result)
        if key not in self.segments:
            itself = [Segment(x, 0, x.shape[axis])]
            if isinstance(x, Window):
                segments = tidy(self._segments_of_window(x, axis))
            else:
                segments = tidy(self._segments_of(x, axis) or itself)
            is_not_computed = isinstance(x, Window) or x not in self.needed or x is self.result
            self.segments[key] = segments if len(segments) <= (_MOST if is_not_computed else _FEW) else itself
        return self.segments[key]

    def _segments_of_window(self, x: Window, axis: int) -> list[Segment]:
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

    def _segments_of(self, x: Array, axis: int) -> list[Segment] | None:
        e = self.producers.get(x)
        if x in self.numbers:
            return [Segment(self.numbers[x], 0, x.shape[axis])]
        index = None if e is None else index_of(e)
        if e is None or index is None:
            return None
        spans_of = index[e.outputs.index(x)]  # type: ignore[arg-type]
        moved = [d for d, spans in enumerate(spans_of) if spans]
        if moved == [axis]:
            segments: list[Segment] = []
            for span in spans_of[axis]:
                segments += self._segments_of_span(self._scalar(e.inputs[span.operand]), axis, span)
            return segments
        if any(sum(bool(e.inputs[span.operand].shape) for span in spans_of[d]) != 1 for d in moved):
            return None
        source, number = e.inputs[0], self._scalar(e.inputs[-1])
        if len(moved) > 1 and not number.shape:
            padding = (p for d in moved for p in self.along(source, d) if p.is_number)
            if not all(p.is_like(Segment(number, 0, 1)) for p in padding):
                return None  # the corners of an array that is padded along several dimensions would differ
        window: Array | Window = source
        for d in moved:
            (position,) = (i for i, span in enumerate(spans_of[d]) if e.inputs[span.operand].shape)
            span, before, after = spans_of[d][position], spans_of[d][:position], spans_of[d][position + 1 :]
            low = sum(p.count for p in before) - span.start
            high = sum(p.count for p in after) - (source.shape[d] - span.start - span.count)
            window = Window(window, d, low, high, number if max(low, high) > 0 else None)
        return self.along(window, axis)

    def _scalar(self, x: Array) -> Array:
        """The scalar that fills an array; the array itself if there is none."""
        return self.numbers.get(x, x)

    def _segments_of_span(self, x: Array, axis: int, span: Span) -> list[Segment]:
        """The segments of a span of an operand."""
        if not x.shape:
            return [Segment(x, 0, span.count)]
        return cut(self.along(x, axis), span.start, span.start + span.count)

    def _addends(self, result: Value) -> tuple[int, list[Segment]] | None:
        """The dimension and the segments of a sum of zero-padded arrays whose nonzero parts do not overlap, if any."""
        found = [(axis, self._side_by_side(result, axis)) for axis in range(len(result.shape))]  # later sums read all
        known = ((axis, segments) for axis, segments in found if segments is not None)
        return next(((axis, segments) for axis, segments in known if any(not p.is_number for p in segments)), None)

    def _side_by_side(self, x: Array, axis: int) -> list[Segment] | None:
        if (x, axis) not in self.sums:
            self.sums[x, axis] = self._sum(x, axis)
        return self.sums[x, axis]

    def _sum(self, x: Array, axis: int) -> list[Segment] | None:
        e = self.producers.get(x)
        if e is None or not traits_of(e.name).adds:
            return self.along(x, axis)
        segments_a, segments_b = (self._side_by_side(y, axis) for y in e.inputs)
        if segments_a is None or segments_b is None:
            return None
        joined = []
        for start, end in itertools.pairwise((0, *sorted({*ends(segments_a), *ends(segments_b)}))):
            pair = [*cut(segments_a, start, end), *cut(segments_b, start, end)]
            arrays = [p for p in pair if not p.is_number]
            if len(arrays) > 1 or any(p.is_number and not is_zero(p.source) for p in pair):
                return None
            joined += arrays or pair[:1]
        segments = tidy(joined)
        return segments if len(segments) <= _MOST else None

    # New equations.

    def _make(self, x: Array | Window, result: Value | None, e: Equation, out: list[Equation]) -> Array | None:
        """Appends equations that compute an array from its segments; None if that is not possible."""
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
        along = [(axis, self.along(x, axis)) for axis in range(len(x.shape))]
        along = [(axis, segments) for axis, segments in along if segments[0].source != x]
        if any(all(p.is_number for p in segments) for _, segments in along):
            return None
        if not along:
            return x if isinstance(x, Value) and result is None else None
        # Prefer other dimensions to a slice: the sliced array may be a concatenation along another dimension.
        axis, segments = min(along, key=lambda pair: len(pair[1]) == 1 and not pair[1][0].is_all_of(pair[0]))
        if len(segments) == 1 and segments[0].is_all_of(axis):
            return self._make(segments[0].source, result, e, out)
        return self._join(x, axis, segments, e, out, result=result)

    def _join(self, x: Array | Window, axis: int, segments: Sequence[Segment], e: Equation, out: list[Equation], *,
              result: Value | None = None, added: bool = False) -> Array | None:  # fmt: skip
        sources = [p.source if p.is_number else self._make(p.source, None, e, out) for p in segments]
        if any(s is None for s in sources):
            return None
        operands = tuple(s for s in sources if isinstance(s, Value | Constant))
        array = next(s for s in operands if s.shape)
        if not added and all(p.is_all_of(axis) for p in segments):
            return self._add(x, lax.concatenate_p, {"dimension": axis}, operands, array.dtype, e, out, result)
        if added and len(segments) == 1 and segments[0].is_all_of(axis):
            zero = Constant(np.zeros((), array.dtype))  # a sum with zeros, in which the sign of a zero may change
            return self._add(x, lax.add_p, {}, (array, zero), array.dtype, e, out, result)
        slices = tuple((p.start, p.end) for p in segments)
        params = {"dimension": axis, "slices": slices, "added": added}
        return self._add(x, concatenate_slices_p, params, operands, array.dtype, e, out, result)

    def _as_window(self, x: Array | Window) -> tuple[Value, list[tuple[int, int]], Any] | None:
        """An array as the result of one ``lax.pad``: its operand, low and high padding, and number; or None."""
        shape, number, source = x.shape, None, x
        config = [(0, 0)] * len(shape)
        while not isinstance(source, Value) or self._comes_from_elsewhere(source):
            before = source
            for axis in range(len(shape)):
                segments = self.along(source, axis)
                numbers = [p for p in segments if p.is_number]
                arrays = [p for p in segments if not p.is_number]
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
