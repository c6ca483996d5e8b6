"""Dropless dispatch by ragged products: the values of the einsum form, on one device and with experts split."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from gshard.moe import ModelError, TransformerConfig, expert_layer, expert_specs, shapes
from moe import naive

# Small programs: compiling them costs more than running them.
FAST = {"xla_backend_optimization_level": 0}
QUICK = functools.partial(jax.jit, compiler_options=FAST)
layer = jax.jit(expert_layer, static_argnums=0, compiler_options=FAST)
BASE = TransformerConfig.decoder_only(9, 2, model_dim=6, hidden_dim=10, experts=4, top_k=2, group_size=8,
    capacity_factor=math.inf)  # fmt: skip
BOTH = ("ragged", "ragged_all_to_all")


def case(config, seed=0):
    x_BLM = naive.normal(seed + 1, 8, 4, config.model_dim)
    valid_BL = naive.normal(seed + 2, 8, 4) > -0.8
    return naive.values(expert_specs(config), seed), x_BLM, valid_BL


def value_and_gradients(config, compiled=None):
    def run(params, x_BLM, valid_BL):
        direction_BLM = jnp.cos(jnp.arange(x_BLM.size, dtype=jnp.float32)).reshape(x_BLM.shape)
        outputs, metrics = expert_layer(config, params, x_BLM, valid_BL, key=jax.random.key(5))
        return jnp.sum(outputs * direction_BLM) + metrics["aux_loss"], (outputs, metrics)

    return (compiled or QUICK)(jax.value_and_grad(run, argnums=(0, 1), has_aux=True))


def assert_trees_close(left, right):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), left, right)


CHANGES = {
    "top 2": {},
    "top 3": {"top_k": 3, "gates": "sigmoid", "gate_scale": 2.5, "balance": "bias", "shared_experts": 2},
    "top 1": {"top_k": 1, "normalise_gates": False, "activation": "relu"},
    "paper": {"routing": "paper", "activation": "relu"},  # rejected choices keep their slots: these rows have no token
}


@functools.cache
def of_einsum(name):
    config = dataclasses.replace(BASE, dispatch="einsum", **CHANGES[name])
    return config, value_and_gradients(config)(*case(config))


@pytest.mark.parametrize(
    "name, dispatch, partitions",
    [
        ("top 3", "ragged", 2), ("top 3", "ragged_all_to_all", 2), ("top 3", "blocks", 1), ("paper", "ragged", 1),
        ("paper", "ragged_all_to_all", 2),
        *(pytest.param(*rest, marks=pytest.mark.slow) for rest in [
            ("top 3", "ragged", 1), ("top 3", "ragged_all_to_all", 1), ("top 3", "gather", 1), ("paper", "ragged", 2),
            ("top 2", "ragged", 2), ("top 2", "ragged_all_to_all", 2), ("top 2", "blocks", 1), ("top 1", "ragged", 2),
            ("top 1", "ragged_all_to_all", 2),
        ]),
    ],
)  # fmt: skip
def test_equals_the_other_dispatches(name, dispatch, partitions):
    """Values, gradients and metrics of the einsum form, whatever the number of partitions."""
    config, expected = of_einsum(name)
    assert float(jnp.abs(expected[0][1][0]).max()) > 0.1
    other = dataclasses.replace(config, dispatch=dispatch, partitions=partitions)
    assert_trees_close(value_and_gradients(other)(*case(config)), expected)


@pytest.mark.parametrize("partitions", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dispatch", BOTH)
def test_equals_a_loop_over_tokens(dispatch, partitions):
    config = dataclasses.replace(BASE, dispatch=dispatch, partitions=partitions, shared_experts=1)
    params, x_BLM, _ = case(config)
    got, metrics = layer(config, params, x_BLM)
    expected = naive.expert_layer(config, params, np.asarray(x_BLM, np.float64).reshape(-1, 6))
    np.testing.assert_allclose(np.asarray(got).reshape(-1, 6), expected, rtol=1e-4, atol=1e-5)
    assert (float(metrics["dropped_share"]), float(metrics["kept_share"])) == (0, 1)


@pytest.mark.parametrize("partitions", [pytest.param(1, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("dispatch", BOTH)
def test_nothing_is_dropped_when_all_want_the_same(dispatch, partitions):
    """One expert has every token, the others some or none; with partitions all of it is in one of them."""
    config = dataclasses.replace(BASE, dispatch=dispatch, partitions=partitions, top_k=1, normalise_gates=False)
    params, x_BLM, _ = case(config)
    x_BLM = np.abs(x_BLM)
    params["wg"] = np.zeros_like(params["wg"])
    params["wg"][:, 2] = 1.0
    run = layer if partitions == 1 else gshard.jit(expert_layer, mesh=partitions, static_argnums=0)
    got, metrics = run(config, params, x_BLM)
    assert (float(metrics["dead_experts"]), float(metrics["dropped_share"])) == (3, 0)
    expected = naive.expert_layer(config, params, np.asarray(x_BLM, np.float64).reshape(-1, 6))
    np.testing.assert_allclose(np.asarray(got).reshape(-1, 6), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(  # a fast test of the other one is in test_data_axis
    "dispatch", ["ragged", pytest.param("ragged_all_to_all", marks=pytest.mark.slow)]
)
def test_eight_devices_compute_what_one_does(dispatch, dtype):
    config = dataclasses.replace(BASE, experts=8, dispatch=dispatch, partitions=8, group_size=4, dtype=dtype)
    params, x_BLM, valid_BL = case(config)
    x_BLM = x_BLM.astype(dtype)
    on_eight = value_and_gradients(config, lambda f: gshard.jit(f, mesh=8))
    got, expected = on_eight(params, x_BLM, valid_BL), value_and_gradients(config)(params, x_BLM, valid_BL)
    if dtype == "float32":
        assert_trees_close(got, expected)
    else:
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=0.05, atol=0.05), got, expected
        )


def test_tokens_are_gathered_once_and_sums_scattered_once():
    """Forward, the only arrays of the size of the tokens that are sent; experts stay where they are."""
    config = dataclasses.replace(BASE, model_dim=64, experts=8, dispatch="ragged", partitions=8, group_size=32)
    params = shapes(expert_specs(config))
    x_BLM = jax.ShapeDtypeStruct((8, 32, 64), "float32")
    lowered = gshard.jit(lambda p, x: expert_layer(config, p, x)[0], mesh=8).lower(params, x_BLM)
    tokens = 8 * 32 * 64 * 4
    # What a device sends: its part of the tokens to each other device, and of the sums the parts of the others.
    large = sorted((c.kind, c.total_bytes) for c in lowered.spmd.collectives if c.total_bytes > tokens // 16)
    assert large == [("all_gather", tokens * 7 // 8), ("reduce_scatter", tokens * 7 // 8)]


def test_each_token_is_sent_to_its_experts_and_back():
    """Forward: each device sends the numbers of rows once, and the rows of its own tokens there and back."""
    config = dataclasses.replace(
        BASE, model_dim=64, experts=8, dispatch="ragged_all_to_all", partitions=8, group_size=32
    )
    params = shapes(expert_specs(config))
    x_BLM = jax.ShapeDtypeStruct((8, 32, 64), "float32")
    sent = gshard.jit(lambda p, x: expert_layer(config, p, x)[0], mesh=8).lower(params, x_BLM).spmd.collectives
    rows = 2 * 32  # of the tokens of a device, to k = 2 experts each
    exchanges = [c.total_bytes for c in sent if c.kind == "all_to_all"]
    assert exchanges == [rows * 4 * 7 // 8, rows * 64 * 4 * 7 // 8, rows * 64 * 4 * 7 // 8]
    assert sum(c.total_bytes for c in sent) < sum(exchanges) + 2000


@pytest.mark.parametrize(
    "factor, partitions",
    [(0.25, 4), (2.5, 1), *(pytest.param(*rest, marks=pytest.mark.slow) for rest in [
        (0.25, 1), (1.0, 1), (1.0, 4), (2.5, 4),
    ])],
)  # fmt: skip
def test_a_partition_has_room_for_its_experts_together(factor, partitions):
    """The experts with the most tokens lose their last ones, and no token is dropped while there is room."""
    config = dataclasses.replace(BASE, experts=8, dispatch="ragged_all_to_all", partitions=partitions,
        capacity_factor=factor)  # fmt: skip
    params, x_BLM, valid_BL = case(config)
    valid_T = np.asarray(valid_BL).reshape(-1)
    chosen_TK = np.argsort(-(x_BLM.reshape(-1, 6) @ params["wg"]), axis=1, kind="stable")[:, :2]
    room = int(factor * len(valid_T) / partitions)
    kept_TK = naive.kept_with_room(chosen_TK, valid_T, 8, partitions, room, config.group_size)
    outputs, metrics = layer(config, params, x_BLM, valid_BL)
    reached = kept_TK.any(1)
    np.testing.assert_allclose(float(metrics["kept_share"]), kept_TK.sum() / (2 * valid_T.sum()), rtol=1e-6)
    np.testing.assert_allclose(float(metrics["dropped_share"]), (valid_T & ~reached).sum() / valid_T.sum(), atol=1e-6)
    assert kept_TK.sum() < 2 * valid_T.sum() or factor == 2.5
    np.testing.assert_array_equal(np.abs(np.asarray(outputs).reshape(-1, 6)).max(1) > 0, reached)
    if partitions > 1:
        run = gshard.jit(functools.partial(expert_layer, config), mesh=partitions)
        for _ in range(3):
            assert_trees_close(run(params, x_BLM, valid_BL), (outputs, metrics))


@pytest.mark.parametrize("dispatch", [pytest.param("ragged", marks=pytest.mark.slow), "ragged_all_to_all"])
def test_by_names_without_marks(dispatch):
    """With a layout in place of partitions the product itself is split by experts."""
    config = dataclasses.replace(BASE, dispatch=dispatch)
    params, x_BLM, _ = case(config)
    layout = gshard.Layout(groups="devices", experts="devices", tokens=None, model=None, gates=None)
    f = gshard.jit(lambda p, x: expert_layer(config, p, x)[0], mesh=4, layout=layout)
    np.testing.assert_allclose(f(params, x_BLM), layer(config, params, x_BLM)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dispatch", BOTH)
def test_refused(dispatch):
    with pytest.raises(ModelError, match=f"dispatch '{dispatch}' gives each partition as many experts as the others"):
        dataclasses.replace(BASE, dispatch=dispatch, partitions=3)
    config = dataclasses.replace(BASE, dispatch="ragged_all_to_all", partitions=4, capacity_factor=0.1)
    with pytest.raises(ModelError, match="the room of a partition is below 1"):
        config.room(32)
