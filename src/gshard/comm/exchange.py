"""Exchanges the atoms of dimensions with different numbers of parts, and sends each tile directly to its destination.

    [8@(x,y), 8@z] -> [8@z, 8@(x,y)]      x = y = z = 2: two rounds of half a part, each half sent once

If two dimensions with different numbers of parts exchange their atoms, one all-to-all is not enough: it changes the
sizes of the parts, and a second message sends all parts to other devices. Instead, both splits divide the array into
common tiles. A part of either split consists of the same number of tiles, and rounds of CollectivePermutes move the
tiles (``comm.route``). All splits are even, and the same atoms split the array before and after.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from gshard.comm.route import Chunk, colored, pairs
from gshard.comm.tiles import moved
from gshard.core.context import NO_CONTEXT
from gshard.core.jax_adapter_context import in_context
from gshard.core.mesh import Atoms, Mesh
from gshard.core.planning_tables import tabulated
from gshard.core.sharding import Sharding, common_prefix
from gshard.core.xla_workarounds import ppermute

Ints = NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """The tiles of an exchange, with their senders."""

    atoms: Atoms  # the atoms along which tiles move. Devices are numbered along them.
    held: tuple[int, ...]  # for each dimension the number of tiles of a part before the exchange
    wanted: tuple[int, ...]  # the same after the exchange
    # sender, source: int64 [devices, tiles]: for each tile of a part after the exchange, the device that holds it
    # before, and the number of the tile there
    sender: Ints
    source: Ints

    def messages(self) -> tuple[tuple[Chunk, ...], ...]:
        """The rounds. In each, every device sends a tile, perhaps to itself. One element of a chunk is one tile."""
        return _messages(self)

    def ends(self, mesh: Mesh) -> tuple[Ints, Ints]:
        """For each tile of each device, the device of the mesh that sends it and the device that receives it."""
        size = mesh.size
        sizes = list(mesh.atom_sizes.values())
        at = dict(zip(mesh.atoms, np.indices(sizes).reshape(len(sizes), size), strict=True))
        strides = dict(zip(mesh.atoms, (size // np.cumprod(sizes)).tolist(), strict=True))
        everyone = np.arange(size)
        along = sum((at[a] * strides[a] for a in self.atoms), np.zeros(size, np.int64))
        own = _ordinal(self.atoms, at, mesh, size)
        places = np.unravel_index(self.sender[own], [mesh.atom_sizes[a] for a in self.atoms])
        there = sum((p * strides[a] for a, p in zip(self.atoms, places, strict=True)), np.zeros(self.sender[own].shape))
        senders = (everyone - along)[:, None] + there.astype(np.int64)
        return senders.ravel(), np.broadcast_to(everyone[:, None], senders.shape).ravel()


@tabulated(64)
def _messages(tiles: Exchange) -> tuple[tuple[Chunk, ...], ...]:
    receiver, target = np.indices(tiles.sender.shape)
    columns = (x.ravel().tolist() for x in (tiles.sender, tiles.source, receiver, target))
    return colored([Chunk(s, low, r, to, 1) for s, low, r, to in zip(*columns, strict=True)])


def rounds_of(before: Sequence[Atoms], after: Sequence[Atoms], mesh: Mesh) -> int:
    """The number of messages. It is the number of tiles of a part, because some device keeps none."""
    cuts = zip(map(mesh.count, before), map(mesh.count, after), strict=True)
    return math.prod(math.lcm(p, q) // p for p, q in cuts)


def can_change(before: Sharding, after: Sharding, shape: Sequence[int], mesh: Mesh) -> bool:
    """Whether an exchange leads from a sharding to another with fewer messages than moving atom by atom."""
    if before.unreduced != after.unreduced or _cutting(before) != _cutting(after):
        return False
    counts = [(mesh.count(have), mesh.count(want)) for have, want in zip(before.dims, after.dims, strict=True)]
    if all(p == q for p, q in counts) or any(n % math.lcm(*c) for n, c in zip(shape, counts, strict=True)):
        return False
    return rounds_of(before.dims, after.dims, mesh) < mesh.count(moved(before.dims, after.dims)).bit_length()


def _cutting(sharding: Sharding) -> set[str]:
    return {a for dim in sharding.dims for a in dim}


@tabulated(1024)
def exchange(before: tuple[Atoms, ...], after: tuple[Atoms, ...], mesh: Mesh) -> Exchange:
    """The exchange between two splits of an array."""
    atoms = moved(before, after)
    sizes = [mesh.atom_sizes[a] for a in atoms]
    devices = math.prod(sizes)
    at = dict(zip(atoms, np.indices(sizes).reshape(len(atoms), devices), strict=True))
    sender = source = np.zeros((devices, 1), np.int64)
    held, wanted, ordinals = [], [], np.zeros(devices, np.int64)
    for have, want in zip(before, after, strict=True):
        same = len(common_prefix(have, want))
        own, other = have[same:], want[same:]
        p, q = mesh.count(own), mesh.count(other)
        fine = math.lcm(p, q)
        ordinals = ordinals * p + _ordinal(own, at, mesh, devices)
        # Tiles of this dimension in a part after, and the part before that each comes from.
        tile = _ordinal(other, at, mesh, devices)[:, None] * (fine // q) + np.arange(fine // q)

        def further(x: Any, by: int, digit: Any) -> Any:
            return (x[:, :, None] * by + digit[:, None, :]).reshape(devices, -1)

        sender = further(sender, p, tile // (fine // p))
        source = further(source, fine // p, tile % (fine // p))
        held.append(fine // p)
        wanted.append(fine // q)
    who = np.empty(devices, np.int64)
    who[ordinals] = np.arange(devices)
    return Exchange(atoms, tuple(held), tuple(wanted), who[sender], source)


def _ordinal(atoms: Atoms, at: dict[str, Any], mesh: Mesh, devices: int) -> Any:
    ordinal = np.zeros(devices, np.int64)
    for a in atoms:
        ordinal = ordinal * mesh.atom_sizes[a] + at[a]
    return ordinal


@in_context(NO_CONTEXT)
def changed(x: Any, before: tuple[Atoms, ...], after: tuple[Atoms, ...], mesh: Mesh) -> Any:
    """Runs an exchange on one device's part of an array, inside ``shard_map``."""
    tiles = exchange(before, after, mesh)
    tile = [n // k for n, k in zip(x.shape, tiles.held, strict=True)]
    result = jnp.zeros([n * k for n, k in zip(tile, tiles.wanted, strict=True)], x.dtype)
    me, devices = lax.axis_index(tiles.atoms), mesh.count(tiles.atoms)

    def begin(numbers: dict[int, int], counts: tuple[int, ...]) -> list[Any]:
        """The first position of the tile with the number of this device."""
        listed = np.array([numbers[i] for i in range(devices)])
        places = [np.asarray(i * n, np.int32) for i, n in zip(np.unravel_index(listed, counts), tile, strict=True)]
        return [int(i[0]) if (i == i[0]).all() else jnp.asarray(i)[me] for i in places]

    for chunks in tiles.messages():
        sent = lax.dynamic_slice(x, begin({p.source: p.low for p in chunks}, tiles.held), tile)
        sent = ppermute(sent, mesh.atoms, pairs([(p.source, p.receiver) for p in chunks], tiles.atoms, mesh))
        place = begin({p.receiver: p.at for p in chunks}, tiles.wanted)
        result = lax.dynamic_update_slice(result, sent, place)
    return result
