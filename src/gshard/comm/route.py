"""Route: pieces of parts sent to where they are wanted, in as few rounds as there can be.

A round is one CollectivePermute: every device sends at most one piece and receives at most one, all of them padded to
the longest. Pieces are edges between senders and receivers; rounds are colors, of which a bipartite graph needs no more
than its largest degree (Kőnig). Halo exchanges that are the same for all parts are shifts instead (``comm.halo``).

    >>> swap = [Piece(0, 0, 1, 0, 3), Piece(1, 0, 0, 0, 3), Piece(0, 0, 0, 3, 1)]
    >>> [[(piece.source, piece.receiver) for piece in round] for round in routed(tuple(swap)).rounds]
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

from gshard.comm.local import apart
from gshard.core.mesh import Atoms, Mesh


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """Elements ``low`` to ``low + length`` of part ``source`` are wanted at ``at`` in what part ``receiver`` makes."""

    source: int
    low: int
    receiver: int
    at: int
    length: int


def pieces_of(first: int, last: int, size: int, receiver: int, start: int) -> Iterator[Piece]:
    """Elements ``first`` to ``last`` of parts of ``size`` elements, for a part whose own begin at element ``start``."""
    while first < last:
        source, low = divmod(first, size)
        length = min(last - first, size - low)
        yield Piece(source, low, receiver, first - start, length)
        first += length


@dataclasses.dataclass(frozen=True, slots=True)
class Route:
    """All pieces of an exchange.

    Attributes:
        stay: rounds of pieces that do not leave their device.
        rounds: the others; each round is one CollectivePermute.
    """

    stay: tuple[tuple[Piece, ...], ...]
    rounds: tuple[tuple[Piece, ...], ...]

    @property
    def messages(self) -> tuple[int, ...]:
        """How many elements each device sends in each round."""
        return tuple(max(piece.length for piece in pieces) for pieces in self.rounds)


@functools.lru_cache(maxsize=1024)
def routed(pieces: tuple[Piece, ...]) -> Route:
    """Pieces in rounds."""
    stay = _colored([p for p in pieces if p.source == p.receiver])
    return Route(stay, _colored([p for p in pieces if p.source != p.receiver]))


def _colored(pieces: Sequence[Piece]) -> tuple[tuple[Piece, ...], ...]:
    """Edge coloring by alternating paths, long pieces first so that they share their rounds."""
    at_source: dict[int, dict[int, Piece]] = {}
    at_taker: dict[int, dict[int, Piece]] = {}
    color_of: dict[Piece, int] = {}

    def free(used: dict[int, Piece]) -> int:
        return next(c for c in itertools.count() if c not in used)

    for piece in sorted(pieces, key=lambda p: (-p.length, p.receiver, p.source, p.at)):
        out, into = at_source.setdefault(piece.source, {}), at_taker.setdefault(piece.receiver, {})
        color, other = free(out), free(into)
        if color in into:
            # Along the path of the two colors that begins at the receiver, they change places.
            path, here, wanted, from_taker = [], into, color, True
            while wanted in here:
                edge = here[wanted]
                path.append(edge)
                here = at_source[edge.source] if from_taker else at_taker[edge.receiver]
                from_taker, wanted = not from_taker, other if wanted == color else color
            for edge in path:
                del at_source[edge.source][color_of[edge]], at_taker[edge.receiver][color_of[edge]]
            for edge in path:
                color_of[edge] = other if color_of[edge] == color else color
                at_source[edge.source][color_of[edge]] = at_taker[edge.receiver][color_of[edge]] = edge
        color_of[piece] = color
        out[color] = into[color] = piece
    rounds: dict[int, list[Piece]] = {}
    for piece, color in color_of.items():
        rounds.setdefault(color, []).append(piece)
    return tuple(tuple(rounds[color]) for color in sorted(rounds))


def carry(x: Any, dim: int, atoms: Atoms, mesh: Mesh, route: Route, room: int) -> Any:
    """What this device is to have: ``room`` elements along ``dim``, of pieces of every device's ``x``.

    Runs inside ``shard_map``. Where no piece arrives there are zeros.
    """
    shape = [*x.shape[:dim], room, *x.shape[dim + 1 :]]
    result = jnp.zeros(shape, x.dtype)
    position = lax.broadcasted_iota(jnp.int32, [room if d == dim else 1 for d in range(x.ndim)], dim)
    parts, size = mesh.count(atoms), x.shape[dim]

    def here(pieces: Iterable[Piece], who: Callable[[Piece], int], what: Callable[[Piece], int]) -> Any:
        """A number of the piece that this device sends or takes; any of them if it does not."""
        known = {who(p): what(p) for p in pieces}
        if len(set(known.values())) == 1:
            return next(iter(known.values()))
        return jnp.asarray(np.array([known.get(i, 0) for i in range(parts)], np.int32))[lax.axis_index(atoms)]

    alike = _alike(route, parts, room)
    if alike is not None:
        found = []
        for p, is_sent in alike:
            piece = lax.slice_in_dim(x, p.low, p.low + p.length, axis=dim)
            ends = [(p.source, p.receiver) for p in is_sent]
            found.append(lax.ppermute(piece, mesh.atoms, pairs(ends, atoms, mesh)) if ends else piece)
        return lax.concatenate(found, dim)
    for i, pieces in enumerate((*route.stay, *route.rounds)):
        length = max(p.length for p in pieces)
        begin = here(pieces, lambda p: p.source, functools.partial(_cut, length=length, size=size))
        piece = _slice(x, dim, begin, length)
        if i >= len(route.stay):
            piece = lax.ppermute(piece, mesh.atoms, pairs([(p.source, p.receiver) for p in pieces], atoms, mesh))
        # The piece in a frame of the result's size; beyond the longest of either there is nothing to see.
        frame = here(pieces, lambda p: p.receiver, functools.partial(_frame, length=length, size=size))
        wide = jnp.pad(piece, [(room, room) if d == dim else (0, 0) for d in range(x.ndim)])
        framed = _slice(wide, dim, room - frame, room)
        first = here(pieces, lambda p: p.receiver, lambda p: p.at)
        count = {p.receiver: p.length for p in pieces}
        last = jnp.asarray(np.array([count.get(i, 0) for i in range(parts)], np.int32))[lax.axis_index(atoms)]
        result = jnp.where((position >= first) & (position < first + last), framed, result)
    return result


def _alike(route: Route, parts: int, room: int) -> list[tuple[Piece, tuple[Piece, ...]]] | None:
    """Where all parts are put together alike: in order, a piece of each round, and the round if it is sent."""
    found = []
    for pieces, is_sent in (*((p, False) for p in route.stay), *((p, True) for p in route.rounds)):
        if len(pieces) != parts or len({(p.low, p.at, p.length) for p in pieces}) > 1:
            return None
        found.append((pieces[0], pieces if is_sent else ()))
    found.sort(key=lambda f: f[0].at)
    ends = [0, *(p.at + p.length for p, _ in found)]
    return found if found and [p.at for p, _ in found] == ends[:-1] and ends[-1] == room else None


def _cut(piece: Piece, length: int, size: int) -> int:
    """Where a piece of the length of its round begins in a part."""
    return min(piece.low, size - length)


def _frame(piece: Piece, length: int, size: int) -> int:
    """Where that arrives."""
    return piece.at - piece.low + _cut(piece, length, size)


def _slice(x: Any, dim: int, begin: Any, size: int) -> Any:
    if isinstance(begin, int):
        return lax.slice_in_dim(x, begin, begin + size, axis=dim)
    return lax.dynamic_slice_in_dim(apart(x, dim, size), jnp.clip(begin, 0, x.shape[dim] - size), size, axis=dim)


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
