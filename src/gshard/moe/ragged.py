"""Ragged: experts without a capacity, as one product whose rows are sorted by expert (``jax.lax.ragged_dot``).

    tokens ─▶ rows sorted by expert ─▶ ragged_dot, activation, ragged_dot ─▶ each token reads its rows

No row is padding of an expert, whatever the loads. With P partitions each has E/P of the experts, and room for X rows:
for all that could come, T * min(k, E/P), nothing is dropped. Rows come to partitions in one of two ways:

    ragged              each device gathers all tokens and reads those of its experts. The sums over partitions are
                        reduced and scattered: T * M numbers in each direction, however many experts a token has.
    ragged_all_to_all   each device sends its tokens to the partitions of their experts, which send their rows back:
                        k * T / P * M numbers in each direction.
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
from gshard.moe.gating import Gating
from gshard.moe.sorted_rows import first_rows, row_of, rows_of_experts, table_of_tokens

Mark = Callable[[jax.Array], jax.Array]


class _Rows(NamedTuple):
    """Which row each choice has in the partition of its expert.

    Attributes:
        row_KT: int32, of each of the k choices; X if it is not kept.
        part_KT: int32, the partition of its expert.
        weight_KT: float32, its combine weight.
        sizes_PE: int32, the rows of each expert of each partition.
        room: X, the rows of a partition.
    """

    row_KT: list[jax.Array]
    part_KT: list[jax.Array]
    weight_KT: list[jax.Array]
    sizes_PE: jax.Array
    room: int

    def in_part(self, part: jax.Array) -> list[jax.Array]:
        """The row of each token and choice in this partition; X if it is in another."""
        each = zip(self.part_KT, self.row_KT, strict=True)
        return [jnp.where(part_T == part, row_T, self.room) for part_T, row_T in each]

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
        room,
    )


def ragged_expert_layer(
    gating: Gating,
    inputs_GSM: jax.Array,
    weights: dict[str, jax.Array],
    *,
    activation: str,
    partitions: int,
    room: int,
    mark: Mark = lambda x: x,
    sends_rows: bool,
) -> jax.Array:
    """Dispatch, experts and combine.

    Args:
        gating: routing with a capacity of at least S, ``within_room``.
        inputs_GSM: the tokens.
        weights: wi, wo and, with SwiGLU, wi_gate of the experts, in the dtype of the inputs.
        activation: ``relu`` or ``swiglu``.
        partitions: P, the number of parts of the experts; it divides E.
        room: X, the rows of a partition.
        mark: splits an array whose first dimension is P over them.
        sends_rows: whether rows are sent to the partitions (``ragged_all_to_all``); otherwise all tokens are gathered.

    Returns:
        outputs_GSM in float32; the same, to rounding, as the other dispatches give without drops.
    """
    G, S, M = inputs_GSM.shape
    E, P = weights["wi"].shape[0], partitions
    X = room
    rows = _rows_of(gating, E, P, X)
    own = {name: w.reshape(P, E // P, *w.shape[1:]) for name, w in weights.items()}
    inputs_TM = inputs_GSM.reshape(G * S, M)

    def answered(inputs_XM: jax.Array, sizes_E: jax.Array, own: dict[str, jax.Array]) -> jax.Array:
        hidden_XH = hidden(activation, lambda name: jax.lax.ragged_dot(inputs_XM, own[name], sizes_E))
        return jax.lax.ragged_dot(hidden_XH, own["wo"], sizes_E)

    if sends_rows:
        row_TK = jnp.stack(
            [
                jnp.where(row_T < X, part_T * X + row_T, P * X)
                for part_T, row_T in zip(rows.part_KT, rows.row_KT, strict=True)
            ],
            axis=1,
        )
        dispatched_PXM = mark(put_rows(inputs_TM, row_TK, P * X).reshape(P, X, M))
        outputs_PXM = mark(jax.vmap(answered)(dispatched_PXM, rows.sizes_PE, own))
        returned_TKM = take_rows(outputs_PXM.reshape(P * X, M), row_TK)
        weight_TK = jnp.stack(rows.weight_KT, axis=1)
        return jnp.sum(weight_TK[:, :, None] * returned_TKM.astype(jnp.float32), axis=1).reshape(G, S, M)

    def taken(part: jax.Array) -> jax.Array:
        table_X = table_of_tokens(rows.in_part(part), X)
        return inputs_TM.at[table_X].get(mode="fill", fill_value=0, wrap_negative_indices=False)

    def returned(part: jax.Array, outputs_XM: jax.Array) -> jax.Array:
        return rows.combined(
            [
                outputs_XM.at[row_T].get(mode="fill", fill_value=0, wrap_negative_indices=False)
                for row_T in rows.in_part(part)
            ]
        )

    part_P = jnp.arange(P, dtype=jnp.int32)
    dispatched_PXM = mark(jax.vmap(taken)(part_P))
    outputs_PXM = jax.vmap(answered)(dispatched_PXM, rows.sizes_PE, own)
    # Split by part, so that one sum is sent and not the rows of each choice.
    returned_PTM = mark(jax.vmap(returned)(part_P, outputs_PXM))
    return jnp.sum(returned_PTM, axis=0).reshape(G, S, M)
