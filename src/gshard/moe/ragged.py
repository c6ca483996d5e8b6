"""Ragged: experts without a capacity, as one product whose rows are sorted by expert (``jax.lax.ragged_dot``).

    tokens ─▶ rows sorted by expert ─▶ ragged_dot, activation, ragged_dot ─▶ each token reads its rows

No row is padding of an expert, whatever the loads. With P partitions each has E/P of the experts, and room for X rows:
for all that could come, T * min(k, E/P), nothing is dropped. Rows come to partitions in one of three ways:

    ragged              each device gathers all tokens and reads those of its experts. The sums over partitions are
                        reduced and scattered: T * M numbers in each direction, however many experts a token has.
    ragged_all_to_all   each device sends its tokens to the partitions of their experts, which send their rows back:
                        k * T / P * M numbers in each direction.
    two_hops            the same in two exchanges, between hosts and inside each host (``two_hops``).

R replicas are R such layers beside each other: each has T / R of the tokens, rows of its own, and all experts.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gshard.api.row_functions import put_rows, take_rows
from gshard.moe.feed_forward import hidden
from gshard.moe.gating import Choice, Gating
from gshard.moe.sorted_rows import by_replica, first_rows, row_of, rows_of_experts, table_of_tokens
from gshard.moe.two_hops import Hops

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
    part_P = jnp.arange(P, dtype=jnp.int32)

    def rows_of(choices: tuple[Choice, ...], slots_GE: jax.Array) -> _Rows:
        return _rows_of(gating._replace(choices=choices, slots_GE=slots_GE), E, P, X)

    def put(row_TK: jax.Array, inputs_GSM: jax.Array) -> jax.Array:
        return put_rows(inputs_GSM.reshape(-1, M), row_TK, P * X).reshape(P, X, M)

    def take(row_TK: jax.Array, rows: _Rows, outputs_PXM: jax.Array) -> jax.Array:
        returned_TKM = take_rows(outputs_PXM.reshape(P * X, M), row_TK)
        weight_TK = jnp.stack(rows.weight_KT, axis=1)
        return jnp.sum(weight_TK[:, :, None] * returned_TKM.astype(jnp.float32), axis=1)

    def taken(rows: _Rows, inputs_GSM: jax.Array) -> jax.Array:
        inputs_TM = inputs_GSM.reshape(-1, M)

        def of_part(part: jax.Array) -> jax.Array:
            table_X = table_of_tokens(rows.in_part(part, X), X)
            return inputs_TM.at[table_X].get(mode="fill", fill_value=0, wrap_negative_indices=False)

        return jax.vmap(of_part)(part_P)

    def returned(rows: _Rows, outputs_PXM: jax.Array) -> jax.Array:
        def of_part(part: jax.Array, outputs_XM: jax.Array) -> jax.Array:
            return rows.combined(
                [
                    outputs_XM.at[row_T].get(mode="fill", fill_value=0, wrap_negative_indices=False)
                    for row_T in rows.in_part(part, X)
                ]
            )

        return jax.vmap(of_part)(part_P, outputs_PXM)

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
    outputs_PXM = experts(mark(each(taken, rows, inputs_GSM), names), rows.sizes_PE, own)
    # Split by part, so that one sum is sent and not the rows of each choice.
    returned_PTM = mark(each(returned, rows, outputs_PXM), names)
    return each(lambda x_PTM: jnp.sum(x_PTM, axis=0), returned_PTM).reshape(inputs_GSM.shape)


def _of_parts(x: jax.Array, partitions: int, replicas: int) -> jax.Array:
    """The weights [E, ...] of each partition of each replica: [R * P, E / P, ...]. A device has those of its own."""
    x = x.reshape(partitions, x.shape[0] // partitions, *x.shape[1:])
    return x if replicas == 1 else jnp.broadcast_to(x, (replicas, *x.shape)).reshape(-1, *x.shape[1:])
