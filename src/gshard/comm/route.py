"""Sends chunks of shards to their destinations in the smallest number of rounds.

A round is one CollectivePermute: every device sends and receives at most one chunk, padded to the longest. Rounds are
the colors of an edge coloring between senders and receivers, as few as the largest degree (Kőnig's theorem).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from gshard.core.jax_adapter_context import in_context
from gshard.core.mesh import Atoms, Mesh
from gshard.core.planning_tables import tabulated
from gshard.core.program import NO_CONTEXT
from gshard.core.xla_workarounds import opaque_for_slice, ppermute


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """Elements ``low`` to ``low + length`` of part ``source`` that go to position ``at`` of ``receiver``'s result."""

    source: int
    low: int
    receiver: int
    at: int
    length: int


def chunks_of(first: int, last: int, size: int, receiver: int, start: int) -> Iterator[Chunk]:
    """The chunks of elements ``first`` to ``last`` for a receiver."""
    while first < last:
        source, low = divmod(first, size)
        length = min(last - first, size - low)
        yield Chunk(source, low, receiver, first - start, length)
        first += length


@dataclasses.dataclass(frozen=True, slots=True)
class Route:
    """All chunks of an exchange."""

    stay: tuple[tuple[Chunk, ...], ...]  # rounds of chunks that stay on their device
    rounds: tuple[tuple[Chunk, ...], ...]  # rounds of the other chunks; each round is one CollectivePermute

    @property
    def messages(self) -> tuple[int, ...]:
        """The number of elements that each device sends in each round."""
        return tuple(max(chunk.length for chunk in chunks) for chunks in self.rounds)


@tabulated(1024)
def routed(chunks: tuple[Chunk, ...]) -> Route:
    """Distributes chunks over rounds."""
    stay = colored([p for p in chunks if p.source == p.receiver])
    return Route(stay, colored([p for p in chunks if p.source != p.receiver]))


def colored(chunks: Sequence[Chunk]) -> tuple[tuple[Chunk, ...], ...]:
    """Distributes chunks over rounds by edge coloring with alternating paths. Long chunks come first."""
    at_source: dict[int, dict[int, Chunk]] = {}
    at_receiver: dict[int, dict[int, Chunk]] = {}
    color_of: dict[Chunk, int] = {}

    def free(used: dict[int, Chunk]) -> int:
        return next(c for c in itertools.count() if c not in used)

    for chunk in sorted(chunks, key=lambda p: (-p.length, p.receiver, p.source, p.at)):
        out, into = at_source.setdefault(chunk.source, {}), at_receiver.setdefault(chunk.receiver, {})
        color, other = free(out), free(into)
        if color in into:
            # Exchange the two colors along the alternating path that begins at the receiver.
            path, here, wanted, from_taker = [], into, color, True
            while wanted in here:
                edge = here[wanted]
                path.append(edge)
                here = at_source[edge.source] if from_taker else at_receiver[edge.receiver]
                from_taker, wanted = not from_taker, other if wanted == color else color
            for edge in path:
                del at_source[edge.source][color_of[edge]], at_receiver[edge.receiver][color_of[edge]]
            for edge in path:
                color_of[edge] = other if color_of[edge] == color else color
                at_source[edge.source][color_of[edge]] = at_receiver[edge.receiver][color_of[edge]] = edge
        color_of[chunk] = color
        out[color] = into[color] = chunk
    rounds: dict[int, list[Chunk]] = {}
    for chunk, color in color_of.items():
        rounds.setdefault(color, []).append(chunk)
    return tuple(tuple(rounds[color]) for color in sorted(rounds))


@in_context(NO_CONTEXT)
def carry(x: Any, dim: int, atoms: Atoms, mesh: Mesh, route: Route, room: int) -> Any:
    """Runs a route inside ``shard_map``: ``room`` elements along ``dim``, from the chunks for this device.

    Elements without a chunk are zero.
    """
    parts, size = mesh.count(atoms), x.shape[dim]
    same_for_all = _alike(route, parts, room)
    if same_for_all is not None:
        concatenated, before = [], 0
        for i, (p, is_sent) in enumerate(same_for_all):
            low, high = p.low, p.low + p.length
            # Use the whole own part at the ends and slice the concatenation: XLA fuses this slice, but copies others.
            if len(same_for_all) > 1 and not is_sent and 2 * p.length >= size:
                before, low = (low, 0) if i == 0 else (before, low)
                high = size if i == len(same_for_all) - 1 else high
            chunk = lax.slice_in_dim(x, low, high, axis=dim)
            ends = [(p.source, p.receiver) for p in is_sent]
            concatenated.append(ppermute(chunk, mesh.atoms, pairs(ends, atoms, mesh)) if ends else chunk)
        whole = lax.concatenate(concatenated, dim)
        return whole if whole.shape[dim] == room else lax.slice_in_dim(whole, before, before + room, axis=dim)
    result = jnp.zeros([*x.shape[:dim], room, *x.shape[dim + 1 :]], x.dtype)
    position = lax.broadcasted_iota(jnp.int32, [room if d == dim else 1 for d in range(x.ndim)], dim)

    def here(chunks: Iterable[Chunk], who: Callable[[Chunk], int], what: Callable[[Chunk], int]) -> Any:
        """A property of the chunk that this device sends or receives; any value if there is no chunk."""
        value_of = {who(p): what(p) for p in chunks}
        if len(set(value_of.values())) == 1:
            return next(iter(value_of.values()))
        return jnp.asarray(np.array([value_of.get(i, 0) for i in range(parts)], np.int32))[lax.axis_index(atoms)]

    for i, chunks in enumerate((*route.stay, *route.rounds)):
        length = max(p.length for p in chunks)
        begin = here(chunks, lambda p: p.source, functools.partial(_slice_start, length=length, size=size))
        chunk = _slice(x, dim, begin, length)
        if i >= len(route.stay):
            chunk = ppermute(chunk, mesh.atoms, pairs([(p.source, p.receiver) for p in chunks], atoms, mesh))
        # Put the chunk into a frame of the result's size.
        frame = here(chunks, lambda p: p.receiver, functools.partial(_frame, length=length, size=size))
        wide = jnp.pad(chunk, [(room, room) if d == dim else (0, 0) for d in range(x.ndim)])
        framed = _slice(wide, dim, room - frame, room)
        first = here(chunks, lambda p: p.receiver, lambda p: p.at)
        count = {p.receiver: p.length for p in chunks}
        last = jnp.asarray(np.array([count.get(i, 0) for i in range(parts)], np.int32))[lax.axis_index(atoms)]
        result = jnp.where((position >= first) & (position < first + last), framed, result)
    return result


def _alike(route: Route, parts: int, room: int) -> list[tuple[Chunk, tuple[Chunk, ...]]] | None:
    """If all parts consist of the same chunks: for each in order one chunk, and its round if it is sent; else None."""
    result, lengths = [], []
    groups: dict[tuple[int, int, int], list[Chunk]] = {}
    for p in itertools.chain(*route.stay, *route.rounds):
        groups.setdefault((p.at, p.low, p.length), []).append(p)
    for _, chunks in sorted(groups.items()):
        if not len(chunks) == len({p.source for p in chunks}) == len({p.receiver for p in chunks}) == parts:
            return None
        is_sent = any(p.source != p.receiver for p in chunks)
        result.append((chunks[0], tuple(chunks) if is_sent else ()))
        lengths += [chunks[0].length] * is_sent
    if sorted(lengths) != sorted(route.messages):  # a round would also contain other chunks
        return None
    ends = [0, *(p.at + p.length for p, _ in result)]
    return result if result and [p.at for p, _ in result] == ends[:-1] and ends[-1] == room else None


def _slice_start(chunk: Chunk, length: int, size: int) -> int:
    """The first element to slice from a part for a chunk, padded to the length of its round."""
    return min(chunk.low, size - length)


def _frame(chunk: Chunk, length: int, size: int) -> int:
    """The position in the result of the first element of the sent slice."""
    return chunk.at - chunk.low + _slice_start(chunk, length, size)


def _slice(x: Any, dim: int, begin: Any, size: int) -> Any:
    if isinstance(begin, int):
        return lax.slice_in_dim(x, begin, begin + size, axis=dim)
    return lax.dynamic_slice_in_dim(
        opaque_for_slice(x, dim, size), jnp.clip(begin, 0, x.shape[dim] - size), size, axis=dim
    )


def numbered(mesh: Mesh, atoms: Atoms) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Numbers devices along some atoms.

    intp [devices]: the number of each device. intp [numbers]: how far a device is from the one with number 0.
    """
    devices, numbers, offsets = np.arange(mesh.size), np.zeros(mesh.size, np.intp), np.zeros(1, np.intp)
    strides = dict(zip(mesh.atoms, (mesh.size // np.cumprod([*mesh.atom_sizes.values()])).tolist(), strict=True))
    for a in atoms:
        n = mesh.atom_sizes[a]
        numbers = numbers * n + devices // strides[a] % n
        offsets = (offsets[:, None] + np.arange(n) * strides[a]).ravel()
    return numbers, offsets


def pairs(parts: Iterable[tuple[int, int]], atoms: Atoms, mesh: Mesh) -> list[tuple[int, int]]:
    """The pairs of devices for pairs of parts. Parts are numbered along ``atoms``; along other atoms nothing moves."""
    source_of, (numbers, offsets) = {receiver: source for source, receiver in parts}, numbered(mesh, atoms)
    offset_of = offsets.tolist()
    return [
        (device - offset_of[part] + offset_of[source_of[part]], device)
        for device, part in enumerate(numbers.tolist())
        if part in source_of
    ]
