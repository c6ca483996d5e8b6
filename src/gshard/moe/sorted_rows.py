"""Sorted rows: tokens brought into the order of their experts, without a capacity.

A choice already knows its place among the tokens of its expert and group, so sorting is a sum: the first row of the
expert, the tokens of earlier groups that went there, and this place. ``blocks`` and ``ragged`` begin here.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from gshard.moe.gating import Choice, Gating


def first_rows(gating: Gating, starts_E: jax.Array) -> jax.Array:
    """For each group and expert the row of the first token: offset_GE.

    Args:
        gating: routing with a capacity of at least S.
        starts_E: int32, the first row of each expert.
    """
    return starts_E + jnp.cumsum(gating.slots_GE, axis=0) - gating.slots_GE


def row_of(choice: Choice, offset_GE: jax.Array, none: int) -> jax.Array:
    """For each of T tokens the row of its choice: row_T; ``none`` where it is not kept."""
    row_GS = jnp.take_along_axis(offset_GE, choice.expert_GS, axis=1) + choice.position_GS
    return jnp.where(choice.kept_GS, row_GS, none).reshape(-1)


def table_of_tokens(rows_of_choices: list[jax.Array], rows: int) -> jax.Array:
    """Which token is in a row: table_X, with T in unused rows; choices past the last row are left out.

    >>> table_of_tokens([jnp.array([2, 0]), jnp.array([1, 9])], 4).tolist()
    [1, 0, 0, 2]
    """
    tokens = rows_of_choices[0].shape[0]
    token_T = jnp.arange(tokens, dtype=jnp.int32)
    table_X = jnp.full((rows,), tokens, jnp.int32)
    for row_T in rows_of_choices:
        table_X = table_X.at[row_T].set(token_T, mode="drop", wrap_negative_indices=False)
    return table_X
