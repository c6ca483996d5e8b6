"""The marked layer on several devices: the values of one device, and the paper's communication."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from gshard.moe import TransformerConfig, expert_layer, expert_specs
from moe import naive

CONFIG = TransformerConfig(9, 9, model_dim=8, hidden_dim=16, experts=8, group_size=8, capacity_factor=1.0, partitions=4)


@pytest.mark.parametrize("dispatch", ["einsum", "gather"])
def test_four_devices_compute_what_one_does(dispatch):
    """Values and gradients; forward, tokens are sent once to their experts and once back, and nothing else does."""
    config = dataclasses.replace(CONFIG, dispatch=dispatch)
    params = naive.values(expert_specs(config))
    x_BLM, direction_BLM = naive.normal(1, 2, 4, 8, 8)

    def run(params, x_BLM):
        return expert_layer(config, params, x_BLM, key=jax.random.key(2))[0]

    text = str(gshard.jit(run, mesh=4).lower(params, x_BLM).spmd)
    assert text.count("all_to_all[") == 2
    assert not [word for word in ("all_gather", "psum", "ppermute") if f"{word}[" in text]

    def weighted(params, x_BLM):
        outputs = run(params, x_BLM)
        return jnp.sum(outputs * direction_BLM), outputs

    f = jax.value_and_grad(weighted, argnums=(0, 1), has_aux=True)
    plain = jax.jit(f, compiler_options={"xla_backend_optimization_level": 0})
    got, expected = gshard.jit(f, mesh=4)(params, x_BLM), plain(params, x_BLM)
    np.testing.assert_allclose(got[0][1], expected[0][1], rtol=1e-5, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, expected)
