"""Dispatch and combine: tokens to the slots of their experts, and the experts' outputs back.

    dispatched_EGCM = dispatch_gather(token_of_slot(gating, E, C), inputs_GSM)
    outputs_GSM = combine_gather(gating, experts(dispatched_EGCM))

Both ways have the same result. ``einsum`` multiplies with one-hot matrices (Algorithm 2), which costs S/H of the
products of the experts. ``gather`` inverts the choices into a table from slots to tokens, and moves rows. Both work
within groups, so a split of G splits the work, and the only exchange is the change from G to E between dispatch and
experts. ``blocks`` and ``ragged`` have no slots.
"""

from __future__ import annotations

import functools
import operator

import jax
import jax.numpy as jnp

from gshard.moe.gating import Choice, Gating


def one_hot_weights(gating: Gating, experts: int, capacity: int) -> tuple[jax.Array, jax.Array]:
    """The matrices of Algorithm 2, line 2: combine weights and the mask of their slots.

    The mask has the kept choices. The paper's ``weights != 0`` would lose those whose weight underflows.

    >>> from gshard.moe.gating import top_k_gating
    >>> gating = top_k_gating(jnp.array([[[2.0, 1.0, 0.0]]]), capacity=1)
    >>> one_hot_weights(gating, 3, 1)[1][0, 0, :, 0].tolist()
    [True, True, False]
    """
    slots = [_slots(choice, experts, capacity) for choice in gating.choices]
    weighted = [
        jnp.where(slots_GSEC, choice.weight_GS[:, :, None, None], 0.0)
        for slots_GSEC, choice in zip(slots, gating.choices, strict=True)
    ]
    return functools.reduce(operator.add, weighted), functools.reduce(operator.or_, slots)


def _slots(choice: Choice, experts: int, capacity: int) -> jax.Array:
    expert_GSE = choice.expert_GS[:, :, None] == jnp.arange(experts, dtype=jnp.int32)
    position_GSC = choice.position_GS[:, :, None] == jnp.arange(capacity, dtype=jnp.int32)
    return (expert_GSE & choice.kept_GS[:, :, None])[:, :, :, None] & position_GSC[:, :, None, :]


def dispatch_einsum(dispatch_GSEC: jax.Array, inputs_GSM: jax.Array) -> jax.Array:
    """Algorithm 2, line 3: dispatched_EGCM; unused slots are zero."""
    return jnp.einsum("GSEC,GSM->EGCM", dispatch_GSEC.astype(inputs_GSM.dtype), inputs_GSM)


def combine_einsum(combine_GSEC: jax.Array, outputs_EGCM: jax.Array) -> jax.Array:
    """Algorithm 2, last line, accumulated in float32: each token's experts' outputs, weighted."""
    weights_GSEC = combine_GSEC.astype(outputs_EGCM.dtype)
    return jnp.einsum("GSEC,EGCM->GSM", weights_GSEC, outputs_EGCM, preferred_element_type=jnp.float32)


def token_of_slot(gating: Gating, experts: int, capacity: int) -> jax.Array:
    """The inverse of the choices: the token in each slot.

    >>> from gshard.moe.gating import top_k_gating
    >>> gating = top_k_gating(jnp.array([[[2.0, 1.0, 0.0], [3.0, 0.0, 1.0]]]), capacity=1)
    >>> token_of_slot(gating, 3, 1).tolist()
    [[[0], [0], [1]]]
    """
    S = gating.choices[0].expert_GS.shape[1]

    def of_group(choices: tuple[Choice, ...]) -> jax.Array:
        table_EC = jnp.full((experts, capacity), S, jnp.int32)
        for choice in choices:
            # A choice that is not kept points past the buffer and is not written.
            position_S = jnp.where(choice.kept_GS, choice.position_GS, capacity)
            table_EC = table_EC.at[choice.expert_GS, position_S].set(
                jnp.arange(S, dtype=jnp.int32), mode="drop", wrap_negative_indices=False
            )
        return table_EC

    return jax.vmap(of_group)(gating.choices)


def dispatch_gather(table_GEC: jax.Array, inputs_GSM: jax.Array) -> jax.Array:
    """dispatched_EGCM by reading rows; unused slots are zero."""

    def of_group(table_EC: jax.Array, inputs_SM: jax.Array) -> jax.Array:
        return inputs_SM.at[table_EC].get(mode="fill", fill_value=0, wrap_negative_indices=False)

    return jnp.transpose(jax.vmap(of_group)(table_GEC, inputs_GSM), (1, 0, 2, 3))


def combine_gather(gating: Gating, outputs_EGCM: jax.Array) -> jax.Array:
    """Each token's experts' outputs, weighted and added in float32."""
    outputs_GECM = jnp.transpose(outputs_EGCM, (1, 0, 2, 3))

    def of_group(choice: Choice, outputs_ECM: jax.Array) -> jax.Array:
        position_S = jnp.where(choice.kept_GS, choice.position_GS, outputs_ECM.shape[1])
        rows_SM = outputs_ECM.at[choice.expert_GS, position_S].get(
            mode="fill", fill_value=0, wrap_negative_indices=False
        )
        return choice.weight_GS[:, None] * rows_SM.astype(jnp.float32)

    return functools.reduce(operator.add, [jax.vmap(of_group)(choice, outputs_GECM) for choice in gating.choices])
