"""Two hops compute what one does: rows cross between hosts once for each token and host."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from gshard.moe import TransformerConfig, expert_layer, expert_specs, shapes
from moe import naive
from placed import in_every_way, mesh_of

BASE = TransformerConfig.decoder_only(9, 2, model_dim=6, hidden_dim=10, experts=8, top_k=3, group_size=4,
    capacity_factor=math.inf, dispatch="two_hops")  # fmt: skip


def on_hosts(config, hosts, devices, data=1, **changes):
    axes = {"partitions": hosts * devices, "hosts": hosts, "expert_axis": ("host", "gpu"), "replicas": data,
        "data_axis": "data" if data > 1 else None}  # fmt: skip
    return dataclasses.replace(config, **axes, **changes)


def case(config, rows=8, skew=0.0, seed=0):
    """Parameters, tokens and which are valid; with ``skew`` most tokens prefer the first experts."""
    params = naive.values(expert_specs(config), seed)
    x_BLM = naive.normal(seed + 1, rows, 4, config.model_dim)
    x_BLM[..., 0] = np.abs(x_BLM[..., 0])
    params["wg"][0] += skew * np.linspace(1, -1, config.experts, dtype=np.float32)
    return params, x_BLM, naive.normal(seed + 2, rows, 4) > -0.8


@pytest.mark.parametrize("hosts, devices, data, rows, skew, changes", [
    (4, 2, 1, 9, 3.0, {"experts": 24, "top_k": 2, "shared_experts": 1}),  # fewer choices than hosts, 9 groups
    *(pytest.param(*rest, marks=pytest.mark.slow) for rest in [
        (2, 2, 2, 6, 1.0, {"gates": "sigmoid", "balance": "bias"}), (2, 4, 1, 7, 0.0, {"top_k": 5}),
        (8, 1, 1, 8, 0.5, {}), (1, 8, 1, 8, 0.5, {"activation": "relu"}),
        (2, 4, 1, 8, 0.5, {"routing": "paper", "top_k": 2}),
    ]),
])  # fmt: skip
def test_equals_the_dispatches_of_one_hop(hosts, devices, data, rows, skew, changes):
    """Values, gradients and metrics without drops; three calls with arguments placed differently."""
    config = on_hosts(BASE, hosts, devices, data, **changes)
    arguments = case(config, rows, skew)
    expected = naive.on_one_device(dataclasses.replace(config, dispatch="ragged_all_to_all"), arguments)
    assert float(jnp.abs(expected[0][1][0]).max()) > 0.1
    naive.assert_close(naive.on_one_device(config, arguments), expected)
    mesh = mesh_of(data=data, host=hosts, gpu=devices)
    for got in in_every_way(gshard.jit(naive.value_and_gradients(config), mesh=mesh), arguments, mesh):
        naive.assert_close(got, expected)


@pytest.mark.parametrize(
    "hosts, devices, data, rows, factor, skew",
    [(2, 4, 1, 8, 2.0, 0.0), *(pytest.param(*rest, marks=pytest.mark.slow) for rest in [
        (4, 2, 1, 7, 3.5, 0.5), (2, 2, 2, 6, 2.0, 0.5), (2, 4, 1, 8, 0.25, 3.0),
    ])],
)  # fmt: skip
def test_drops_are_those_without_room(hosts, devices, data, rows, factor, skew):
    """The metrics count what a loop over tokens drops, and the others are computed as if they were alone."""
    config = on_hosts(BASE, hosts, devices, data, capacity_factor=factor)
    arguments = case(config, rows, skew)
    _, x_BLM, valid_BL = arguments
    chosen_TK = np.argsort(-(x_BLM.reshape(-1, 6) @ arguments[0]["wg"]), axis=1, kind="stable")[:, :3]
    valid_T = valid_BL.reshape(-1)
    tokens, own = len(valid_T) // data, 8 // hosts // devices
    room = int(factor * len(valid_T) / (hosts * devices * data))
    share = -(-tokens // (hosts * devices))
    of_replicas = []
    for first in range(0, data * tokens, tokens):
        replica = slice(first, first + tokens)
        in_one_hop = naive.kept_with_room(chosen_TK[replica], valid_T[replica], 8, hosts * devices, room, 4)
        kept_TK = in_one_hop.copy()
        sent = np.zeros((hosts, devices), int)  # by each device of a host, to those of its host
        for t in range(tokens):
            lane = t // share % devices
            for host in range(hosts):
                wanted = in_one_hop[t] & (chosen_TK[replica][t] // (own * devices) == host)
                sent[host, lane] += wanted.sum()
                if sent[host, lane] > room:
                    kept_TK[t] &= ~wanted
        of_replicas.append(kept_TK)
    kept_TK = np.concatenate(of_replicas)
    (_, (outputs, metrics)), gradients = naive.on_one_device(config, arguments)
    np.testing.assert_allclose(float(metrics["kept_share"]), kept_TK.sum() / (3 * valid_T.sum()), rtol=1e-6)
    none = (valid_T & ~kept_TK.any(1)).sum() / valid_T.sum()
    np.testing.assert_allclose(float(metrics["dropped_share"]), none, atol=1e-6)
    assert 0 < kept_TK.sum() < 3 * valid_T.sum()
    np.testing.assert_array_equal(np.abs(np.asarray(outputs).reshape(-1, 6)).max(1) > 0, kept_TK.any(1))
    one_hop = naive.on_one_device(dataclasses.replace(config, dispatch="ragged_all_to_all"), arguments)
    assert float(metrics["kept_share"]) <= float(one_hop[0][1][1]["kept_share"])
    mesh = mesh_of(data=data, host=hosts, gpu=devices)
    for got in in_every_way(gshard.jit(naive.value_and_gradients(config), mesh=mesh), arguments, mesh):
        naive.assert_close(got, ((_, (outputs, metrics)), gradients))


@pytest.mark.parametrize("hosts, devices, top_k", [(2, 4, 4), (4, 2, 2)])
def test_a_token_crosses_to_a_host_once(hosts, devices, top_k):
    """Forward, between hosts: min(k, hosts) rows of each token there and back, their numbers, places and weights."""
    config = on_hosts(BASE, hosts, devices, model_dim=64, experts=16, group_size=32, top_k=top_k)
    x_BLM = jax.ShapeDtypeStruct((8, 32, 64), "float32")
    found = gshard.explain(
        lambda p, x: expert_layer(config, p, x)[0], shapes(expert_specs(config)), x_BLM,
        mesh=gshard.Mesh.abstract(host=hosts, gpu=devices),
    )  # fmt: skip
    between, inside = (set(found.mesh.atoms_of[axis]) for axis in ("host", "gpu"))
    exchanges = [c for c in found.spmd.collectives if c.kind == "all_to_all" and c.cause.name.endswith("_rows")]
    assert all(set(c.atoms) in (between, inside) for c in exchanges)
    rows = min(top_k, hosts) * 32
    numbers = rows * 4 * (1 + 2 * top_k)
    sent = sum(c.total_bytes for c in exchanges if set(c.atoms) == between)
    assert sent == (2 * rows * 64 * 4 + numbers) * (hosts - 1) // hosts
    assert "(Hops._to_hosts)  (inside gshard_put_rows)" in str(found)
    rest = sum(c.total_bytes for c in found.spmd.collectives if c not in exchanges)
    assert rest < 4096
