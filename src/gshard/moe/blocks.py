"""Blocks: experts without a capacity, one small block of rows after the other.

Padding each expert to the largest possible load would multiply the work by E. Instead the rows of each expert fill
blocks of R rows, and a scan multiplies one block at a time with the weights of its expert. The last block of an expert
is partly empty. No token is dropped, so the result for a token does not depend on the other tokens of its batch.
Decoding uses this dispatch.

The number of blocks is that of the worst case. With A choices and at most U = min(E, A) experts in use,
sum_e ceil(n_e/R) <= (A + U(R-1))/R.
"""

from __future__ import annotations

import functools
import operator

import jax
import jax.numpy as jnp

from gshard.moe.feed_forward import hidden
from gshard.moe.gating import Choice, Gating
from gshard.moe.sorted_rows import first_rows, row_of, table_of_tokens


def rows_of_a_block(choices: int, experts: int) -> int:
    """R: the power of two nearest below the mean load of an expert, from 8 to 128 rows.

    With fewer rows the matrix unit is partly idle; with more rows, more of them are empty.

    >>> rows_of_a_block(16, 64), rows_of_a_block(4096, 64), rows_of_a_block(10**6, 8)
    (8, 64, 128)
    """
    mean_load = max(choices // experts, 1)
    return min(max(1 << (mean_load.bit_length() - 1), 8), 128)


def blocks_expert_layer(
    gating: Gating, inputs_GSM: jax.Array, weights: dict[str, jax.Array], activation: str = "relu"
) -> jax.Array:
    """Dispatch, experts and combine of a gating that dropped nothing (capacity S)."""
    G, S, M = inputs_GSM.shape
    E = weights["wi"].shape[0]
    tokens = G * S
    chosen = len(gating.choices) * tokens
    R = rows_of_a_block(chosen, E)
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
