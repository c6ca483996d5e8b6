"""Ragged: experts without a capacity, as one product whose rows are sorted by expert (``jax.lax.ragged_dot``).

    tokens ─▶ rows sorted by expert ─▶ ragged_dot, activation, ragged_dot ─▶ each token reads its rows

Nothing is ever dropped and no row is padding, whatever the loads. With P partitions each has E/P of the experts, a
table of its own of the rows that go there, and room for as many rows as could come. Over devices that is one all-gather
of the tokens, products without any communication, and one reduce-scatter of the sums: more bytes than two all-to-alls
with a capacity as soon as P is larger than the capacity factor, and room for T * min(k, E/P) rows on each device.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp

from gshard.moe.feed_forward import hidden
from gshard.moe.gating import Choice, Gating
from gshard.moe.sorted_rows import first_rows, row_of, table_of_tokens

Mark = Callable[[jax.Array], jax.Array]


def ragged_expert_layer(
    gating: Gating,
    inputs_GSM: jax.Array,
    weights: dict[str, jax.Array],
    activation: str = "relu",
    partitions: int = 1,
    mark: Mark = lambda x: x,
) -> jax.Array:
    """Dispatch, experts and combine of a gating that dropped nothing (capacity S).

    Args:
        gating: routing with a capacity of at least S.
        inputs_GSM: the tokens.
        weights: wi, wo and, with SwiGLU, wi_gate of the experts, in the dtype of the inputs.
        activation: ``relu`` or ``swiglu``.
        partitions: P, into how many parts the experts are cut; it divides E.
        mark: splits an array whose first dimension is P over them.

    Returns:
        outputs_GSM in float32; the same, to rounding, as the other dispatches give without drops.
    """
    G, S, M = inputs_GSM.shape
    E, P = weights["wi"].shape[0], partitions
    tokens, own_experts = G * S, E // P
    X = tokens * min(len(gating.choices), own_experts)

    sizes_PE = jnp.sum(gating.slots_GE, axis=0).reshape(P, own_experts)
    starts_PE = jnp.cumsum(sizes_PE, axis=1) - sizes_PE
    offset_GE = first_rows(gating, starts_PE.reshape(E))
    rows = [row_of(choice, offset_GE, X) for choice in gating.choices]
    parts = [(choice.expert_GS // own_experts).reshape(tokens) for choice in gating.choices]
    own = {name: w.reshape(P, own_experts, *w.shape[1:]) for name, w in weights.items()}
    inputs_TM = inputs_GSM.reshape(tokens, M)

    def rows_in(part: jax.Array) -> list[jax.Array]:
        """The row of each token and choice in this part; X if it is in another."""
        return [jnp.where(part_T == part, row_T, X) for part_T, row_T in zip(parts, rows, strict=True)]

    def taken(part: jax.Array) -> jax.Array:
        table_X = table_of_tokens(rows_in(part), X)
        return inputs_TM.at[table_X].get(mode="fill", fill_value=0, wrap_negative_indices=False)

    def answered(inputs_XM: jax.Array, sizes_E: jax.Array, own: dict[str, jax.Array]) -> jax.Array:
        hidden_XH = hidden(activation, lambda name: jax.lax.ragged_dot(inputs_XM, own[name], sizes_E))
        return jax.lax.ragged_dot(hidden_XH, own["wo"], sizes_E)

    def returned(part: jax.Array, outputs_XM: jax.Array) -> jax.Array:
        def weighted(choice: Choice, row_T: jax.Array) -> jax.Array:
            rows_TM = outputs_XM.at[row_T].get(mode="fill", fill_value=0, wrap_negative_indices=False)
            return choice.weight_GS.reshape(tokens, 1) * rows_TM.astype(jnp.float32)

        of_choices = [weighted(choice, row_T) for choice, row_T in zip(gating.choices, rows_in(part), strict=True)]
        return functools.reduce(operator.add, of_choices)

    part_P = jnp.arange(P, dtype=jnp.int32)
    dispatched_PXM = mark(jax.vmap(taken)(part_P))
    outputs_PXM = jax.vmap(answered)(dispatched_PXM, sizes_PE, own)
    # Split by part, so that one sum is sent and not the rows of each choice.
    returned_PTM = mark(jax.vmap(returned)(part_P, outputs_PXM))
    return jnp.sum(returned_PTM, axis=0).reshape(G, S, M)
