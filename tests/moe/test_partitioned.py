"""The marked layer on several devices: the values of one device, and the paper's communication."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from gshard.moe import TransformerConfig, expert_layer, expert_specs, init_params

CONFIG = TransformerConfig(9, 9, model_dim=8, hidden_dim=16, experts=8, group_size=8, capacity_factor=1.0, partitions=4)


@pytest.mark.parametrize("dispatch", ["einsum", "gather"])
def test_four_devices_compute_what_one_does(dispatch):
    """Values and gradients; forward, tokens are sent once to their experts and once back, and nothing else does."""
    config = dataclasses.replace(CONFIG, dispatch=dispatch)
    params = init_params(expert_specs(config), jax.random.key(0))
    x_BLM, direction_BLM = jax.random.normal(jax.random.key(1), (2, 4, 8, 8))

    def run(params, x_BLM):
        return expert_layer(config, params, x_BLM, key=jax.random.key(2))[0]

    forward = gshard.jit(run, mesh=4)
    np.testing.assert_allclose(forward(params, x_BLM), jax.jit(run)(params, x_BLM), rtol=1e-5, atol=1e-5)
    text = str(forward.lower(params, x_BLM).spmd)
    assert text.count("all_to_all[") == 2
    assert not [word for word in ("all_gather", "psum", "ppermute") if f"{word}[" in text]

    def gradient(params, x_BLM):
        return jax.grad(lambda p, x: jnp.sum(run(p, x) * direction_BLM), argnums=(0, 1))(params, x_BLM)

    got, expected = gshard.jit(gradient, mesh=4)(params, x_BLM), jax.jit(gradient)(params, x_BLM)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, expected)
