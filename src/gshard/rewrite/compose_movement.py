"""Composes slices, pads and concatenations to one equation, and sinks elementwise operators below them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jax import lax

from gshard.core.program import Constant, Equation, Value
from gshard.core.rule import Span
from gshard.language.traits import names_where, traits_of
from gshard.rewrite.driver import at, over
from gshard.rewrite.equation_graph import Array, Graph, Others, again, common_key
from gshard.rules.shape import index_of
from gshard.rules.slicing import concatenate_slices_p

# Describes the origin of an array's elements along one dimension by segments of other arrays.


@dataclasses.dataclass(frozen=True, slots=True)
class Window:
    """An array that is padded along one dimension, or cut by negative padding, but not yet computed."""

    source: Array | Window  # the array
    axis: int  # the dimension
    low: int  # low, high: the padding, as in ``lax.pad``
    high: int
    number: Array | None = None  # the padding value; None if the array is only cut

    @property
    def shape(self) -> tuple[int, ...]:
        whole = self.source.shape
        return (*whole[: self.axis], whole[self.axis] + self.low + self.high, *whole[self.axis + 1 :])

    def of(self, source: Array | Window) -> Window:
        """The same window of another array."""
        return dataclasses.replace(self, source=source)


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """Elements ``start`` to ``end`` of an array along a dimension; if the source is a scalar, copies of the scalar."""

    source: Array | Window
    start: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.start

    @property
    def is_number(self) -> bool:
        return not self.source.shape

    def is_all_of(self, axis: int) -> bool:
        """Whether the segment is a whole array."""
        return not self.is_number and (self.start, self.end) == (0, self.source.shape[axis])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Segment) and (self.start, self.end) == (other.start, other.end) and self.is_like(other)

    def is_like(self, other: Segment) -> bool:
        """Whether both segments have the same array or equal numbers as source."""
        if isinstance(self.source, Constant) and isinstance(other.source, Constant):
            return _bits(self.source) == _bits(other.source)
        return self.source == other.source

    def and_then(self, other: Segment) -> Segment | None:
        """The union with a following segment; None if they are not adjacent in one source."""
        if not self.is_like(other) or not (self.is_number or self.end == other.start):
            return None
        return Segment(self.source, self.start, self.end + other.length)


def _bits(number: Constant) -> tuple[str, bytes]:
    return str(number.dtype), np.asarray(number.value).tobytes()


def cut(segments: Iterable[Segment], start: int, end: int) -> list[Segment]:
    """The segments of elements ``start`` to ``end``."""
    selected: list[Segment] = []
    position = 0
    for p in segments:
        low, high = max(start - position, 0), min(end - position, p.length)
        if low < high:
            selected.append(Segment(p.source, p.start + low, p.start + high))
        position += p.length
    return selected


def tidy(segments: Iterable[Segment]) -> list[Segment]:
    """The segments without empty ones, with adjacent segments of one source joined."""
    result: list[Segment] = []
    for p in segments:
        if not p.length:
            continue
        p = Segment(p.source, 0, p.length) if p.is_number else p
        union = result[-1].and_then(p) if result else None
        if union is not None:
            result[-1] = union
        else:
            result.append(p)
    return result


def ends(segments: Iterable[Segment]) -> Iterable[int]:
    """The end position of each segment."""
    return itertools.accumulate(p.length for p in segments)


def is_zero(number: Any) -> bool:
    """Whether a value is a literal of the program whose bits are all zero."""
    return isinstance(number, Constant) and not any(np.asarray(number.value).tobytes())


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
            if number is not None:
                params: dict[str, Any] = {"padding_config": tuple((low, high, 0) for low, high in config)}
                return self._add(x, lax.pad_p, params, (source, number), source.dtype, e, out, result)
            starts = tuple(-low for low, _ in config)
            limits = tuple(n + high for n, (_, high) in zip(source.shape, config, strict=True))
            params = {"start_indices": starts, "limit_indices": limits, "strides": None}
            return self._add(x, lax.slice_p, params, (source,), source.dtype, e, out, result)
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

    def _add(self, x: Array | Window, primitive: Any, params: dict[str, Any], inputs: Sequence[Array], dtype: Any,
             e: Equation, out: list[Equation], result: Value | None) -> Value:  # fmt: skip
        self.made_now[x] = value = self.graph.add(out, e, primitive, params, inputs, x.shape, dtype, result)
        return value


# Sinks elementwise operators below a concatenation of slices of one array.

_CUTS = ("slice", "split")
_TIMES = 2  # largest ratio of computed and needed elements: rotary embeddings negate half of the elements


@at("concatenate", *names_where(lambda traits: traits.adds))
def sink_elementwise(graph: Graph, e: Equation) -> Sequence[Equation] | None:
    """Replaces ``concatenate(f(slice), slice)`` by ``where(first, f(y), y)`` with ``y = concatenate(slice, slice)``."""
    pieces = _pieces(graph, e)
    if pieces is None:
        return None
    axis, arrays = pieces
    chains: list[list[Equation]] = []
    slices: list[Array] = []
    for x in arrays:
        chain: list[Equation] = []
        while graph.is_read_once(x) and (q := graph.producer(x)) is not None and (i := _computed_of(q)) is not None:
            x = q.inputs[i]
            chain.insert(0, q)
        chains.append(chain)
        slices.append(x)
    cuts = {q.inputs[0] if (q := graph.producer(x, *_CUTS)) is not None else None for x in slices}
    if not any(chains) or None in cuts or len(cuts) > 1:
        return None
    (result,) = e.outputs
    kept = sum(len(chain) * x.shape[axis] for chain, x in zip(chains, slices, strict=True))
    if len({q.primitive for chain in chains for q in chain}) * result.shape[axis] > _TIMES * kept:
        return None
    ends = list(itertools.accumulate(x.shape[axis] for x in slices))
    numbers = [x for chain in chains for q in chain for x in q.inputs if not x.shape]

    def sunk(*operands: Any) -> Any:
        array_of = dict(zip((*slices, *numbers), operands, strict=True))
        computed: dict[Any, Any] = {(): lax.concatenate(operands[: len(slices)], axis)}
        keys: list[Any] = []  # equal for chains that compute the same
        for chain in chains:
            key: tuple[Any, ...] = ()
            for q in chain:
                equation_key = common_key(
                    q.primitive, q.params, [result if x.shape else x for x in q.inputs], q.context
                )
                value = computed[key]
                key = (*key, equation_key or id(q))
                computed.setdefault(key, again(q, [value if x.shape else array_of[x] for x in q.inputs]))
            keys.append(key)
        selected, last, position = computed[keys[-1]], keys[-1], None
        for end, key in [*zip(ends, keys, strict=True)][-2::-1]:
            if key != last:
                if position is None:
                    position = lax.broadcasted_iota(np.int32, result.shape, axis)
                selected, last = lax.select(position < np.int32(end), computed[key], selected), None
        if e.name == "concatenate":
            return selected
        # A sum with zeros converts -0.0 to 0.0.
        whole = ((0, result.shape[axis]),)
        return concatenate_slices_p.bind(selected, dimension=axis, slices=whole, added=True)

    return graph.write(sunk, (*slices, *numbers), e.outputs, e)


def _pieces(graph: Graph, e: Equation) -> tuple[int, Sequence[Array]] | None:
    """The dimension and the operands of a concatenation, or of a sum of zero-padded arrays that is a concatenation."""
    if e.name == "concatenate":
        return e.params["dimension"], e.inputs
    pads = [q for x in e.inputs if (q := graph.producer(x, "pad")) is not None and is_zero(q.inputs[1])]
    if len(pads) != 2:
        return None
    first, last = sorted(pads, key=lambda q: q.params["padding_config"])
    x, y = first.inputs[0], last.inputs[0]
    low, high = first.params["padding_config"], last.params["padding_config"]
    padded = [d for d in range(len(x.shape)) if (low[d], high[d]) != ((0, 0, 0),) * 2]
    if len(padded) != 1 or 0 in (*x.shape, *y.shape):
        return None
    (axis,) = padded
    if (tuple(low[axis]), tuple(high[axis])) != ((0, y.shape[axis], 0), (x.shape[axis], 0, 0)):
        return None
    return axis, (x, y)


def _computed_of(q: Equation) -> int | None:
    """The only operand of an elementwise equation that is an array, if the result has its shape and dtype."""
    if not traits_of(q.name).computes:
        return None
    arrays = [i for i, x in enumerate(q.inputs) if x.shape]
    alike = [i for i in arrays if (q.inputs[i].shape, q.inputs[i].dtype) == (q.outputs[0].shape, q.outputs[0].dtype)]
    return alike[0] if len(arrays) == len(alike) == 1 else None
