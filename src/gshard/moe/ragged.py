"""Ragged: experts without a capacity: rows sorted by expert, as one product, in blocks, or over hosts first."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gshard.api.row_functions import put_rows, take_rows
from gshard.moe.feed_forward import hidden
from gshard.moe.gating import Choice, Gating, keep

# Sorted rows: tokens in the order of their experts, for the dispatches without slots.


def first_rows(gating: Gating, starts_E: jax.Array) -> jax.Array:
    """For each group and expert the row of the first token: offset_GE."""
    return starts_E + jnp.cumsum(gating.slots_GE, axis=0) - gating.slots_GE


def row_of(choice: Choice, offset_GE: jax.Array, none: int) -> jax.Array:
    """For each of T tokens the row of its choice: row_T; ``none`` where it is not kept."""
    row_GS = jnp.take_along_axis(offset_GE, choice.expert_GS, axis=1) + choice.position_GS
    return jnp.where(choice.kept_GS, row_GS, none).reshape(-1)


def table_of_tokens(rows_of_choices: list[jax.Array], rows: int) -> jax.Array:
    """The token in each row: table_X, with T in unused rows. Choices beyond the last row are left out.

    >>> table_of_tokens([jnp.array([2, 0]), jnp.array([1, 9])], 4).tolist()
    [1, 0, 0, 2]
    """
    tokens = rows_of_choices[0].shape[0]
    token_T = jnp.arange(tokens, dtype=jnp.int32)
    table_X = jnp.full((rows,), tokens, jnp.int32)
    for row_T in rows_of_choices:
        table_X = table_X.at[row_T].set(token_T, mode="drop", wrap_negative_indices=False)
    return table_X


def rows_of_experts(gating: Gating, partitions: int, room: int) -> jax.Array:
    """The rows of each expert, of all its tokens if the partition has room for them: sizes_E."""
    sizes_E = jnp.sum(gating.slots_GE, axis=0)
    if room >= most_rows(gating, partitions):
        return sizes_E
    sorted_PE = jnp.sort(sizes_E.reshape(partitions, -1), axis=1)
    own_experts = sorted_PE.shape[1]
    smaller_PE = jnp.cumsum(sorted_PE, axis=1) - sorted_PE
    # Experts of one partition have one limit, so only those with the most tokens lose some. If the i smallest experts
    # have all of their rows, the others share what is left. The largest share is the limit.
    shares_PE = (room - smaller_PE) // (own_experts - jnp.arange(own_experts, dtype=sizes_E.dtype))
    return jnp.minimum(sizes_E, jnp.repeat(jnp.max(shares_PE, axis=1), own_experts))


def most_rows(gating: Gating, partitions: int) -> int:
    """How many rows a partition has at most, whatever tokens choose."""
    own_experts = gating.slots_GE.shape[1] // partitions
    return gating.first.expert_GS.size * min(len(gating.choices), own_experts)


def within_room(
    gating: Gating, partitions: int, room: int, valid_GS: jax.Array | None, *, replicas: int = 1, any_number: bool
) -> Gating:
    """The gating without the choices beyond the rows of their experts: the last tokens are dropped."""

    def kept(choices: tuple[Choice, ...], slots_GE: jax.Array) -> list[jax.Array]:
        own = gating._replace(choices=choices, slots_GE=slots_GE)
        sizes_E = rows_of_experts(own, partitions, room)
        offset_GE = first_rows(own, jnp.zeros_like(sizes_E))
        return [
            (row_of(choice, offset_GE, 0).reshape(choice.expert_GS.shape) < jnp.take(sizes_E, choice.expert_GS))
            for choice in choices
        ]

    if room * replicas >= most_rows(gating, partitions):
        return gating
    kept_GS = by_replica(kept, gating.choices, gating.slots_GE, replicas=replicas)
    return keep(gating, kept_GS, valid_GS, any_number=any_number)


def by_replica(f: Callable[..., Any], *arrays: Any, replicas: int) -> Any:
    """Calls ``f(*arrays)`` for each of so many equal parts of the first dimensions, and joins the results along theirs.

    >>> by_replica(lambda x: x - x[0], jnp.array([3, 4, 8, 6]), replicas=2).tolist()
    [0, 1, 0, -2]
    """
    if replicas == 1:
        return f(*arrays)
    parts = jax.tree.map(lambda x: x.reshape(replicas, len(x) // replicas, *x.shape[1:]), arrays)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), jax.vmap(f)(*parts))


# Blocks: experts without a capacity, one small block of rows after the other.


def blocks_expert_layer(
    gating: Gating, inputs_GSM: jax.Array, weights: dict[str, jax.Array], activation: str = "relu"
) -> jax.Array:
    """Dispatch, experts and combine of a gating that dropped nothing (capacity S)."""
    G, S, M = inputs_GSM.shape
    E = weights["wi"].shape[0]
    tokens = G * S
    chosen = len(gating.choices) * tokens
    # The power of two nearest below the mean load of an expert, from 8 to 128: with fewer rows the matrix unit is
    # partly idle; with more rows, more of them are empty.
    mean_load = max(chosen // E, 1)
    R = min(max(1 << (mean_load.bit_length() - 1), 8), 128)
    blocks = (chosen + min(E, chosen) * (R - 1)) // R

    rows_E = jnp.sum(gating.slots_GE, axis=0)
    end_E = jnp.cumsum((rows_E + R - 1) // R)  # one past the last block of an expert
    # The rows of an expert follow the blocks of the experts before it.
    offset_GE = first_rows(gating, (end_E - (rows_E + R - 1) // R) * R)
    rows = [row_of(choice, offset_GE, blocks * R) for choice in gating.choices]
    table_X = table_of_tokens(rows, blocks * R)
    # Blocks past the last one in use read some expert's weights and only rows of zeros.
    expert_K = jnp.sum(jnp.arange(blocks, dtype=jnp.int32)[:, None] >= end_E[None, :-1], axis=1, dtype=jnp.int32)

    inputs_TM = inputs_GSM.reshape(tokens, M)

    def block(_: None, of_block: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        table_R, expert = of_block
        inputs_RM = inputs_TM.at[table_R].get(mode="fill", fill_value=0, wrap_negative_indices=False)
        own = {name: jax.lax.dynamic_index_in_dim(w, expert, keepdims=False) for name, w in weights.items()}
        return None, hidden(activation, lambda name: inputs_RM @ own[name]) @ own["wo"]

    _, outputs_KRM = jax.lax.scan(block, None, (table_X.reshape(blocks, R), expert_K))
    outputs_XM = outputs_KRM.reshape(blocks * R, M)

    def weighted(choice: Choice, row_T: jax.Array) -> jax.Array:
        rows_TM = outputs_XM.at[row_T].get(mode="fill", fill_value=0, wrap_negative_indices=False).astype(jnp.float32)
        return choice.weight_GS.reshape(tokens, 1) * rows_TM

    of_choices = [weighted(choice, row_T) for choice, row_T in zip(gating.choices, rows, strict=True)]
    return functools.reduce(operator.add, of_choices).reshape(G, S, M)


# Two hops: rows go to hosts first, and inside each host to the devices of their experts.


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


Mark = Callable[[jax.Array, str], jax.Array]


class _Rows(NamedTuple):
    """Which row each choice has in the partition of its expert."""

    row_KT: list[jax.Array]  # int32, of each of the k choices; X if it is not kept
    part_KT: list[jax.Array]  # int32, the partition of its expert
    weight_KT: list[jax.Array]  # float32, its combine weight
    sizes_PE: jax.Array  # int32, the rows of each expert of each partition

    def in_part(self, part: jax.Array, room: int) -> list[jax.Array]:
        """The row of each token and choice in this partition; ``room`` if it is in another."""
        each = zip(self.part_KT, self.row_KT, strict=True)
        return [jnp.where(part_T == part, row_T, room) for part_T, row_T in each]

    def in_all(self, room: int) -> jax.Array:
        """The row of each token and choice in the rows of all partitions: row_TK, P * ``room`` if it is not kept."""
        none = len(self.sizes_PE) * room
        each = zip(self.part_KT, self.row_KT, strict=True)
        return jnp.stack([jnp.where(row_T < room, part_T * room + row_T, none) for part_T, row_T in each], axis=1)

    def combined(self, rows_KTM: list[jax.Array]) -> jax.Array:
        """The weighted sum of the rows of a token's choices, in float32."""
        each = zip(self.weight_KT, rows_KTM, strict=True)
        return functools.reduce(
            operator.add, [weight_T[:, None] * rows_TM.astype(jnp.float32) for weight_T, rows_TM in each]
        )


def _rows_of(gating: Gating, experts: int, partitions: int, room: int) -> _Rows:
    G, S = gating.first.expert_GS.shape
    own_experts = experts // partitions
    sizes_PE = rows_of_experts(gating, partitions, room).reshape(partitions, own_experts)
    starts_PE = jnp.cumsum(sizes_PE, axis=1) - sizes_PE
    offset_GE = first_rows(gating, starts_PE.reshape(experts))
    return _Rows(
        [row_of(choice, offset_GE, room) for choice in gating.choices],
        [(choice.expert_GS // own_experts).reshape(G * S) for choice in gating.choices],
        [choice.weight_GS.reshape(G * S) for choice in gating.choices],
        sizes_PE,
    )


def ragged_expert_layer(
    gating: Gating,
    inputs_GSM: jax.Array,
    weights: dict[str, jax.Array],
    *,
    activation: str,
    partitions: int,
    replicas: int = 1,
    room: int,
    mark: Mark = lambda x, names: x,
    sends_rows: bool,
    hops: Hops | None = None,
) -> jax.Array:
    """Dispatch, experts and combine."""
    M, E, P, X = inputs_GSM.shape[2], weights["wi"].shape[0], partitions, room

    def rows_of(choices: tuple[Choice, ...], slots_GE: jax.Array) -> _Rows:
        return _rows_of(gating._replace(choices=choices, slots_GE=slots_GE), E, P, X)

    def put(row_TK: jax.Array, inputs_GSM: jax.Array) -> jax.Array:
        return put_rows(inputs_GSM.reshape(-1, M), row_TK, P * X).reshape(P, X, M)

    def take(row_TK: jax.Array, rows: _Rows, outputs_PXM: jax.Array) -> jax.Array:
        returned_TKM = take_rows(outputs_PXM.reshape(P * X, M), row_TK)
        weight_TK = jnp.stack(rows.weight_KT, axis=1)
        return jnp.sum(weight_TK[:, :, None] * returned_TKM.astype(jnp.float32), axis=1)

    def answered(inputs_XM: jax.Array, sizes_E: jax.Array, own: dict[str, jax.Array]) -> jax.Array:
        hidden_XH = hidden(activation, lambda name: jax.lax.ragged_dot(inputs_XM, own[name], sizes_E))
        return jax.lax.ragged_dot(hidden_XH, own["wo"], sizes_E)

    each = functools.partial(by_replica, replicas=replicas)
    rows = each(rows_of, gating.choices, gating.slots_GE)
    own = {name: _of_parts(w, P, replicas) for name, w in weights.items()}
    # Replicas and partitions are one dimension: JAX compiles ragged products with one dimension of batches at most. The
    # replicas are the major part, so that a split over the experts alone, with several batches on a device (which XLA
    # for TPU does not compile), is no sharding of it.
    experts = jax.vmap(answered)
    names = "partitions _ model"
    row_TK = each(lambda rows: rows.in_all(X), rows)
    if hops is not None:
        weight_TK = each(lambda rows: jnp.stack(rows.weight_KT, axis=1), rows)
        inputs_PXM, received = hops.there(row_TK, weight_TK, inputs_GSM.reshape(-1, M), each, mark)
        outputs_PXM = mark(experts(inputs_PXM, rows.sizes_PE, own), names)
        return hops.back(outputs_PXM, received, each, mark).reshape(inputs_GSM.shape)
    if sends_rows:
        outputs_PXM = mark(experts(mark(each(put, row_TK, inputs_GSM), names), rows.sizes_PE, own), names)
        return each(take, row_TK, rows, outputs_PXM).reshape(inputs_GSM.shape)
    outputs_PXM = experts(mark(each(functools.partial(_taken, X), rows, inputs_GSM), names), rows.sizes_PE, own)
    # Split by part, so that one sum is sent and not the rows of each choice.
    returned_PTM = mark(each(functools.partial(_returned, X), rows, outputs_PXM), names)
    return each(lambda x_PTM: jnp.sum(x_PTM, axis=0), returned_PTM).reshape(inputs_GSM.shape)


def _taken(room: int, rows: _Rows, inputs_GSM: jax.Array) -> jax.Array:
    """The rows of each partition, of all tokens: inputs_PXM."""
    inputs_TM = inputs_GSM.reshape(-1, inputs_GSM.shape[2])

    def of_part(part: jax.Array) -> jax.Array:
        table_X = table_of_tokens(rows.in_part(part, room), room)
        return inputs_TM.at[table_X].get(mode="fill", fill_value=0, wrap_negative_indices=False)

    return jax.vmap(of_part)(jnp.arange(len(rows.sizes_PE), dtype=jnp.int32))


def _returned(room: int, rows: _Rows, outputs_PXM: jax.Array) -> jax.Array:
    """The part of each partition in the results of all tokens."""

    def of_part(part: jax.Array, outputs_XM: jax.Array) -> jax.Array:
        return rows.combined(
            [
                outputs_XM.at[row_T].get(mode="fill", fill_value=0, wrap_negative_indices=False)
                for row_T in rows.in_part(part, room)
            ]
        )

    return jax.vmap(of_part)(jnp.arange(len(outputs_PXM), dtype=jnp.int32), outputs_PXM)


def _of_parts(x: jax.Array, partitions: int, replicas: int) -> jax.Array:
    """The weights [E, ...] of each partition of each replica: [R * P, E / P, ...]. A device has those of its own."""
    x = x.reshape(partitions, x.shape[0] // partitions, *x.shape[1:])
    return x if replicas == 1 else jnp.broadcast_to(x, (replicas, *x.shape)).reshape(-1, *x.shape[1:])
