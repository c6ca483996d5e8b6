"""Composes slices, pads and concatenations to one equation."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jax import lax

from gshard.core.program import Constant, Equation, Value
from gshard.language.traits import names_where, traits_of
from gshard.rewrite.driver import over
from gshard.rewrite.equation_graph import Array, Graph, Others, literal_key
from gshard.rules.shape import index_of
from gshard.rules.slicing import concatenate_slices_p

# Describes where the elements of an array come from: a view of other arrays.


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """Elements ``start`` to ``end`` of an array along a dimension; if the source is a scalar, copies of the scalar."""

    source: Array
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

    def is_like(self, other: Segment) -> bool:
        """Whether both segments have the same array or equal numbers as source."""
        if isinstance(self.source, Constant) and isinstance(other.source, Constant):
            return bool(literal_key(self.source) == literal_key(other.source))
        return self.source == other.source

    def and_then(self, other: Segment) -> Segment | None:
        """The union with a following segment; None if they are not adjacent in one source."""
        if not self.is_like(other) or not (self.is_number or self.end == other.start):
            return None
        return Segment(self.source, self.start, self.end + other.length)


Segments = tuple[Segment, ...]


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


def tidy(segments: Iterable[Segment]) -> Segments:
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
    return tuple(result)


def is_zero(number: Any) -> bool:
    """Whether a value is a literal of the program whose bits are all zero."""
    return isinstance(number, Constant) and not any(np.asarray(number.value).tobytes())


@dataclasses.dataclass(frozen=True, slots=True)
class View:
    """An array whose elements are those of other arrays, in order, and numbers.

    Only a view that moves along one dimension has several arrays. Numbers along several dimensions are the same number,
    so the order of the dimensions does not matter.
    """

    array: Array  # its array, or one of them
    dims: tuple[Segments, ...]  # the segments along each dimension; () for the whole array

    @staticmethod
    def of(array: Array, dims: Iterable[Iterable[Segment]]) -> View | None:
        """A view, with its segments in their shortest form; None if it is no view."""
        tidied = [tidy(segments) for segments in dims]
        array = next((p.source for segments in tidied for p in segments if not p.is_number), array)
        for d, segments in enumerate(tidied):
            if len(segments) == 1 and segments[0].is_all_of(d):
                tidied[d] = ()
        numbers = [[p for p in segments if p.is_number] for segments in tidied]
        every = [*itertools.chain(*numbers)]
        if sum(map(bool, numbers)) > 1 and not all(p.is_like(every[0]) for p in every):
            return None  # corners would differ
        return View(array, tuple(tidied)) if max(map(len, tidied), default=0) <= _MOST else None

    @property
    def moved(self) -> list[int]:
        """The dimensions along which elements move."""
        return [d for d, segments in enumerate(self.dims) if segments]

    @property
    def arrays(self) -> set[Array]:
        """Its arrays."""
        return {self.array, *(p.source for segments in self.dims for p in segments if not p.is_number)}

    def along(self, axis: int) -> Segments:
        """The segments along a dimension."""
        return self.dims[axis] or (Segment(self.array, 0, self.array.shape[axis]),)

    def of_views(self, views: Mapping[Array, View]) -> View | None:
        """The same array as a view of the arrays of ``views``; None if none of these fits."""
        moved, arrays = {*self.moved}, self.arrays
        inner = {x: views[x] for x in arrays if x in views}
        if len(arrays) > 1:
            others = [(view.arrays, [s for d, s in enumerate(view.dims) if d not in moved]) for view in inner.values()]
            are_of_one = len(inner) == len(arrays) and len(others[0][0]) == 1 and all(o == others[0] for o in others)
            inner = inner if are_of_one else {x: view for x, view in inner.items() if {*view.moved} <= moved}
        elif any(len(view.arrays) > 1 and not moved <= {*view.moved} for view in inner.values()):
            return None
        if not inner:
            return None

        def segments(axis: int) -> Iterator[Segment]:
            for p in self.along(axis):
                yield from cut(inner[p.source].along(axis), p.start, p.end) if p.source in inner else [p]

        axes = moved.union(*(view.moved for view in inner.values()))
        array = next(iter(inner.values())).array
        return View.of(array, [segments(d) if d in axes else () for d in range(len(self.dims))])

    def padding(self, axis: int) -> tuple[int, int] | None:
        """The low and high padding of ``lax.pad`` along a dimension; None if the segments are not one window."""
        segments = self.along(axis)
        arrays, numbers = ([p for p in segments if p.is_number is is_number] for is_number in (False, True))
        if len(arrays) != 1 or not all(p.is_like(numbers[0]) for p in numbers):
            return None
        (array,) = arrays
        at, rest = segments.index(array), self.array.shape[axis] - array.end
        low, high = (sum(p.length for p in padded) for padded in (segments[:at], segments[at + 1 :]))
        if (low and array.start) or (high and rest):
            return None
        return low - array.start, high - rest


_MOST = 32  # largest number of segments of a result
_FEW = 3  # largest number of segments of a value that is computed anyway


@over(*names_where(lambda traits: traits.moves))
def compose_movement(graph: Graph) -> Others:
    """Replaces equations that move elements which other equations have moved before."""
    movement = _Movement(graph)
    replacements = ((e, movement.instead_of(e)) for e in graph.equations)
    return {e: new for e, new in replacements if new}


class _Movement:
    """The values of a block that are views of others."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.needed: set[Any] = set(graph.outputs)  # values that are computed anyway
        self.numbers: dict[Any, Array] = {}  # the scalar of each array that consists of copies of a scalar
        self.views: dict[Any, View] = {}  # the view that each result of a movement is
        self.composed: set[Any] = set()  # those that are views of views
        self.sums: dict[Any, View] = {}  # the view that each sum of zero-padded arrays side by side is, up to -0.0
        followed: dict[Any, Equation] = {}
        for e in graph.equations:
            if (number := self._number(e)) is not None:
                self.numbers[e.outputs[0]] = number
            elif _is_movement(e) or (traits_of(e.name).adds and all(_adds_pads(followed.get(x)) for x in e.inputs)):
                followed.update(dict.fromkeys(e.outputs, e))
            else:
                self.needed.update(e.inputs)
        for e in dict.fromkeys(followed.values()):
            self._read(e)

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

    def _read(self, e: Equation) -> None:
        """Notes the views of an equation's results."""
        if traits_of(e.name).adds:
            pair = [self.sums.get(x) or self.views.get(x) for x in e.inputs]
            if None not in pair and (total := _side_by_side(*pair)) is not None:  # type: ignore[arg-type]
                self.sums[e.outputs[0]] = total
            return
        sources = [self.numbers.get(x, x) for x in e.inputs]
        array = next(x for x in e.inputs if x.shape)
        inner = {x: self.views[x] for x in sources if x in self.views and self._is_short(x)}
        for v, index in zip(e.outputs, index_of(e) or (), strict=True):
            segments = [[Segment(sources[s.operand], s.start, s.start + s.count) for s in spans] for spans in index]
            if (view := View.of(array, segments)) is not None:
                composed = view.of_views(inner)
                self.views[v] = composed or view
                if composed is not None or not self.numbers.keys().isdisjoint(e.inputs):
                    self.composed.add(v)

    def _is_short(self, x: Array) -> bool:
        """Whether a view of this array is better written as a view of the arrays that it is made of."""
        return x not in self.needed or max(map(len, self.views[x].dims)) <= _FEW

    def instead_of(self, e: Equation) -> list[Equation] | None:
        """The equations that replace one; None if it stays."""
        is_sum = bool(e.outputs) and e.outputs[0] in self.sums
        views = [(self.sums if is_sum else self.views).get(v) for v in e.outputs]
        if not (is_sum or self.composed.intersection(e.outputs)) or any(0 in v.shape for v in e.outputs):
            return None
        out: list[Equation] = []
        for v, view in zip(e.outputs, views, strict=True):
            if view is None or any(segments and all(p.is_number for p in segments) for segments in view.dims):
                return None
            self._make(view, v, e, out, added=is_sum)
        return out

    def _make(self, view: View, result: Value, e: Equation, out: list[Equation], *, added: bool) -> None:
        """Appends equations that compute a view: one for its windows, and one for each other dimension."""
        padding = {d: None if added else view.padding(d) for d in view.moved or [0]}
        windows = [d for d, config in padding.items() if config is not None]
        x, done = view.array, list[int]()
        steps = [*([windows] if windows else []), *([d] for d in padding if d not in windows)]
        for step in steps:
            done += step
            if step is windows:
                config = [padding.get(d) or (0, 0) if d in step else (0, 0) for d in range(len(x.shape))]
                primitive, params, operands = _window(x, config, [p for d in step for p in view.dims[d]])
            else:
                segments = [
                    dataclasses.replace(p, source=x) if p.source is view.array else p for p in view.along(*step)
                ]
                primitive, params, operands = _joined(segments, *step, added=added, is_alone=len(steps) == 1)
            shape = tuple(sum(p.length for p in view.along(d)) if d in done else n for d, n in enumerate(x.shape))
            value = result if step is steps[-1] else None
            x = self.graph.add(out, e, primitive, params, operands, shape, result.dtype, value)


def _is_movement(e: Equation) -> bool:
    """Whether an equation only moves elements, in their order and without gaps."""
    if e.primitive is concatenate_slices_p or not e.outputs or not e.outputs[0].shape:
        return False
    index = index_of(e)
    return index is not None and all(s.step == 1 for dims in index for spans in dims for s in spans)


def _adds_pads(e: Equation | None) -> bool:
    return e is not None and (e.name == "pad" or traits_of(e.name).adds)


def _side_by_side(a: View, b: View) -> View | None:
    """The view that a sum of two views is: at each position, one of them has an element, and the other one zero."""
    moved = {*a.moved, *b.moved}
    if len(moved) > 1:
        return None
    axis, joined = min(moved, default=0), list[Segment]()
    ends = [itertools.accumulate(p.length for p in view.along(axis)) for view in (a, b)]
    for start, end in itertools.pairwise((0, *sorted({*itertools.chain(*ends)}))):
        pair = [p for view in (a, b) for p in cut(view.along(axis), start, end)]
        arrays = [p for p in pair if not p.is_number]
        if len(arrays) > 1 or any(p.is_number and not is_zero(p.source) for p in pair):
            return None
        joined += arrays or pair[:1]
    return View.of(a.array, [joined if d == axis else () for d in range(len(a.dims))])


def _window(
    x: Array, config: Sequence[tuple[int, int]], segments: Iterable[Segment]
) -> tuple[Any, dict[str, Any], Any]:
    """The equation that pads or cuts an array: its primitive, parameters and operands."""
    number = next((p.source for p in segments if p.is_number), None)
    if number is not None:
        return lax.pad_p, {"padding_config": tuple((low, high, 0) for low, high in config)}, (x, number)
    starts = tuple(-low for low, _ in config)
    limits = tuple(n + high for n, (_, high) in zip(x.shape, config, strict=True))
    return lax.slice_p, {"start_indices": starts, "limit_indices": limits, "strides": None}, (x,)


def _joined(segments: Sequence[Segment], axis: int, *, added: bool, is_alone: bool) -> tuple[Any, dict[str, Any], Any]:
    """The equation that joins segments along a dimension, or adds zeros to them.

    It is an ordinary concatenation only if it is alone. Otherwise the next pass would compose it with the steps before
    it again.
    """
    operands = tuple(p.source for p in segments)
    if is_alone and not added and all(p.is_all_of(axis) for p in segments):
        return lax.concatenate_p, {"dimension": axis}, operands
    if added and len(segments) == 1 and segments[0].is_all_of(axis):
        return lax.add_p, {}, (*operands, Constant(np.zeros((), operands[0].dtype)))
    slices = tuple((p.start, p.end) for p in segments)
    return concatenate_slices_p, {"dimension": axis, "slices": slices, "added": added}, operands
