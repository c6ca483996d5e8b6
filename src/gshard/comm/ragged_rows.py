"""Sends rows to the devices that hold their places, by a ragged all-to-all.

    device              0            1         places 0-2 are on device 0, 3-5 on device 1
    places of rows      1 4 0        5 - 3     "-" has no place
    in order            1 0 | 4      | 5 3     by the device that holds the place
    arrivals            1 0          4 5 3     of the first sender, then of the second

All devices gather the numbers of the places, 4 bytes for each row. From these each device computes what it sends and
receives, and where. Rows return on the same routes (``RowRoutes.back``).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from gshard.core.xla_workarounds import ragged_all_to_all


class RowRoutes(NamedTuple):
    """The routes of one device's rows. Each of ``P`` devices has ``n`` rows and ``m`` places, and can receive ``room``.

    Attributes:
        order: int32 [n], the rows sorted by the device that holds their place; rows without a place come last.
        starts, sizes: int32 [P], the chunk of ``order`` that each device receives.
        targets: int32 [P], where the chunk begins among the rows that the device receives.
        received_starts, received_sizes: int32 [P], the chunk that comes from each device.
        sources: int32 [P], where this chunk begins in the ``order`` of its sender.
        arrival_of_place: int32 [m], the arrival that belongs to each place; ``room`` if none does.
        place_of_arrival: int32 [room], the place of each arrival; ``m`` if there is none.
    """

    order: Any
    starts: Any
    sizes: Any
    targets: Any
    received_starts: Any
    received_sizes: Any
    sources: Any
    arrival_of_place: Any
    place_of_arrival: Any

    def there(self, x: Any, axes: tuple[str, ...]) -> Any:
        """The rows that this device receives, in the order of their arrival.

        Args:
            x: ``[n, ...]``, this device's rows sorted by ``order``.
            axes: the axes of the ``P`` devices.
        """
        room = jnp.zeros((*self.place_of_arrival.shape, *x.shape[1:]), x.dtype)
        return ragged_all_to_all(x, room, self.starts, self.sizes, self.targets, self.received_sizes, axes)

    def back(self, x: Any, axes: tuple[str, ...]) -> Any:
        """This device's rows sorted by ``order``, from the arrivals ``x`` of all devices."""
        home = jnp.zeros((*self.order.shape, *x.shape[1:]), x.dtype)
        return ragged_all_to_all(x, home, self.received_starts, self.received_sizes, self.sources, self.sizes, axes)


def routes_of(all_places: Any, index: Any, held: int, room: int) -> RowRoutes:
    """The routes of the rows of one device.

    Args:
        all_places: int32 ``[P, n]``, the global numbers of the places of all devices' rows; negative for none.
        index: the number of this device.
        held: the number of places that each device holds.
        room: how many rows a device can receive at most. If numbers occur twice, others are not sent.
    """
    parts, count = all_places.shape
    owner = jnp.where(all_places < 0, parts, all_places // held)
    mine = lax.dynamic_index_in_dim(owner, index, keepdims=False)
    # [sender, receiver]
    counts = jnp.sum(owner[:, :, None] == jnp.arange(parts, dtype=owner.dtype), axis=1, dtype=jnp.int32)
    starts = jnp.cumsum(counts, axis=1) - counts
    targets = jnp.cumsum(counts, axis=0) - counts
    counts = jnp.clip(room - targets, 0, counts)

    def of_sender(x: Any) -> Any:
        return lax.dynamic_index_in_dim(x, index, axis=0, keepdims=False)

    def of_receiver(x: Any) -> Any:
        return lax.dynamic_index_in_dim(x, index, axis=1, keepdims=False)

    comes_here = (owner == index).reshape(-1)
    arrival = jnp.cumsum(comes_here, dtype=jnp.int32) - 1
    place = all_places.reshape(-1) - index * held
    return RowRoutes(
        order=jnp.argsort(mine, stable=True).astype(jnp.int32),
        starts=of_sender(starts), sizes=of_sender(counts), targets=of_sender(targets),
        received_starts=of_receiver(targets), received_sizes=of_receiver(counts), sources=of_receiver(starts),
        arrival_of_place=_table(held, jnp.where(comes_here, place, held), arrival, room),
        place_of_arrival=_table(room, jnp.where(comes_here, arrival, room), place, held),
    )  # fmt: skip


def _table(size: int, at: Any, values: Any, default: int) -> Any:
    """An array with ``values`` at the positions ``at``. Positions beyond the end are dropped."""
    return jnp.full((size,), default, jnp.int32).at[at].set(values.astype(jnp.int32), mode="drop")


def inverse(order: Any) -> Any:
    """The position of each element in ``order``, a permutation."""
    return jnp.zeros_like(order).at[order].set(jax.lax.iota(order.dtype, order.size), unique_indices=True)
