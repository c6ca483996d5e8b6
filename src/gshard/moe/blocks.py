"""Blocks: experts without a capacity, one small block of rows after the other.

Padding every expert to the largest possible load would multiply the work by E. Instead the rows of
each expert fill blocks of R rows, the last of which is partly empty, and a scan multiplies one block
at a time with the weights of the expert it belongs to. Nothing is ever dropped, so what a token gets
never depends on the others of its batch: the dispatch for decoding.

The number of blocks is fixed beforehand by the worst case. With A choices over at most U = min(E, A)
experts in use, sum_e ceil(n_e/R) <= (A + U(R-1))/R.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from gshard.moe.gating import Choice, Gating


def rows_of_a_block(choices: int, experts: int) -> int:
    """R: the power of two nearest below the mean load of an expert, from 8 to 128 rows.

    Fewer leaves the matrix unit idle; more fills blocks with empty rows.

    >>> rows_of_a_block(16, 64), rows_of_a_block(4096, 64), rows_of_a_block(10**6, 8)
    (8, 64, 128)
    """
    mean_load = max(choices // experts, 1)
    return min(max(1 << (mean_load.bit_length() - 1), 8), 128)


def blocks_expert_layer(gating: Gating, inputs_GSM: jax.Array, wi_EMH: jax.Array, wo_EHM: jax.Array) -> jax.Array:
    """Dispatch, experts and combine of a gating that dropped nothing (capacity S).

    Args:
        gating: routing with a capacity of at least S.
        inputs_GSM: the tokens.
        wi_EMH, wo_EHM: the experts, in the dtype of the inputs.

    Returns:
        outputs_GSM in float32; the same, to rounding, as both other dispatches give without drops.
    """
    G, S, M = inputs_GSM.shape
    E = wi_EMH.shape[0]
    tokens = G * S
    R = rows_of_a_block(2 * tokens, E)
    blocks = (2 * tokens + min(E, 2 * tokens) * (R - 1)) // R

    rows_GE = gating.slots_GE
    rows_E = jnp.sum(rows_GE, axis=0)
    end_E = jnp.cumsum((rows_E + R - 1) // R)  # one past the last block of an expert
    # Row 0 of group g at expert e: behind the blocks of the experts before e and the rows of the groups before g.
    offset_GE = (end_E - (rows_E + R - 1) // R) * R + jnp.cumsum(rows_GE, axis=0) - rows_GE

    def row_of(choice: Choice) -> jax.Array:
        row_GS = jnp.take_along_axis(offset_GE, choice.expert_GS, axis=1) + choice.position_GS
        return jnp.where(choice.kept_GS, row_GS, blocks * R).reshape(tokens)

    rows_1_T, rows_2_T = row_of(gating.first), row_of(gating.second)
    token_T = jnp.arange(tokens, dtype=jnp.int32)
    table_X = jnp.full((blocks * R,), tokens, jnp.int32)
    table_X = (
        table_X.at[rows_1_T]
        .set(token_T, mode="drop", wrap_negative_indices=False)
        .at[rows_2_T]
        .set(token_T, mode="drop", wrap_negative_indices=False)
    )
    # Blocks past the last one in use read some expert's weights and only rows of zeros.
    expert_K = jnp.sum(jnp.arange(blocks, dtype=jnp.int32)[:, None] >= end_E[None, :-1], axis=1, dtype=jnp.int32)

    inputs_TM = inputs_GSM.reshape(tokens, M)

    def block(_: None, of_block: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        table_R, expert = of_block
        inputs_RM = inputs_TM.at[table_R].get(mode="fill", fill_value=0, wrap_negative_indices=False)
        wi_MH = jax.lax.dynamic_index_in_dim(wi_EMH, expert, keepdims=False)
        wo_HM = jax.lax.dynamic_index_in_dim(wo_EHM, expert, keepdims=False)
        return None, jax.nn.relu(inputs_RM @ wi_MH) @ wo_HM

    _, outputs_KRM = jax.lax.scan(block, None, (table_X.reshape(blocks, R), expert_K))
    outputs_XM = outputs_KRM.reshape(blocks * R, M)

    def weighted(choice: Choice, row_T: jax.Array) -> jax.Array:
        rows_TM = outputs_XM.at[row_T].get(mode="fill", fill_value=0, wrap_negative_indices=False).astype(jnp.float32)
        return choice.weight_GS.reshape(tokens, 1) * rows_TM

    return (weighted(gating.first, rows_1_T) + weighted(gating.second, rows_2_T)).reshape(G, S, M)
