"""Two hops: rows go to hosts first, and inside each host to the devices of their experts.

    tokens ─▶ hop 1, between hosts: one row for each host ─▶ hop 2, inside a host: one row for each expert ─▶ experts
    tokens ◀─ one row from each host ◀─────────── sum of a token's weighted results in a host ◀──────────── experts

The P partitions of the experts are D devices of N hosts. A *lane* has the devices with one number in all hosts, and their
tokens. Hop 1 is an exchange among the devices of a lane, hop 2 one among the devices of a host. A token crosses the
network between hosts once for each host with experts of its own, and returns as often, however many these experts are.
With each row go the places of its k choices and their weights. So the second sender needs nothing else.

Each device has room for Y rows that come from hosts, and sends at most F rows to the devices of its host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gshard.api.row_functions import put_rows, take_rows
from gshard.moe.gating import Choice, Gating, keep
from gshard.moe.sorted_rows import by_replica


class Received(NamedTuple):
    """What devices have received from the hosts, for the way back. First dimensions are R * N and D.

    Attributes:
        rows_QLJ: int32 [R * D, tokens of a lane, hosts of a token], the places of the rows of hop 1.
        source_HDF: int32, the row of hop 1 that each row of hop 2 is a copy of; Y if it is unused.
        target_HDF: int32, its place among the rows of the host; D * X if it is unused.
        weight_HDF: float32, the combine weight of its choice.
    """

    rows_QLJ: jax.Array
    source_HDF: jax.Array
    target_HDF: jax.Array
    weight_HDF: jax.Array


@dataclasses.dataclass(frozen=True)
class Hops:
    """The sizes of the exchanges of one replica.

    Attributes:
        hosts, devices: N, and D of each host.
        room: X, the rows of a partition.
        sent: F, the rows that a device sends to those of its host.
        tokens: T of the replica.
    """

    hosts: int
    devices: int
    room: int
    sent: int
    tokens: int

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
        """The gating without the choices that a device of their lane has no room to send on: the last tokens.

        Args:
            gating: routing ``within_room``.
            valid_GS, any_number: as in ``gating.keep``.
            replicas: the number of parts of the groups whose rows have room of their own.
        """
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
        """The rows of the partitions: [R * P, X, M].

        Args:
            place_TK: int32, the place of each choice in the rows of all partitions; P * X if it is not kept.
            weight_TK: float32.
            inputs_TM: the tokens.
            each: calls a function for each replica.
            mark: splits dimensions with these names.
        """
        N, D, X, Y = self.hosts, self.devices, self.room, self.received
        names = "hosts devices _ _"

        def crossing(place_TK: jax.Array) -> jax.Array:
            return jax.vmap(self._rows_of_hosts)(self.in_lanes(place_TK, N * D * X))

        def crossed(rows_DLJ: jax.Array, x_TZ: jax.Array) -> jax.Array:
            x_DYZ = jax.vmap(lambda x, rows: put_rows(x, rows, N * Y))(self.in_lanes(x_TZ), rows_DLJ)
            return jnp.swapaxes(x_DYZ.reshape(D, N, Y, -1), 0, 1)

        def onward(place_NDYK: jax.Array) -> tuple[jax.Array, jax.Array]:
            first_N = jnp.arange(N, dtype=jnp.int32) * (D * X)
            # The place of a row that nothing was sent to is 0.
            place_NDYK = place_NDYK - 1 - first_N[:, None, None, None]
            return jax.vmap(jax.vmap(self._sent_on))(place_NDYK)

        rows_QLJ = each(crossing, place_TK)
        place_HDYK = mark(each(crossed, rows_QLJ, place_TK + 1), names)
        weight_HDYK = mark(each(crossed, rows_QLJ, weight_TK), names)
        inputs_HDYM = mark(each(crossed, rows_QLJ, inputs_TM), names)
        entry_HDF, target_HDF = each(onward, place_HDYK)
        choices = place_TK.shape[1]
        weight_HDF = jax.vmap(jax.vmap(_read))(weight_HDYK.reshape(*weight_HDYK.shape[:2], -1), entry_HDF)
        source_HDF = entry_HDF // choices
        copies_HDFM = jax.vmap(jax.vmap(_read))(inputs_HDYM, source_HDF)
        inputs_HXM = jax.vmap(lambda x, rows: put_rows(x, rows, D * X))(_joined(copies_HDFM), _joined(target_HDF))
        inputs_PXM = mark(inputs_HXM.reshape(-1, X, inputs_HXM.shape[2]), "partitions _ model")
        return inputs_PXM, Received(rows_QLJ, source_HDF, target_HDF, weight_HDF)

    def back(
        self,
        outputs_PXM: jax.Array,
        received: Received,
        each: Callable[..., jax.Array],
        mark: Callable[[jax.Array, str], jax.Array],
    ) -> jax.Array:
        """The weighted sums of the rows of each token, in float32: [R * T, M].

        Args:
            outputs_PXM: the results of the experts; sums of a host are sent in their dtype.
            received, each, mark: of ``there``.
        """
        N, D, X, Y = self.hosts, self.devices, self.room, self.received
        M = outputs_PXM.shape[2]
        outputs_HXM = outputs_PXM.reshape(-1, D * X, M)
        outputs_HFM = jax.vmap(take_rows)(outputs_HXM, _joined(received.target_HDF))
        weighted_HFM = _joined(received.weight_HDF)[:, :, None] * outputs_HFM.astype(jnp.float32)

        def added(rows_FM: jax.Array, source_F: jax.Array) -> jax.Array:
            zeros_YM = jnp.zeros((Y, M), jnp.float32)
            return zeros_YM.at[source_F].add(
                rows_FM, mode="drop", indices_are_sorted=True, wrap_negative_indices=False
            )

        sums_HDYM = jax.vmap(jax.vmap(added))(weighted_HFM.reshape(-1, D, self.sent, M), received.source_HDF)
        sums_HDYM = mark(sums_HDYM.astype(outputs_PXM.dtype), "hosts devices _ model")

        def returned(rows_DLJ: jax.Array, sums_NDYM: jax.Array) -> jax.Array:
            sums_DYM = jnp.swapaxes(sums_NDYM, 0, 1).reshape(D, N * Y, M)
            of_hosts_DLJM = jax.vmap(take_rows)(sums_DYM, rows_DLJ)
            return self.of_tokens(jnp.sum(of_hosts_DLJM.astype(jnp.float32), axis=2))

        return each(returned, received.rows_QLJ, sums_HDYM)

    def _rows_of_hosts(self, place_LK: jax.Array) -> jax.Array:
        """The rows of hop 1 of the tokens of a lane, from the places of their choices: rows_LJ, N * Y for none."""
        N, Y = self.hosts, self.received
        host_LK = place_LK // (self.devices * self.room)  # N if it is not kept
        is_host_LKN = host_LK[:, :, None] == jnp.arange(N, dtype=jnp.int32)
        is_sent_LN = jnp.any(is_host_LKN, axis=1)
        number_LN = jnp.cumsum(is_sent_LN, axis=0, dtype=jnp.int32) - 1
        rows_LN = jnp.where(is_sent_LN, jnp.arange(N, dtype=jnp.int32) * Y + number_LN, N * Y)
        if N <= place_LK.shape[1]:
            return rows_LN
        # With fewer choices than hosts, a choice has the row of its host if no choice before it has.
        is_first_LKN = is_host_LKN & (jnp.cumsum(is_host_LKN, axis=1, dtype=jnp.int32) == 1)
        return jnp.min(jnp.where(is_first_LKN, rows_LN[:, None, :], N * Y), axis=2)

    def _sent_on(self, place_YK: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The rows that a device sends to those of its host: entry_F, the number of a choice in Y * K, and target_F.

        Unused rows have the entry Y * K and the target D * X.
        """
        places, F = self.devices * self.room, self.sent
        place_Z = place_YK.reshape(-1)
        is_here_Z = (place_Z >= 0) & (place_Z < places)
        number_Z = jnp.where(is_here_Z, jnp.cumsum(is_here_Z, dtype=jnp.int32) - 1, F)
        entry_F = jnp.full((F,), place_Z.size, jnp.int32)
        entry_F = entry_F.at[number_Z].set(
            jnp.arange(place_Z.size, dtype=jnp.int32), mode="drop", wrap_negative_indices=False
        )
        target_F = place_Z.at[entry_F].get(mode="fill", fill_value=places, wrap_negative_indices=False)
        return entry_F, target_F


def _read(x: jax.Array, rows: jax.Array) -> jax.Array:
    """The rows with these numbers; zeros for numbers out of range. Gradients are added up in float32."""
    read = x.astype(jnp.float32).at[rows].get(
        mode="fill", fill_value=0, indices_are_sorted=True, wrap_negative_indices=False
    )
    return read.astype(x.dtype)


def _joined(x_HDF: jax.Array) -> jax.Array:
    """The rows of all devices of a host."""
    return x_HDF.reshape(len(x_HDF), -1, *x_HDF.shape[3:])
