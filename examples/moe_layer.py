"""The MoE layer of the GShard paper on eight devices: four marks, two all-to-alls.

python examples/moe_layer.py
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp

import gshard
from gshard import moe


def layer(params, tokens_BLM):
    """Tokens split by group, router replicated, experts split by expert: the marks are inside the layer."""
    outputs_BLM, _ = moe.expert_layer(CONFIG, params, tokens_BLM)
    return outputs_BLM


CONFIG = moe.TransformerConfig(
    source_vocabulary=2, target_vocabulary=2, model_dim=64, hidden_dim=256, experts=8, group_size=128, partitions=8
)
params = moe.init_params(moe.expert_specs(CONFIG), jax.random.key(0))
tokens = jax.random.normal(jax.random.key(1), (32, 32, 64))

on_eight = gshard.jit(layer, mesh=8)
assert jnp.allclose(on_eight(params, tokens), jax.jit(layer)(params, tokens), atol=1e-5)

found = gshard.explain(on_eight, params, tokens)
print(found)
assert found.bytes_by_kind.keys() == {"all_to_all"}
assert sum(row.times for row in found.collectives) == 2


def loss(params, tokens):
    return jnp.square(layer(params, tokens)).mean()


backward = gshard.explain(jax.grad(loss), params, tokens, mesh=8)
print(f"\nwith the backward pass: {backward.bytes_by_kind}")
assert "all_gather" not in backward.bytes_by_kind
