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

layer = jax.jit(expert_layer, static_argnums=0, compiler_options=naive.FAST)
BASE = TransformerConfig.decoder_only(9, 2, model_dim=6, hidden_dim=10, experts=4, top_k=2, group_size=8,
    capacity_factor=math.inf)  # fmt: skip
RAGGED = dataclasses.replace(BASE, dispatch="ragged_all_to_all")


CHANGES = {
    "top 2": {},
    "top 3": {"top_k": 3, "gates": "sigmoid", "gate_scale": 2.5, "balance": "bias", "shared_experts": 2},
    "top 1": {"top_k": 1, "normalise_gates": False, "activation": "relu"},
    "paper": {"routing": "paper", "activation": "relu"},  # rejected choices keep their slots: these rows have no token
}


@functools.cache
def of_einsum(name):
    config = dataclasses.replace(BASE, dispatch="einsum", **CHANGES[name])
    return config, naive.on_one_device(config, naive.case(config), jax.random.key(5))


@pytest.mark.parametrize(
    "name, dispatch, partitions",
    [
        ("top 3", "ragged_all_to_all", 2), ("top 3", "blocks", 1), ("paper", "ragged_all_to_all", 1),
        ("paper", "ragged_all_to_all", 2),
        *(pytest.param(*rest, marks=pytest.mark.slow) for rest in [
            ("top 3", "ragged_all_to_all", 1), ("top 3", "gather", 1), ("top 2", "blocks", 1),
            ("top 1", "ragged_all_to_all", 2),
        ]),
    ],
)  # fmt: skip
def test_equals_the_other_dispatches(name, dispatch, partitions):
    """Values, gradients and metrics of the einsum form, whatever the number of partitions."""
    config, expected = of_einsum(name)
    assert float(jnp.abs(expected[0][1][0]).max()) > 0.1
    other = dataclasses.replace(config, dispatch=dispatch, partitions=partitions)
    naive.assert_close(naive.on_one_device(other, naive.case(config), jax.random.key(5)), expected)


@pytest.mark.parametrize("partitions", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_nothing_is_dropped_when_all_want_the_same(partitions):
    """One expert has every token, the others some or none; with partitions all of it is in one of them."""
    config = dataclasses.replace(RAGGED, partitions=partitions, top_k=1, normalise_gates=False)
    params, x_BLM, _ = naive.case(config)
    x_BLM = np.abs(x_BLM)
    params["wg"] = np.zeros_like(params["wg"])
    params["wg"][:, 2] = 1.0
    run = layer if partitions == 1 else gshard.jit(expert_layer, mesh=partitions, static_argnums=0)
    got, metrics = run(config, params, x_BLM)
    assert (float(metrics["dead_experts"]), float(metrics["dropped_share"])) == (3, 0)
    expected = naive.expert_layer(config, params, np.asarray(x_BLM, np.float64).reshape(-1, 6))
    np.testing.assert_allclose(np.asarray(got).reshape(-1, 6), expected, rtol=1e-4, atol=1e-5)


def test_what_a_device_sends_forward():
    """The rows of its own tokens to 2 experts and back; experts stay where they are."""
    config = dataclasses.replace(RAGGED, model_dim=64, experts=8, partitions=8, group_size=32)
    x_BLM = jax.ShapeDtypeStruct((8, 32, 64), "float32")
    lowered = gshard.jit(lambda p, x: expert_layer(config, p, x)[0], mesh=8).lower(shapes(expert_specs(config)), x_BLM)
    sent = [(c.kind, c.total_bytes) for c in lowered.spmd.collectives]
    large = sorted((kind, n) for kind, n in sent if n > 2000)
    assert large == [("all_to_all", 2 * 32 * 64 * 4 * 7 // 8)] * 2
    assert sum(n for _, n in sent) < sum(n for _, n in large) + 2000


@pytest.mark.parametrize("factor, partitions", [(0.25, 4), (2.5, 1), pytest.param(1.0, 4, marks=pytest.mark.slow)])
def test_a_partition_has_room_for_its_experts_together(factor, partitions):
    """The experts with the most tokens lose their last ones, and no token is dropped while there is room."""
    config = dataclasses.replace(RAGGED, experts=8, partitions=partitions, capacity_factor=factor)
    params, x_BLM, valid_BL = naive.case(config)
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
        naive.assert_close(run(params, x_BLM, valid_BL), (outputs, metrics))


def test_by_names_without_marks():
    """With a layout in place of partitions the product itself is split by experts."""
    config = RAGGED
    params, x_BLM, _ = naive.case(config)
    layout = gshard.Layout(groups="devices", experts="devices", tokens=None, model=None, gates=None)
    f = gshard.jit(lambda p, x: expert_layer(config, p, x)[0], mesh=4, layout=layout)
    np.testing.assert_allclose(f(params, x_BLM), layer(config, params, x_BLM)[0], rtol=1e-4, atol=1e-5)


def test_refused():
    with pytest.raises(ModelError, match="'ragged_all_to_all' gives each partition as many experts as the others"):
        dataclasses.replace(RAGGED, partitions=3)
    config = dataclasses.replace(RAGGED, partitions=4, capacity_factor=0.1)
    with pytest.raises(ModelError, match="the room of a partition is below 1"):
        config.room(32)
