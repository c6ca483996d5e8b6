"""A bias instead of a loss: it moves against the load, and the load becomes even."""

import jax
import jax.numpy as jnp
import numpy as np

from gshard.moe import TransformerConfig, balanced, loss, param_specs
from moe import naive

CONFIG = TransformerConfig.decoder_only(30, 3, model_dim=8, hidden_dim=12, heads=2, head_dim=4, experts=4, top_k=2,
    dense_first=1, group_size=None, gates="sigmoid", balance="bias")  # fmt: skip


def test_moves_against_the_load():
    bias = jnp.array([[0.5, 0.0, 0.0], [0.0, 0.0, 0.0], [0.25, 0.0, 0.0]])
    params = {"decoder": {"blocks": {"sparse": {"experts": {"bias": bias, "wi": jnp.ones(2)}}}, "norm": jnp.ones(1)}}
    load = jnp.array([[4, 2, 0], [1, 0, 0], [2, 2, 2]], jnp.int32)
    moved = balanced(params, {"decoder": load}, rate=0.25)
    experts = moved["decoder"]["blocks"]["sparse"]["experts"]
    np.testing.assert_array_equal(experts["bias"], [[0.25, 0.0, 0.25], [-0.25, 0.25, 0.25], [0.25, 0.0, 0.0]])
    assert experts["wi"] is params["decoder"]["blocks"]["sparse"]["experts"]["wi"]
    np.testing.assert_array_equal(params["decoder"]["blocks"]["sparse"]["experts"]["bias"], bias)


def test_it_is_no_part_of_the_loss_and_has_no_gradient():
    params = naive.values(param_specs(CONFIG))
    batch = {"target": naive.ids(1, 30, 4, 8)}
    run = jax.jit(
        jax.value_and_grad(lambda p: loss(CONFIG, p, batch, label_smoothing=0.0), has_aux=True),
        compiler_options=naive.FAST,
    )
    (value, metrics), gradient = run(params)
    assert float(value) == float(metrics["cross_entropy"])
    sparse = gradient["decoder"]["blocks"]["sparse"]["experts"]
    assert (sparse["bias"] == 0).all()
    assert (sparse["wg"] != 0).any()
    load = metrics["load"]["decoder"]
    assert load.shape == (2, 4)  # layers with experts
    assert load.dtype == jnp.int32
    assert load.sum(1).tolist() == [2 * 4 * 8] * 2
    moved = balanced(params, metrics["load"], rate=0.5)
    assert jax.tree.structure(moved) == jax.tree.structure(params)
    (_, after), _ = run(moved)
    assert float(after["cross_entropy"]) != float(metrics["cross_entropy"])
