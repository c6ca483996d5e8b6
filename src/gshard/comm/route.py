"""Route: sends chunks of shards to their destinations in the least number of rounds.

A round is one CollectivePermute: every device sends at most one chunk and receives at most one, all of them padded to
the longest. Chunks are edges between senders and receivers; rounds are colors, and a bipartite graph needs no more
than its largest degree (Kőnig). Halo exchanges that are the same for all parts are shifts instead (``comm.halo``).

    >>> swap = [Chunk(0, 0, 1, 0, 3), Chunk(1, 0, 0, 0, 3), Chunk(0, 0, 0, 3, 1)]
    >>> [[(chunk.source, chunk.receiver) for chunk in round] for round in routed(tuple(swap)).rounds]
    [[(1, 0), (0, 1)]]
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

from gshard.core.context import NO_CONTEXT
from gshard.core.jax_adapter_context import in_context
from gshard.core.mesh import Atoms, Mesh
from gshard.core.planning_tables import tabulated
from gshard.core.xla_workarounds import opaque_for_slice, ppermute


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """Elements ``low`` to ``low + length`` of part ``source`` are wanted at ``at`` in what part ``receiver`` makes."""

    source: int
    low: int
    receiver: int
    at: int
    length: int


def chunks_of(first: int, last: int, size: int, receiver: int, start: int) -> Iterator[Chunk]:
    """Elements ``first`` to ``last`` of parts of ``size`` elements, for a part whose own begin at element ``start``."""
    while first < last:
        source, low = divmod(first, size)
        length = min(last - first, size - low)
        yield Chunk(source, low, receiver, first - start, length)
        first += length


@dataclasses.dataclass(frozen=True, slots=True)
class Route:
    """All chunks of an exchange.

    Attributes:
        stay: rounds of chunks that do not leave their device.
        rounds: the others; each round is one CollectivePermute.
    """

    stay: tuple[tuple[Chunk, ...], ...]
    rounds: tuple[tuple[Chunk, ...], ...]

    @property
    def messages(self) -> tuple[int, ...]:
        """How many elements each device sends in each round."""
        return tuple(max(chunk.length for chunk in chunks) for chunks in self.rounds)


@tabulated(1024)
def routed(chunks: tuple[Chunk, ...]) -> Route:
    """Chunks in rounds."""
    stay = colored([p for p in chunks if p.source == p.receiver])
    return Route(stay, colored([p for p in chunks if p.source != p.receiver]))


def colored(chunks: Sequence[Chunk]) -> tuple[tuple[Chunk, ...], ...]:
    """Chunks in rounds, by edge coloring with alternating paths; long chunks first, so that they share their rounds."""
    at_source: dict[int, dict[int, Chunk]] = {}
    at_receiver: dict[int, dict[int, Chunk]] = {}
    color_of: dict[Chunk, int] = {}

    def free(used: dict[int, Chunk]) -> int:
        return next(c for c in itertools.count() if c not in used)

    for chunk in sorted(chunks, key=lambda p: (-p.length, p.receiver, p.source, p.at)):
        out, into = at_source.setdefault(chunk.source, {}), at_receiver.setdefault(chunk.receiver, {})
        color, other = free(out), free(into)
        if color in into:
            # Along the path of the two colors that begins at the receiver, they change places.
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
    """What this device is to have: ``room`` elements along ``dim``, of chunks of every device's ``x``.

    Runs inside ``shard_map``. Where no chunk arrives there are zeros.
    """
    parts, size = mesh.count(atoms), x.shape[dim]
    alike = _alike(route, parts, room)
    if alike is not None:
        found, before = [], 0
        for i, (p, is_sent) in enumerate(alike):
            low, high = p.low, p.low + p.length
            # Most of the own part is taken whole at the ends: a slice of what is joined is fused, slices are copied.
            if len(alike) > 1 and not is_sent and 2 * p.length >= size:
                before, low = (low, 0) if i == 0 else (before, low)
                high = size if i == len(alike) - 1 else high
            chunk = lax.slice_in_dim(x, low, high, axis=dim)
            ends = [(p.source, p.receiver) for p in is_sent]
            found.append(ppermute(chunk, mesh.atoms, pairs(ends, atoms, mesh)) if ends else chunk)
        whole = lax.concatenate(found, dim)
        return whole if whole.shape[dim] == room else lax.slice_in_dim(whole, before, before + room, axis=dim)
    result = jnp.zeros([*x.shape[:dim], room, *x.shape[dim + 1 :]], x.dtype)
    position = lax.broadcasted_iota(jnp.int32, [room if d == dim else 1 for d in range(x.ndim)], dim)

    def here(chunks: Iterable[Chunk], who: Callable[[Chunk], int], what: Callable[[Chunk], int]) -> Any:
        """A number of the chunk that this device sends or takes; any of them if it does not."""
        known = {who(p): what(p) for p in chunks}
        if len(set(known.values())) == 1:
            return next(iter(known.values()))
        return jnp.asarray(np.array([known.get(i, 0) for i in range(parts)], np.int32))[lax.axis_index(atoms)]

    for i, chunks in enumerate((*route.stay, *route.rounds)):
        length = max(p.length for p in chunks)
        begin = here(chunks, lambda p: p.source, functools.partial(_slice_start, length=length, size=size))
        chunk = _slice(x, dim, begin, length)
        if i >= len(route.stay):
            chunk = ppermute(chunk, mesh.atoms, pairs([(p.source, p.receiver) for p in chunks], atoms, mesh))
        # The chunk in a frame of the result's size; beyond the longest of either there is nothing to see.
        frame = here(chunks, lambda p: p.receiver, functools.partial(_frame, length=length, size=size))
        wide = jnp.pad(chunk, [(room, room) if d == dim else (0, 0) for d in range(x.ndim)])
        framed = _slice(wide, dim, room - frame, room)
        first = here(chunks, lambda p: p.receiver, lambda p: p.at)
        count = {p.receiver: p.length for p in chunks}
        last = jnp.asarray(np.array([count.get(i, 0) for i in range(parts)], np.int32))[lax.axis_index(atoms)]
        result = jnp.where((position >= first) & (position < first + last), framed, result)
    return result


def _alike(route: Route, parts: int, room: int) -> list[tuple[Chunk, tuple[Chunk, ...]]] | None:
    """Where all parts are put together alike: in order, a chunk of each round, and the round if it is sent."""
    found, lengths = [], []
    groups: dict[tuple[int, int, int], list[Chunk]] = {}
    for p in itertools.chain(*route.stay, *route.rounds):
        groups.setdefault((p.at, p.low, p.length), []).append(p)
    for _, chunks in sorted(groups.items()):
        if not len(chunks) == len({p.source for p in chunks}) == len({p.receiver for p in chunks}) == parts:
            return None
        is_sent = any(p.source != p.receiver for p in chunks)
        found.append((chunks[0], tuple(chunks) if is_sent else ()))
        lengths += [chunks[0].length] * is_sent
    if sorted(lengths) != sorted(route.messages):  # what stays goes along with what is sent, and nothing else
        return None
    ends = [0, *(p.at + p.length for p, _ in found)]
    return found if found and [p.at for p, _ in found] == ends[:-1] and ends[-1] == room else None


def _slice_start(chunk: Chunk, length: int, size: int) -> int:
    """Where a chunk of the length of its round begins in a part."""
    return min(chunk.low, size - length)


def _frame(chunk: Chunk, length: int, size: int) -> int:
    """Where that arrives."""
    return chunk.at - chunk.low + _slice_start(chunk, length, size)


def _slice(x: Any, dim: int, begin: Any, size: int) -> Any:
    if isinstance(begin, int):
        return lax.slice_in_dim(x, begin, begin + size, axis=dim)
    return lax.dynamic_slice_in_dim(
        opaque_for_slice(x, dim, size), jnp.clip(begin, 0, x.shape[dim] - size), size, axis=dim
    )


def pairs(parts: Iterable[tuple[int, int]], atoms: Atoms, mesh: Mesh) -> list[tuple[int, int]]:
    """Sender and receiver of every device: parts are counted over ``atoms``, along all other atoms nothing moves."""
    sizes, found = mesh.atom_sizes, []
    source_of = {receiver: source for source, receiver in parts}
    for device, at in enumerate(itertools.product(*(range(s) for s in sizes.values()))):
        place = dict(zip(mesh.atoms, at, strict=True))
        part = 0
        for a in atoms:
            part = part * sizes[a] + place[a]
        if part not in source_of:
            continue
        source = source_of[part]
        for a in reversed(atoms):
            source, place[a] = divmod(source, sizes[a])
        sender = 0
        for a in mesh.atoms:
            sender = sender * sizes[a] + place[a]
        found.append((sender, device))
    return found
