"""Mixtures of experts with the marks of the paper and no others: groups before and after, experts between."""

import jax
import jax.numpy as jnp

import gshard
from families.case import GRID, LINE, Family

CASES = Family("experts")

G, S, E, C, M, H = 8, 64, 8, 16, 32, 128  # groups, tokens of a group, experts, capacity, model, hidden
TOKENS, MASK, WI, WO = (G, S, M), (G, S, E, C), (E, M, H), (E, H, M)


def expert_layer(tokens, mask, wi, wo, axis="x"):
    """Algorithm 2 of the paper, with the dispatch mask given."""
    tokens = gshard.split(tokens, 0, axis)
    dispatched = gshard.split(jnp.einsum("gsec,gsm->egcm", mask, tokens), 0, axis)
    h = jax.nn.relu(jnp.einsum("egcm,emh->egch", dispatched, wi))
    outputs = gshard.split(jnp.einsum("egch,ehm->gecm", h, wo), 0, axis)
    return jnp.einsum("gsec,gecm->gsm", mask, outputs)


@CASES.add(LINE, TOKENS, MASK, WI, WO, gradient=(0, 1, 2, 3))
def dispatch_and_combine(tokens, mask, wi, wo):
    return expert_layer(tokens, mask, wi, wo)


@CASES.add(GRID, TOKENS, MASK, WI, WO, gradient=(2, 3))
def dispatch_and_combine_two_axes(tokens, mask, wi, wo):
    return expert_layer(tokens, mask, wi, wo, ("x", "y"))


@CASES.add(GRID, TOKENS, MASK, WI, WO, gradient=(0, 2, 3))
def experts_and_hidden(tokens, mask, wi, wo):
    """Experts over one axis, the hidden units of each over the other."""
    wi = gshard.shard(wi, jax.sharding.PartitionSpec("x", None, "y"))
    wo = gshard.shard(wo, jax.sharding.PartitionSpec("x", "y"))
    tokens = gshard.split(tokens, 0, "x")
    h = jax.nn.relu(jnp.einsum("egcm,emh->egch", jnp.einsum("gsec,gsm->egcm", mask, tokens), wi))
    outputs = gshard.split(jnp.einsum("egch,ehm->gecm", h, wo), 0, "x")
    return jnp.einsum("gsec,gecm->gsm", mask, outputs)


@CASES.add(LINE, TOKENS, (M, E), WI, WO, gradient=(0, 1, 2, 3))
def gated(tokens, router, wi, wo):
    """The first choice of a router, positions by a running sum within each group."""
    tokens = gshard.split(tokens, 0, "x")
    gates = jax.nn.softmax(jnp.einsum("gsm,me->gse", tokens, gshard.replicate(router)))
    chosen = jax.nn.one_hot(jnp.argmax(gates, -1), E)
    position = jnp.sum((jnp.cumsum(chosen, 1) - 1) * chosen, -1)
    kept = jax.nn.one_hot(position.astype(jnp.int32), C)
    mask = jnp.einsum("gse,gsc->gsec", chosen * jnp.max(gates, -1, keepdims=True), kept)
    return expert_layer(tokens, mask, wi, wo)
