"""Configurations: Table 1 from shapes alone, named models, and what is refused."""

import dataclasses
import math

import jax
import pytest

from gshard.moe import (
    MODELS,
    TABLE_1,
    ModelError,
    Param,
    TransformerConfig,
    init,
    init_params,
    param_specs,
    parameter_count,
    shapes,
)

MOE = TransformerConfig(9, 9, experts=8, group_size=64)


@pytest.mark.parametrize("name, experts, weights", [
    ("MoE(2048E, 36L)", 36864, 600e9), ("MoE(2048E, 12L)", 12288, 200e9), ("MoE(512E, 36L)", 9216, 150e9),
    ("MoE(512E, 12L)", 3072, 50e9), ("MoE(128E, 36L)", 2304, 37e9), ("MoE(128E, 12L)", 768, 12.5e9),
    ("MoE(2048E, 60L)", 61440, 1e12), ("T(96L)", 0, 2.3e9),
])  # fmt: skip
def test_table_1(name, experts, weights):
    """The paper rounds its sizes freely (37 for 39.5, 200 for 206.5); experts in total are exact."""
    config = TABLE_1[name]
    assert config.moe_layers * config.experts == experts
    count = parameter_count(param_specs(config))
    assert count == pytest.approx(weights, rel=0.07)
    # By hand: experts and routers, dense feed-forwards, attentions, norms, embeddings.
    M, H, layers = 1024, 8192, config.encoder_layers + config.decoder_layers
    attention = 4 * M * config.heads * config.head_dim
    attentions = layers + config.decoder_layers
    assert count == (
        experts * (2 * M * H + M)
        + (layers - config.moe_layers) * 2 * M * H
        + attentions * attention
        + (attentions + layers + 2) * M
        + 96_000 * M
    )


def test_shapes_are_those_of_the_values():
    config = TABLE_1["MoE(2048E, 36L)"]  # 2.5 TB if it allocated
    specs = param_specs(config)
    values = jax.eval_shape(lambda: init(config, jax.random.key(0)))
    assert shapes(specs) == jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype), values)
    assert parameter_count(specs) == sum(v.size for v in jax.tree.leaves(values))
    odd = param_specs(TransformerConfig(9, 9, encoder_layers=3, decoder_layers=1))
    assert odd["encoder"]["blocks"]["dense"]["feed_forward"]["wi"].shape == (3, 512, 2048)


def test_batch_and_factor_axes():
    specs = param_specs(dataclasses.replace(MOE, experts=4096, group_size=4096, model_dim=64))
    sparse = specs["encoder"]["blocks"]["sparse"]
    assert sparse["experts"]["wi"].batch_axes == (0, 1)
    assert sparse["experts"]["wi"].factor_axes == (2, 3)  # although there are more experts than either
    assert (sparse["experts"]["wg"].factor_axes, sparse["attention_norm"].batch_axes) == ((1, 2), (0,))
    assert sparse["attention_norm"].factor_axes is None
    assert specs["source_embedding"].factor_axes == (0, 1)


def test_values_depend_on_the_path_only():
    wi = Param((2, 3), ("model", "hidden"))
    few = init_params({"a": {"wi": wi}}, jax.random.key(0))
    more = init_params({"a": {"wi": wi, "wo": wi}, "b": wi}, jax.random.key(0))
    assert (few["a"]["wi"] == more["a"]["wi"]).all()
    assert (more["a"]["wo"] != more["a"]["wi"]).any()
    assert (init_params({"a": {"wi": wi}}, jax.random.PRNGKey(0))["a"]["wi"] == few["a"]["wi"]).all()


@pytest.mark.parametrize(
    "tokens, factor, expected",
    [(64, 2.0, 16), (64, 1.25, 10), (64, 1.1, 8), (60, 2.0, 15), (4, 2.0, 1), (64, math.inf, 64), (64, 99.0, 64)],
)
def test_capacity(tokens, factor, expected):
    assert dataclasses.replace(MOE, capacity_factor=factor).capacity(tokens) == expected


@pytest.mark.parametrize("change, message", [
    ({"group_size": 3}, "capacity of an expert is below 1"),
    ({"capacity_factor": 0.0}, "capacity_factor must be positive"),
    ({"encoder_layers": 5}, "encoder_layers must be a multiple of 2"),
    ({"decoder_layers": 3}, "decoder_layers must be a multiple of 2"),
    ({"experts": 1}, "at least two experts"), ({"routing": "expertchoice"}, "routing 'expertchoice' is not known"),
    ({"routing": "topk"}, "Did you mean 'top_k'"), ({"top_k": 3}, "routing 'paper' sends a token to two experts"),
    ({"routing": "top_k", "top_k": 9}, "more experts than there are"),
    ({"routing": "top_k", "top_k": 1}, "the router would learn nothing"), ({"top_k": 0}, "top_k must be at least 1"),
    ({"gates": "relu"}, "gates 'relu' is not known"), ({"balance": "hope"}, "balance 'hope' is not known"),
    ({"activation": "gelu"}, "activation 'gelu' is not known"),
    ({"positions": "learned"}, "positions 'learned' is not known"),
    ({"remat": "layers"}, "remat 'layers' is not known"), ({"kv_heads": 3}, "shared out evenly"),
    ({"positions": "rotary", "head_dim": 5}, "even head_dim"),
    ({"positions": "rotary", "rotary_base": 0.0}, "rotary_base must be positive"),
    ({"experts_every": 4}, "encoder_layers must be a multiple"),
    ({"dense_first": 6, "experts_every": 1}, "above 6 dense ones"),
    ({"dense_hidden_dim": 0}, "dense_hidden_dim must be at least 1"),
    ({"shared_experts": -1}, "shared_experts must not be negative"),
    ({"encoder_layers": 0}, "an encoder and a source vocabulary come together"),
    ({"dispatch": "onehot"}, "dispatch 'onehot' is not known"),
    ({"dispatch": "blocks", "partitions": 2}, "cannot be split over experts"),
    ({"dropout": 1.0}, "dropout must be a rate"), ({"partitions": 0}, "partitions must be at least 1"),
    ({"model_dim": 7}, "even model_dim"), ({"hidden_dim": 0}, "hidden_dim must be at least 1"),
    ({"group_size": 0}, "group_size must be at least 1"),
    # Axes of meshes.
    ({"replicas": 2}, "replicas of the experts have a mesh axis"), ({"replicas": 0}, "replicas must be at least 1"),
    ({"partitions": 4, "data_axis": "data"}, "the marks of the experts name a mesh axis too"),
    ({"expert_axis": ("a", "b"), "data_axis": "a"}, "a mesh axis is named twice"),
    ({"expert_axis": 4}, "expert_axis is a mesh axis"),
    ({"replicas": 2, "data_axis": "data", "dispatch": "blocks"}, "cannot be split over experts or replicas"),
])  # fmt: skip
def test_refused(change, message):
    with pytest.raises(ModelError, match=message) as error:
        dataclasses.replace(MOE, **change)
    assert error.value.got


@pytest.mark.parametrize("name, weights", [
    ("Mixtral-8x7B", 46.70e9), ("Mixtral-8x22B", 140.6e9), ("DeepSeekMoE-16B", 16.38e9), ("DeepSeek-V3-like", 671e9),
])  # fmt: skip
def test_weights_are_those_of_the_model_card(name, weights):
    """Within half a percent, but for the attention of DeepSeek-V3, which is another one."""
    config = MODELS[name]
    count = parameter_count(param_specs(config))
    assert count == pytest.approx(weights, rel=0.01 if name == "DeepSeek-V3-like" else 0.003)
    assert config.moe_layers == config.decoder_layers - config.dense_first
