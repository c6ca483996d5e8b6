"""Runs a halo exchange: each device receives the window of a split dimension that it reads."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gshard.comm.route import Chunk, Route, carry, chunks_of, pairs, routed
from gshard.core.jax_adapter_context import in_context
from gshard.core.mesh import Atoms, Mesh
from gshard.core.planning_tables import tabulated
from gshard.core.program import NO_CONTEXT, itemsize
from gshard.core.rule import Split, place
from gshard.core.xla_workarounds import opaque_for_slice, ppermute


@dataclasses.dataclass(frozen=True, slots=True)
class Shift:
    """Sends elements ``low`` to ``high`` of part ``i + distance`` to part ``i``, for each receiver ``i``."""

    distance: int  # the distance of the sending part; 0 for the device's own part
    low: int  # low, high: the needed elements of a part
    high: int
    begin: int  # begin, end: the elements of the part for which the receiver has room
    end: int
    receivers: tuple[int, ...]  # the parts that need some of these elements


@dataclasses.dataclass(frozen=True, slots=True)
class Window:
    """The window of a dimension that each part of a result needs."""

    n: int  # number of elements of the dimension
    first: int  # first, step: the window of part ``i`` begins at position ``first + step * i``
    step: int
    parts: int  # number of parts
    extent: int  # length of the window in positions
    dilation: int = 1  # element ``j`` is at position ``j * dilation``
    # parts from this one on hold no results and need no elements; None if all parts hold results
    taking: int | None = None
    # whether results read elements of the array only, so that elements outside do not matter
    inside: bool = dataclasses.field(default=False, compare=False)

    def position(self, part: Any) -> Any:
        """The first position of a part's window. The number of the part may be a traced value."""
        return self.first + self.step * part

    def start(self, part: Any) -> Any:
        """The first element at or after the beginning of a part's window."""
        return -(-self.position(part) // self.dilation)

    @property
    def receivers(self) -> range:
        """The parts that hold results."""
        return range(self.parts if self.taking is None else min(self.taking, self.parts))

    @property
    def width(self) -> int:
        """The largest number of elements of a window."""
        if self.step % self.dilation == 0 and self.extent:  # all windows begin at the same distance from an element
            return max(0, (self.first + self.extent - 1) // self.dilation - self.start(0) + 1)
        return -(-self.extent // self.dilation)

    @tabulated(4096)
    def shifts(self, size: int) -> tuple[Shift, ...]:
        """The shifts that send each part its window, in the order of distances; parts have ``size`` elements."""
        needed: dict[int, tuple[int, int, list[int]]] = {}
        for i in self.receivers:
            first, last = max(self.start(i), 0), min(self.start(i) + self.width, self.n)
            if first >= last:
                continue
            for source in range(first // size, (last - 1) // size + 1):
                low, high = max(first - source * size, 0), min(last - source * size, size)
                if source - i in needed:
                    known_low, known_high, receivers = needed[source - i]
                    needed[source - i] = (min(low, known_low), max(high, known_high), [*receivers, i])
                else:
                    needed[source - i] = (low, high, [i])
        if not needed:
            return ()
        nearest, farthest = min(needed), max(needed)
        shifts = []
        for distance in range(nearest, farthest + 1):
            low, high, receivers = needed.get(distance, (0, size, []))
            # Chunks are concatenated, so only the outer ends can be omitted.
            begin, end = low if distance == nearest else 0, high if distance == farthest else size
            shifts.append(Shift(distance, low, high, begin, end, tuple(receivers)))
        return tuple(shifts)

    @tabulated(4096)
    def route(self, size: int) -> Route | None:
        """The route with which each chunk is sent separately; None if shifts send less."""
        by_shifts = sum(shift.high - shift.low for shift in self.shifts(size) if shift.distance and shift.receivers)
        chunks: list[Chunk] = []
        for i in self.receivers:
            start = self.start(i)
            chunks += chunks_of(max(start, 0), min(start + self.width, self.n), size, i, start)
        sent_elements, received_elements = [0] * self.parts, [0] * self.parts
        for p in chunks:
            if p.source != p.receiver:
                sent_elements[p.source] += p.length
                received_elements[p.receiver] += p.length
        if max(*sent_elements, *received_elements, 0) >= by_shifts:
            return None
        route = routed(tuple(chunks))
        return route if sum(route.messages) < by_shifts else None

    def messages(self, size: int) -> tuple[int, ...]:
        """The elements that each device sends in each CollectivePermute, if parts have ``size`` elements."""
        if not size:
            return ()
        route = self.route(size)
        if route is not None:
            return route.messages
        return tuple(shift.high - shift.low for shift in self.shifts(size) if shift.distance and shift.receivers)

    def filled_outside(self, size: int) -> bool:
        """Whether the receiver can fill elements outside of the array: they are not sent, and no part is padded.

        >>> Window(n=12, first=-1, step=3, parts=4, extent=5).filled_outside(3)
        True
        """
        if self.dilation > 1 or size * self.parts != self.n or not size or self.route(size) is not None:
            return False
        return all(self.start(i) < self.n and self.start(i) + self.width > 0 for i in self.receivers)

    @property
    def within(self) -> bool:
        """Whether all windows are inside the array, so that elements outside do not matter.

        >>> [Window(n=12, first=first, step=3, parts=4, extent=3).within for first in (-1, 0, 1)]
        [False, True, False]
        """
        if self.inside or not self.receivers:
            return True
        ends = self.position(self.receivers[0]), self.position(self.receivers[-1])
        return min(ends) >= 0 and max(ends) + self.extent <= (self.n - 1) * self.dilation + 1

    def has_element(self, part: Any) -> Any:
        """For each position of a part's window whether the array has an element there (bool [extent])."""
        positions = self.position(part) + jnp.arange(self.extent, dtype=jnp.int32)
        has_element = (positions >= 0) & (positions < (self.n - 1) * self.dilation + 1)
        return has_element & (positions % self.dilation == 0) if self.dilation > 1 else has_element

    def bytes(self, size: int, each: int) -> int:
        """Bytes that each device sends, if parts have ``size`` elements of ``each`` bytes."""
        return each * sum(self.messages(size))


def fetch_window(x: Any, dim: int, atoms: Atoms, mesh: Mesh, window: Window) -> Any:
    """This device's window of dimension ``dim``, inside ``shard_map``; ``x`` is its part."""
    return laid_out(x, received(x, dim, atoms, mesh, window), dim, atoms, window)


@in_context(NO_CONTEXT)
def received(x: Any, dim: int, atoms: Atoms, mesh: Mesh, window: Window) -> tuple[Any, ...]:
    """The chunks that other parts send for this device's window: one for each shift, or one for a route."""
    size = x.shape[dim]
    if not x.size:
        return ()
    if (route := window.route(size)) is not None:
        return (carry(x, dim, atoms, mesh, route, window.width),)
    chunks = []
    for shift in window.shifts(size):
        if shift.distance:
            chunk = _cut(x, shift.low, shift.high, dim)
            ends = pairs([(i + shift.distance, i) for i in shift.receivers], atoms, mesh)
            chunks.append(ppermute(chunk, mesh.atoms, ends) if ends else jnp.zeros_like(chunk))
    return tuple(chunks)


def laid_out(x: Any, received_chunks: Sequence[Any], dim: int, atoms: Atoms, window: Window, fill: Any = 0) -> Any:
    """This device's window, from its part ``x`` and the ``received`` chunks."""
    zeros = is_number(fill) and not any(np.asarray(fill).tobytes())  # -0.0 has a bit that is set
    size, width = x.shape[dim], window.width
    shifts = window.shifts(size) if size else ()
    if not shifts or not x.size:
        shape = *x.shape[:dim], width, *x.shape[dim + 1 :]
        return jnp.zeros(shape, x.dtype) if zeros else jnp.full(shape, fill, x.dtype)
    if window.route(size) is not None:
        return received_chunks[0]
    used = [i for i in window.receivers if window.start(i) < window.n and window.start(i) + width > 0]
    same_offset = len({window.start(i) - i * size for i in used}) == 1
    if same_offset:
        # Use the whole own part and slice the concatenation: XLA fuses this slice, but copies slices it concatenates.
        shifts = tuple(
            s if s.distance or 2 * (s.end - s.begin) < size else dataclasses.replace(s, begin=0, end=size)
            for s in shifts
        )

    def padded(x: Any, low: int, high: int) -> Any:
        if not low and not high:
            return x
        room = [(low, high, 0) if d == dim else (0, 0, 0) for d in range(x.ndim)]
        return lax.pad(x, jnp.zeros((), x.dtype) if zeros else jnp.asarray(fill, x.dtype), room)

    chunks, remaining = [], iter(received_chunks)
    for shift in shifts:
        if not shift.distance:
            chunks.append(_cut(x, shift.begin, shift.end, dim))
            continue
        chunk = next(remaining)
        if not zeros:  # a permute without a sender results in zeros
            source = lax.axis_index(atoms) + shift.distance
            chunk = jnp.where((source >= 0) & (source < window.parts), chunk, jnp.asarray(fill, x.dtype))
        chunks.append(padded(chunk, shift.low - shift.begin, shift.end - shift.high))
    buffer = lax.concatenate(chunks, dim) if len(chunks) > 1 else chunks[0]

    def offset(part: Any) -> Any:
        return window.start(part) - (part + shifts[0].distance) * size - shifts[0].begin

    # Pad the buffer such that all nonempty windows are inside.
    left = max(0, *(-offset(i) for i in used))
    right = max(0, *(offset(i) + width - buffer.shape[dim] for i in used))
    buffer = padded(buffer, left, right)
    if same_offset:
        begin = offset(used[0]) + left
        return _cut(buffer, begin, begin + width, dim)
    begin = jnp.clip(offset(lax.axis_index(atoms)) + left, 0, buffer.shape[dim] - width)
    return lax.dynamic_slice_in_dim(opaque_for_slice(buffer, dim, width), begin, width, axis=dim)


def add_windows(x: Any, dim: int, atoms: Atoms, mesh: Mesh, window: Window, size: int) -> Any:
    """Adds the elements of all windows to the array elements that they cover: the transpose of ``fetch_window``."""
    part = jax.ShapeDtypeStruct((*x.shape[:dim], size, *x.shape[dim + 1 :]), x.dtype)
    (sums,) = jax.linear_transpose(lambda y: fetch_window(y, dim, atoms, mesh, window), part)(x)
    return sums


def is_number(x: Any) -> bool:
    """Whether a value is a concrete number."""
    return isinstance(x, int | float | complex | np.generic) or (isinstance(x, np.ndarray) and not x.shape)


def _cut(x: Any, begin: int, end: int, dim: int) -> Any:
    return x if (begin, end) == (0, x.shape[dim]) else lax.slice_in_dim(x, begin, end, axis=dim)


# Determines the windows and the bytes of halo exchanges along several dimensions of an array.


@dataclasses.dataclass(frozen=True, slots=True)
class HaloWindows:
    """The windows of one operand of an equation."""

    dims: Sequence[tuple[int, ...]]  # the factors of the dimensions of the operand
    moved: Sequence[bool]  # for each dimension whether the operator reads a window along it
    # ``window(d, parts)`` returns the windows that the parts of the result read along dimension ``d``
    window: Callable[[int, int], Window]

    def split_over(self, mesh: Mesh, split: Split) -> dict[int, Window]:
        """The windows along dimensions that are split, by dimension."""
        windows = {}
        for d, dim in enumerate(self.dims):
            parts = mesh.count(split.get(dim[0], ())) if self.moved[d] else 1
            if parts > 1:
                windows[d] = self.window(d, parts)
        return windows

    def sends(
        self, shape: Sequence[int], dtype: Any, length: Callable[[int, Window], int]
    ) -> Callable[[Mesh, Split], int]:
        """The value of ``Rule.sends`` if devices fetch the windows of one dimension after the other.

        A fetched window changes the size of the part whose windows are fetched next, to ``length(d, window)``.
        """

        def sent(mesh: Mesh, split: Split) -> int:
            sizes = [-(-n // mesh.count(atoms)) for n, atoms in zip(shape, place(tuple(self.dims), split), strict=True)]
            total = 0
            for d, window in self.split_over(mesh, split).items():
                others = math.prod(n for e, n in enumerate(sizes) if e != d)
                total += window.bytes(sizes[d], others * itemsize(dtype))
                sizes[d] = length(d, window)
            return total

        return sent
