"""The gating of the paper as it was before there were others, kept to compare bits with."""

import jax
import jax.numpy as jnp


def top2_gating_before(logits_GSE, capacity, routing, second_expert, key, valid_GS):
    """Choices (expert, position, kept, weight), slots and auxiliary loss."""
    G, S, E = logits_GSE.shape
    gates_GSE = jax.nn.softmax(logits_GSE, axis=-1)

    def best(logits_GSE):
        expert_GS = jnp.argmax(logits_GSE, axis=-1).astype(jnp.int32)
        return expert_GS, expert_GS[:, :, None] == jnp.arange(E, dtype=jnp.int32)

    expert_1_GS, chosen_1_GSE = best(logits_GSE)
    expert_2_GS, chosen_2_GSE = best(jnp.where(chosen_1_GSE, -jnp.inf, logits_GSE))
    gate_1_GS = jnp.sum(jnp.where(chosen_1_GSE, gates_GSE, 0.0), axis=-1)
    gate_2_GS = jnp.sum(jnp.where(chosen_2_GSE, gates_GSE, 0.0), axis=-1)
    both_GS = gate_1_GS + gate_2_GS
    gate_1_GS, gate_2_GS = gate_1_GS / both_GS, gate_2_GS / both_GS

    wanted_GS = valid_GS
    if second_expert == "random" and key is not None:
        wanted_GS = valid_GS & (2.0 * gate_2_GS > jax.random.uniform(key, (G, S), jnp.float32))
    slots_1_GSE = (chosen_1_GSE & valid_GS[:, :, None]).astype(jnp.int32)
    counted_2_GS = valid_GS if routing == "paper" else wanted_GS
    slots_2_GSE = (chosen_2_GSE & counted_2_GS[:, :, None]).astype(jnp.int32)
    first_GE = jnp.sum(slots_1_GSE, axis=1)
    before_1_GSE = jnp.cumsum(slots_1_GSE, axis=1) - slots_1_GSE
    before_2_GSE = jnp.cumsum(slots_2_GSE, axis=1) - slots_2_GSE + first_GE[:, None, :]
    position_1_GS = jnp.sum(jnp.where(chosen_1_GSE, before_1_GSE, 0), axis=-1)
    position_2_GS = jnp.sum(jnp.where(chosen_2_GSE, before_2_GSE, 0), axis=-1)
    kept_1_GS = valid_GS & (position_1_GS < capacity)
    kept_2_GS = wanted_GS & (position_2_GS < capacity)

    tokens_G = jnp.sum(valid_GS, axis=1).astype(jnp.float32)
    gates_GE = jnp.sum(jnp.where(valid_GS[:, :, None], gates_GSE, 0.0), axis=1)
    of_group_G = jnp.sum(first_GE.astype(jnp.float32) * gates_GE, axis=-1) / jnp.maximum(tokens_G, 1.0)
    aux = E * jnp.sum(of_group_G) / jnp.maximum(jnp.sum(tokens_G), 1.0)
    return (
        (expert_1_GS, position_1_GS, kept_1_GS, jnp.where(kept_1_GS, gate_1_GS, 0.0)),
        (expert_2_GS, position_2_GS, kept_2_GS, jnp.where(kept_2_GS, gate_2_GS, 0.0)),
        first_GE + jnp.sum(slots_2_GSE, axis=1),
        aux,
    )
