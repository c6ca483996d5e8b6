"""Two hops: rows go to hosts first, and inside each host to the devices of their experts.

    tokens ─▶ hop 1, between hosts: one row for each host ─▶ hop 2, inside a host: one row for each expert ─▶ experts
    tokens ◀─ one row from each host ◀─────────── sum of a token's weighted results in a host ◀──────────── experts

The P partitions of the experts are the D devices of N hosts. Device d of each host, with its tokens, is in *lane* d.
Hop 1 is an exchange among the devices of a lane, hop 2 one among the devices of a host. A token crosses the network
between hosts once for each host with experts of its own, and returns as often, however many these experts are. Each row
takes the places and the weights of its k choices with it, so the second sender needs nothing else.

Each device has room for Y rows that come from hosts, and sends at most F rows to the devices of its host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gshard.api.row_functions import put_rows, take_rows
from gshard.moe.gating import Choice, Gating, keep
from gshard.moe.sorted_rows import by_replica


class Received(NamedTuple):
    """What devices have received from the hosts, for the way back. First dimensions are R * N and D."""

    rows_QLJ: jax.Array  # int32 [R * D, tokens of a lane, hosts of a token], the places of the rows of hop 1
    source_HDF: jax.Array  # int32, the row of hop 1 that each row of hop 2 is a copy of
    target_HDF: jax.Array  # int32, its place among the rows of the host; D * X if it is unused
    weight_HDF: jax.Array  # float32, the combine weight of its choice


@dataclasses.dataclass(frozen=True)
class Hops:
    """The sizes of the exchanges of one replica."""

    hosts: int  # hosts, devices: N, and D of each host
    devices: int
    room: int  # X, the rows of a partition
    sent: int  # F, the rows that a device sends to those of its host
    tokens: int  # T of the replica

    @property
    def lane(self) -> int:
        """The tokens of a lane, the same number on each device."""
        return self.hosts * -(-self.tokens // (self.hosts * self.devices))

    @property
    def received(self) -> int:
        """Y, the rows that come to a device from hosts."""
        return min(self.sent, self.lane)

    def in_lanes(self, x: jax.Array, fill: int = 0) -> jax.Array:
        """[T, ...] as [D, tokens of a lane, ...], with padding at the end of the tokens."""
        N, D = self.hosts, self.devices
        x = jnp.pad(x, [(0, self.lane * D - len(x)), *[(0, 0)] * (x.ndim - 1)], constant_values=fill)
        x = x.reshape(N, D, self.lane // N, *x.shape[1:])
        return jnp.swapaxes(x, 0, 1).reshape(D, self.lane, *x.shape[3:])

    def of_tokens(self, x: jax.Array) -> jax.Array:
        """The inverse of ``in_lanes``."""
        N, D = self.hosts, self.devices
        x = jnp.swapaxes(x.reshape(D, N, self.lane // N, *x.shape[2:]), 0, 1)
        return x.reshape(self.lane * D, *x.shape[3:])[: self.tokens]

    def within(self, gating: Gating, valid_GS: jax.Array | None, *, replicas: int, any_number: bool) -> Gating:
        """The gating without the choices that a device of their lane has no room to send on: the last tokens."""
        experts = gating.slots_GE.shape[1]
        of_host = experts // self.hosts

        def kept(choices: tuple[Choice, ...]) -> list[jax.Array]:
            hosts_GS = [jnp.where(choice.kept_GS, choice.expert_GS // of_host, self.hosts) for choice in choices]
            host_TK = jnp.stack([host_GS.reshape(-1) for host_GS in hosts_GS], axis=1)
            count_TN = jnp.sum(host_TK[:, :, None] == jnp.arange(self.hosts), axis=1, dtype=jnp.int32)
            fits_TN = self.of_tokens(jnp.cumsum(self.in_lanes(count_TN), axis=1) <= self.sent)
            fits_TK = jnp.any((host_TK[:, :, None] == jnp.arange(self.hosts)) & fits_TN[:, None, :], axis=2)
            return [fits_T.reshape(host_GS.shape) for fits_T, host_GS in zip(fits_TK.T, hosts_GS, strict=True)]

        if self.sent >= self.lane * min(len(gating.choices), of_host):
            return gating
        kept_GS = by_replica(kept, gating.choices, replicas=replicas)
        return keep(gating, kept_GS, valid_GS, any_number=any_number)

    def there(
        self,
        place_TK: jax.Array,
        weight_TK: jax.Array,
        inputs_TM: jax.Array,
        each: Callable[..., jax.Array],
        mark: Callable[[jax.Array, str], jax.Array],
    ) -> tuple[jax.Array, Received]:
        """The rows of the partitions: [R * P, X, M]."""
        N, D, X = self.hosts, self.devices, self.room

        def rows_of(place_TK: jax.Array) -> jax.Array:
            return jax.vmap(self._rows_of_hosts)(self.in_lanes(place_TK, N * D * X))

        def received(rows_DLJ: jax.Array, x_TZ: jax.Array) -> jax.Array:
            return jnp.swapaxes(jax.vmap(self._to_hosts)(rows_DLJ, self.in_lanes(x_TZ)), 0, 1)

        def sent_on(place_NDYK: jax.Array) -> tuple[jax.Array, jax.Array]:
            first_N = jnp.arange(N, dtype=jnp.int32) * (D * X)
            # 1 was added to each place, so that 0 is none: a row that no token was sent to holds zeros.
            return _of_devices(self._sent_on, place_NDYK - 1 - first_N[:, None, None, None])

        rows_QLJ = each(rows_of, place_TK)
        place_HDYK, weight_HDYK, inputs_HDYM = (
            mark(each(received, rows_QLJ, x_TZ), "hosts devices _ _") for x_TZ in (place_TK + 1, weight_TK, inputs_TM)
        )
        choice_HDF, target_HDF = each(sent_on, place_HDYK)
        source_HDF = choice_HDF // place_TK.shape[1]
        weight_HDF = _of_devices(_read, weight_HDYK.reshape(*weight_HDYK.shape[:2], -1), choice_HDF)
        copies_HDFM = _of_devices(_read, inputs_HDYM, source_HDF)
        inputs_HXM = jax.vmap(self._to_devices)(_joined(copies_HDFM), _joined(target_HDF))
        inputs_PXM = mark(inputs_HXM.reshape(-1, X, inputs_HXM.shape[2]), "partitions _ model")
        return inputs_PXM, Received(rows_QLJ, source_HDF, target_HDF, weight_HDF)

    def back(
        self,
        outputs_PXM: jax.Array,
        received: Received,
        each: Callable[..., jax.Array],
        mark: Callable[[jax.Array, str], jax.Array],
    ) -> jax.Array:
        """The weighted sums of the rows of each token, in float32: [R * T, M]."""
        D, M = self.devices, outputs_PXM.shape[2]
        outputs_HFM = jax.vmap(self._from_devices)(
            outputs_PXM.reshape(-1, D * self.room, M), _joined(received.target_HDF)
        )
        weighted_HFM = _joined(received.weight_HDF)[:, :, None] * outputs_HFM.astype(jnp.float32)
        sums_HDYM = _of_devices(self._sums, weighted_HFM.reshape(-1, D, self.sent, M), received.source_HDF)
        sums_HDYM = mark(sums_HDYM.astype(outputs_PXM.dtype), "hosts devices _ model")

        def returned(rows_DLJ: jax.Array, sums_NDYM: jax.Array) -> jax.Array:
            return self.of_tokens(jax.vmap(self._from_hosts, (0, 1))(rows_DLJ, sums_NDYM))

        return each(returned, received.rows_QLJ, sums_HDYM)

    def _to_hosts(self, rows_LJ: jax.Array, x_LZ: jax.Array) -> jax.Array:
        """Hop 1 of a lane."""
        return put_rows(x_LZ, rows_LJ, self.hosts * self.received).reshape(self.hosts, self.received, -1)

    def _to_devices(self, x_FM: jax.Array, target_F: jax.Array) -> jax.Array:
        """Hop 2 of a host."""
        return put_rows(x_FM, target_F, self.devices * self.room, sorted_parts=self.devices)

    def _from_devices(self, x_XM: jax.Array, target_F: jax.Array) -> jax.Array:
        """The way back of hop 2."""
        return take_rows(x_XM, target_F, sorted_parts=self.devices)

    def _from_hosts(self, rows_LJ: jax.Array, sums_NYM: jax.Array) -> jax.Array:
        """The sums of the rows that come back to the tokens of a lane."""
        returned_LJM = take_rows(sums_NYM.reshape(-1, sums_NYM.shape[2]), rows_LJ)
        return jnp.sum(returned_LJM.astype(jnp.float32), axis=1)

    def _sums(self, rows_FM: jax.Array, source_F: jax.Array) -> jax.Array:
        """The sums of the rows of a device that are of one row of hop 1."""
        zeros_YM = jnp.zeros((self.received, rows_FM.shape[1]), jnp.float32)
        return zeros_YM.at[source_F].add(rows_FM, mode="drop", wrap_negative_indices=False)

    def _rows_of_hosts(self, place_LK: jax.Array) -> jax.Array:
        """The rows of hop 1 of the tokens of a lane, from the places of their choices: rows_LJ, N * Y for none."""
        N, Y = self.hosts, self.received
        host_LK = place_LK // (self.devices * self.room)  # N if it is not kept
        is_host_LKN = host_LK[:, :, None] == jnp.arange(N, dtype=jnp.int32)
        is_sent_LN = jnp.any(is_host_LKN, axis=1)
        number_LN = jnp.cumsum(is_sent_LN, axis=0, dtype=jnp.int32) - 1
        rows_LN = jnp.where(is_sent_LN, jnp.arange(N, dtype=jnp.int32) * Y + number_LN, N * Y)
        if place_LK.shape[1] >= N:
            return rows_LN
        # With fewer choices than hosts, a choice has the row of its host if no choice before it has.
        is_first_LKN = is_host_LKN & (jnp.cumsum(is_host_LKN, axis=1, dtype=jnp.int32) == 1)
        return jnp.min(jnp.where(is_first_LKN, rows_LN[:, None, :], N * Y), axis=2)

    def _sent_on(self, place_YK: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The rows that a device sends to those of its host, by their places: choice_F, in Y * K, and target_F.

        Unused rows come last. They have the target D * X, and choices of other hosts.
        """
        places = self.devices * self.room
        place_Z = place_YK.reshape(-1)
        place_Z = jnp.where((place_Z >= 0) & (place_Z < places), place_Z, places)
        target_Z, choice_Z = jax.lax.sort_key_val(place_Z, jnp.arange(place_Z.size, dtype=jnp.int32))
        return choice_Z[: self.sent], target_Z[: self.sent]


def _read(x: jax.Array, rows: jax.Array) -> jax.Array:
    """The rows with these numbers."""
    return x.at[rows].get(mode="clip", wrap_negative_indices=False)


def _of_devices(f: Callable[..., Any], *arrays: jax.Array) -> Any:
    """Calls a function for each device of each host."""
    return jax.vmap(jax.vmap(f))(*arrays)


def _joined(x_HDF: jax.Array) -> jax.Array:
    """The rows of all devices of a host."""
    return x_HDF.reshape(len(x_HDF), -1, *x_HDF.shape[3:])
