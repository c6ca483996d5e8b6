"""Sorted rows: tokens in the order of their experts, for the dispatches without slots (``blocks`` and ``ragged``).

A choice has a position among the tokens of its expert and group. So its row is a sum: the first row of the expert, the
number of tokens of earlier groups with this expert, and this position.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from gshard.moe.gating import Choice, Gating, keep


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


def limits(sizes_E: jax.Array, partitions: int, room: int) -> jax.Array:
    """How many rows an expert may have, so that those of a partition have at most ``room`` rows together: limit_E.

    Experts of one partition have the same limit, the largest one. So only experts with the most tokens lose some.

    >>> limits(jnp.array([9, 2, 6, 1]), 2, 8).tolist()
    [6, 6, 7, 7]
    """
    sorted_PE = jnp.sort(sizes_E.reshape(partitions, -1), axis=1)
    own_experts = sorted_PE.shape[1]
    smaller_PE = jnp.cumsum(sorted_PE, axis=1) - sorted_PE
    # If the i smallest experts have all of their rows, the others share what is left. The largest share is the limit.
    shares_PE = (room - smaller_PE) // (own_experts - jnp.arange(own_experts, dtype=sizes_E.dtype))
    return jnp.repeat(jnp.max(shares_PE, axis=1), own_experts)


def rows_of_experts(gating: Gating, partitions: int, room: int) -> jax.Array:
    """The rows of each expert, of all its tokens if the partition has room for them: sizes_E."""
    sizes_E = jnp.sum(gating.slots_GE, axis=0)
    if room >= most_rows(gating, partitions):
        return sizes_E
    return jnp.minimum(sizes_E, limits(sizes_E, partitions, room))


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
