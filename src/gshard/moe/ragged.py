"""Ragged: experts without a capacity: rows sorted by expert, as one product or in blocks."""

from __future__ import annotations

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


def within_room(gating: Gating, partitions: int, room: int, valid_GS: jax.Array | None, *, replicas: int = 1) -> Gating:
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
    return keep(gating, kept_GS, valid_GS)


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


# Ragged products: the rows of each partition are one product, whose parts are those of its experts.


class _Rows(NamedTuple):
    """The row of each token and choice among the rows of all partitions."""

    row_TK: jax.Array  # int32; P * X if it is not kept
    weight_TK: jax.Array  # float32, the combine weight
    sizes_PE: jax.Array  # int32, the rows of each expert of each partition


def _rows_of(gating: Gating, partitions: int, room: int) -> _Rows:
    own_experts = gating.slots_GE.shape[1] // partitions
    sizes_PE = rows_of_experts(gating, partitions, room).reshape(partitions, own_experts)
    starts_PE = jnp.cumsum(sizes_PE, axis=1) - sizes_PE
    offset_GE = first_rows(gating, starts_PE.reshape(-1))

    def among_all(choice: Choice) -> jax.Array:
        row_T, part_T = row_of(choice, offset_GE, room), choice.expert_GS.reshape(-1) // own_experts
        return jnp.where(row_T < room, part_T * room + row_T, partitions * room)

    weight_KT = [choice.weight_GS.reshape(-1) for choice in gating.choices]
    return _Rows(jnp.stack([*map(among_all, gating.choices)], axis=1), jnp.stack(weight_KT, axis=1), sizes_PE)


def ragged_expert_layer(
    gating: Gating,
    inputs_GSM: jax.Array,
    weights: dict[str, jax.Array],
    *,
    activation: str,
    partitions: int,
    replicas: int,
    room: int,
    mark: Callable[[jax.Array, str], jax.Array],
) -> jax.Array:
    """Dispatch, experts and combine."""
    M, P, X = inputs_GSM.shape[2], partitions, room

    def rows_of(choices: tuple[Choice, ...], slots_GE: jax.Array) -> _Rows:
        return _rows_of(gating._replace(choices=choices, slots_GE=slots_GE), P, X)

    def put(row_TK: jax.Array, inputs_GSM: jax.Array) -> jax.Array:
        return put_rows(inputs_GSM.reshape(-1, M), row_TK, P * X).reshape(P, X, M)

    def take(rows: _Rows, outputs_PXM: jax.Array) -> jax.Array:
        returned_TKM = take_rows(outputs_PXM.reshape(P * X, M), rows.row_TK)
        return jnp.sum(rows.weight_TK[:, :, None] * returned_TKM.astype(jnp.float32), axis=1)

    def answered(inputs_XM: jax.Array, sizes_E: jax.Array, own: dict[str, jax.Array]) -> jax.Array:
        hidden_XH = hidden(activation, lambda name: jax.lax.ragged_dot(inputs_XM, own[name], sizes_E))
        return jax.lax.ragged_dot(hidden_XH, own["wo"], sizes_E)

    each = functools.partial(by_replica, replicas=replicas)
    rows = each(rows_of, gating.choices, gating.slots_GE)
    own = {name: _of_parts(w, P, replicas) for name, w in weights.items()}
    # Replicas and partitions are one dimension: JAX compiles ragged products with one dimension of batches at most. The
    # replicas are the major part, so that a split over the experts alone, with several batches on a device (which XLA
    # for TPU does not compile), is no sharding of it.
    inputs_PXM = mark(each(put, rows.row_TK, inputs_GSM), "partitions _ model")
    outputs_PXM = mark(jax.vmap(answered)(inputs_PXM, rows.sizes_PE, own), "partitions _ model")
    return each(take, rows, outputs_PXM).reshape(inputs_GSM.shape)


def _of_parts(x: jax.Array, partitions: int, replicas: int) -> jax.Array:
    """The weights [E, ...] of each partition of each replica: [R * P, E / P, ...]. A device has those of its own."""
    x = x.reshape(partitions, x.shape[0] // partitions, *x.shape[1:])
    return x if replicas == 1 else jnp.broadcast_to(x, (replicas, *x.shape)).reshape(-1, *x.shape[1:])
