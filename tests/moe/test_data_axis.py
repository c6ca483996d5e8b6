"""Experts on a mesh with a data axis: replicas of the experts send and compute as if each were alone."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from gshard.moe import ModelError, TransformerConfig, expert_layer, expert_specs, shapes
from moe import naive
from placed import in_every_way, mesh_of

BASE = TransformerConfig.decoder_only(9, 2, model_dim=6, hidden_dim=10, experts=8, top_k=2, group_size=4,
    capacity_factor=math.inf)  # fmt: skip
LARGE = TransformerConfig.decoder_only(9, 1, model_dim=64, hidden_dim=128, experts=16, top_k=2, group_size=32,
    capacity_factor=2.5)  # fmt: skip


def on_axes(config, expert, data=1, **changes):
    axes = {"partitions": expert, "expert_axis": "expert", "replicas": data, "data_axis": "data" if data > 1 else None}
    return dataclasses.replace(config, **axes, **changes)


@pytest.mark.parametrize("dispatch, data, expert, changes", [
    ("ragged_all_to_all", 2, 4, {"capacity_factor": 1.5, "shared_experts": 1}),  # 6 groups on 8 devices
    ("ragged_all_to_all", 4, 2, {"top_k": 3}),
    ("einsum", 1, 8, {"capacity_factor": 2.0, "routing": "paper"}),
    *(pytest.param(*rest, marks=pytest.mark.slow) for rest in [
        ("ragged_all_to_all", 4, 2, {"gates": "sigmoid", "balance": "bias"}),
        ("ragged_all_to_all", 1, 8, {}),
        ("gather", 2, 4, {"capacity_factor": 4.0, "shared_experts": 1}),
        ("einsum", 4, 2, {"capacity_factor": 4.0}),
    ]),
])  # fmt: skip
def test_devices_compute_what_one_does(dispatch, data, expert, changes):
    """Values, gradients and metrics, in three calls with arguments placed differently."""
    config = on_axes(BASE, expert, data, dispatch=dispatch, **changes)
    drops = dispatch == "ragged_all_to_all" and config.capacity_factor == 1.5
    arguments = naive.case(config, 6 if drops else 8)
    expected = naive.on_one_device(config, arguments)
    assert not drops or 0.5 < float(expected[0][1][1]["kept_share"]) < 1
    assert float(jnp.abs(expected[0][1][0]).max()) > 0.1
    mesh = mesh_of(data=data, expert=expert)
    for got in in_every_way(gshard.jit(naive.value_and_gradients(config), mesh=mesh), arguments, mesh):
        naive.assert_close(got, expected)


@pytest.mark.parametrize("factor", [1.5, math.inf])
def test_replicas_are_layers_beside_each_other(factor):
    """Outputs and gradients are those of each part of the batch alone, and each replica has room of its own."""
    config = dataclasses.replace(BASE, dispatch="ragged_all_to_all", capacity_factor=factor, partitions=4)
    params, x_BLM, valid_BL = naive.case(config)
    x_BLM[:4] *= 3  # other experts are full

    def run(config):
        def squares(params, x_BLM, valid_BL):
            outputs, metrics = expert_layer(config, params, x_BLM, valid_BL)
            return jnp.sum(outputs**2), (outputs, metrics["kept_share"])

        return jax.jit(jax.value_and_grad(squares, argnums=(0, 1), has_aux=True), compiler_options=naive.FAST)

    (value, (outputs, kept)), gradients = run(on_axes(config, 4, 2))(params, x_BLM, valid_BL)
    halves = [run(config)(params, x_BLM[half], valid_BL[half]) for half in (slice(0, 4), slice(4, 8))]
    np.testing.assert_allclose(value, sum(v for (v, _), _ in halves), rtol=1e-5)
    np.testing.assert_allclose(outputs, jnp.concatenate([o for (_, (o, _)), _ in halves]), rtol=1e-4, atol=1e-5)
    count = [valid_BL[:4].sum(), valid_BL[4:].sum()]
    share = sum(k * n for ((_, (_, k)), _), n in zip(halves, count, strict=True)) / sum(count)
    np.testing.assert_allclose(kept, share, rtol=1e-5)
    assert (share < 1) == (factor == 1.5)
    naive.assert_close(gradients[0], jax.tree.map(lambda a, b: a + b, *(g[0] for _, g in halves)))
    naive.assert_close(gradients[1], jnp.concatenate([g[1] for _, g in halves]))


def explained(config, mesh, *, backward):
    """Two groups on each device that holds tokens; arguments and results are split as the tokens."""
    tokens = {0: tuple(mesh)}
    x_BLM = jax.ShapeDtypeStruct((2 * config.replicas * config.partitions, 32, config.model_dim), "float32")

    def run(params, x_BLM):
        return gshard.split(expert_layer(config, params, gshard.split(x_BLM, tokens))[0], tokens)

    def gradients(params, x_BLM):
        return jax.grad(lambda p, x: jnp.sum(run(p, x) ** 2), argnums=(0, 1))(params, x_BLM)

    arguments = shapes(expert_specs(config)), x_BLM
    return gshard.explain(gradients if backward else run, *arguments, mesh=gshard.Mesh.abstract(**mesh))


@pytest.mark.parametrize("dispatch, shared", [
    ("gather", 1), *(pytest.param(*rest, marks=pytest.mark.slow) for rest in [
        ("ragged_all_to_all", 0), ("einsum", 0),
    ]),
])  # fmt: skip
def test_a_replica_sends_and_computes_what_it_would_alone(dispatch, shared):
    """Four replicas of eight partitions: nothing but counts and gradients of weights leaves a replica."""
    alone = on_axes(LARGE, 8, dispatch=dispatch, shared_experts=shared)
    four = on_axes(LARGE, 8, 4, dispatch=dispatch, shared_experts=shared)
    one_axis, two_axes = {"expert": 8}, {"data": 4, "expert": 8}
    before, after = explained(alone, one_axis, backward=False), explained(four, two_axes, backward=False)
    assert abs(after.total_bytes - before.total_bytes) < 1024
    assert after.cost("v5e").flops < 1.01 * before.cost("v5e").flops
    data = set(after.mesh.atoms_of["data"])
    assert sum(c.total_bytes for c in after.spmd.collectives if data & set(c.atoms)) < 1024

    before, after = explained(alone, one_axis, backward=True), explained(four, two_axes, backward=True)
    held = sum(w.size for name, w in shapes(expert_specs(four)).items() if name in ("wi", "wi_gate", "wo")) // 8
    rest = sum(w.size for w in jax.tree.leaves(shapes(expert_specs(four)))) - 8 * held
    sums = (3 * held // 4 + 2 * rest) * 4  # a reduce-scatter of the experts, an all-reduce of what all devices hold
    assert after.total_bytes < before.total_bytes + sums + 1024
    assert after.cost("v5e").flops < 1.05 * before.cost("v5e").flops


@pytest.mark.parametrize("dispatch", ["gather", "ragged_all_to_all"])
def test_other_axes_split_the_weights(dispatch):
    """On data x expert x model, marks of the weights over the model axis stay, and no weight is gathered."""
    config = on_axes(LARGE, 2, 2, dispatch=dispatch)
    spec = jax.sharding.PartitionSpec
    into, out = spec("expert", None, "model"), spec("expert", "model", None)
    x_BLM = jax.ShapeDtypeStruct((8, 32, 64), "float32")

    def run(params, x_BLM):
        weights = {k: gshard.shard(params[k], out if k == "wo" else into) for k in ("wi", "wi_gate", "wo")}
        return expert_layer(config, params | weights, gshard.split(x_BLM, {0: ("data", "expert")}))[0]

    mesh = gshard.Mesh.abstract(data=2, expert=2, model=2)
    found = gshard.explain(run, shapes(expert_specs(config)), x_BLM, mesh=mesh)
    rows = 2.5 * 64 * 64 * 4  # bytes of the rows of a device
    # There and back to the other part of the experts, and an all-reduce of the parts of the sum over H.
    assert found.total_bytes < rows / 2 + rows / 2 + rows + 1024
    alone = gshard.explain(
        lambda p, x: expert_layer(on_axes(LARGE, 2, dispatch=dispatch), p, x)[0], shapes(expert_specs(config)),
        jax.ShapeDtypeStruct((4, 32, 64), "float32"), mesh=gshard.Mesh.abstract(expert=2),
    )  # fmt: skip
    assert found.cost("v5e").flops < 0.6 * alone.cost("v5e").flops


def test_replicas_have_equal_numbers_of_groups():
    config = on_axes(BASE, 4, 2, dispatch="ragged_all_to_all")
    with pytest.raises(ModelError, match="gives each replica of the experts as many groups") as caught:
        config.tokens_of_a_group(12)
    assert "3 groups of 4 tokens; replicas=2" in str(caught.value)
    assert dataclasses.replace(config, dispatch="gather").tokens_of_a_group(12) == 4
    assert dataclasses.replace(config, group_size=None).tokens_of_a_group(64) == 8
    assert config.room(64) == 32 * 2
    assert dataclasses.replace(config, capacity_factor=1.0).room(64) == 8
    assert on_axes(BASE, 1, 2).dropless().dispatch == "gather"
