"""Sends rows to the devices that hold their places, by a ragged all-to-all.

    device              0            1         places 0-2 are on device 0, 3-5 on device 1
    places of rows      1 4 0        5 - 3     "-" has no place
    in order            1 0 | 4      | 5 3     by the device that holds the place
    arrivals            1 0          4 5 3     of the first sender, then of the second

All devices gather how many rows each has for each device. From these numbers a device computes what it sends and
receives, and where. It sends the numbers of the places first, 4 bytes for each row. Rows return on the same routes
(``RowRoutes.back``).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from gshard.core.context import NO_CONTEXT
from gshard.core.jax_adapter_context import in_context
from gshard.core.xla_workarounds import ragged_all_to_all


class RowRoutes(NamedTuple):
    """Routes of one device's rows. Each of ``P`` devices has ``n`` rows and ``m`` places, and can receive ``room``."""

    order: Any  # int32 [n], the rows sorted by the device that holds their place; rows without a place come last
    starts: Any  # starts, sizes: int32 [P], the chunk of ``order`` that each device receives
    sizes: Any
    targets: Any  # int32 [P], where the chunk begins among the rows that the device receives
    received_starts: Any  # received_starts, received_sizes: int32 [P], the chunk that comes from each device
    received_sizes: Any
    sources: Any  # int32 [P], where this chunk begins in the ``order`` of its sender
    arrival_of_place: Any  # int32 [m], the arrival that belongs to each place; ``room`` if none does
    place_of_arrival: Any  # int32 [room], the place of each arrival; ``m`` if there is none

    @in_context(NO_CONTEXT)
    def there(self, x: Any, axes: tuple[str, ...]) -> Any:
        """The rows that this device receives, in the order of their arrival."""
        room = jnp.zeros((*self.place_of_arrival.shape, *x.shape[1:]), x.dtype)
        return ragged_all_to_all(x, room, self.starts, self.sizes, self.targets, self.received_sizes, axes)

    @in_context(NO_CONTEXT)
    def back(self, x: Any, axes: tuple[str, ...]) -> Any:
        """This device's rows sorted by ``order``, from the arrivals ``x`` of all devices."""
        home = jnp.zeros((*self.order.shape, *x.shape[1:]), x.dtype)
        return ragged_all_to_all(x, home, self.received_starts, self.received_sizes, self.sources, self.sizes, axes)


@in_context(NO_CONTEXT)
def routes_of(
    places: Any, sizes: Any, index: Any, held: int, room: int, axes: tuple[str, ...], *, is_sorted: bool = False
) -> RowRoutes:
    """The routes of the rows of one device."""
    owner = owners(places, held, sizes.shape[0])
    starts = jnp.cumsum(sizes, axis=1) - sizes
    targets = jnp.cumsum(sizes, axis=0) - sizes
    sizes = jnp.clip(room - targets, 0, sizes)

    def of_sender(x: Any) -> Any:
        return lax.dynamic_index_in_dim(x, index, axis=0, keepdims=False)

    def of_receiver(x: Any) -> Any:
        return lax.dynamic_index_in_dim(x, index, axis=1, keepdims=False)

    order = lax.iota(jnp.int32, places.size) if is_sorted else jnp.argsort(owner, stable=True).astype(jnp.int32)
    local = places - owner * held
    sent = of_sender(starts), of_sender(sizes), of_sender(targets)
    received = of_receiver(targets), of_receiver(sizes), of_receiver(starts)
    arrived = jnp.full((room,), held, jnp.int32)
    place_of_arrival = ragged_all_to_all(local if is_sorted else local[order], arrived, *sent, received[1], axes)
    arrival = jnp.full((held,), room, jnp.int32)
    arrival = arrival.at[place_of_arrival].set(jnp.arange(room, dtype=jnp.int32), mode="drop")
    return RowRoutes(order, *sent, *received, arrival, place_of_arrival)


def owners(places: Any, held: int, parts: int) -> Any:
    """The number of the device that holds each place; ``parts`` for a row without a place."""
    return jnp.where(places < 0, parts, places // held)


def inverse(order: Any) -> Any:
    """The position of each element in ``order``, a permutation."""
    return jnp.zeros_like(order).at[order].set(lax.iota(order.dtype, order.size), unique_indices=True)
