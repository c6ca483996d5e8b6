"""What a machine makes collective matmuls by itself: where its compiler hides the way, and that is worth it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from gshard import split
from gshard.device.async_overlap import gather_stalls
from gshard.device.machine import Machine
from gshard.stages import CollectiveMatmul
from gshard.testing.rule_checks import reported
from sampled import crossed


def mlp(x, w, v):
    """Tokens are gathered before the first product, and sums scattered after the second (Megatron-LM)."""
    h = jax.nn.relu(split(x, 0, "d") @ split(w, 1, "d"))
    return split(split(h, 1, "d") @ split(v, 0, "d"), 0, "d")


def shapes(*sizes, dtype=jnp.bfloat16):
    return [jax.ShapeDtypeStruct(s, dtype) for s in sizes]


LARGE = shapes((8192, 4096), (4096, 16384), (16384, 4096))
MESH = gshard.Mesh.abstract(d=8)
SIZES = [((64, 24), (24, 48), (48, 24)), ((61, 25), (25, 47), (47, 27))]


def rings(machine, arguments=LARGE, mesh=MESH, f=mlp, **options):
    lowered = gshard.jit(f, mesh=mesh, machine=machine, **options).lower(*arguments)
    found = lowered.plan.rings.values()
    return [("sums" if r.operand is None else "operand", r.both_ways, r.order) for r in found]


# 0 1 2 3
# 7 6 5 4, on a grid of 2 x 4: each is beside the next one.
CYCLE = (1, 2, 3, 7, 6, 5, 4, 0)


def test_a_machine_that_hides_permutations_turns_them_on():
    found = rings("v5e:2x4")
    assert found == rings(Machine.of("v5e:2x4")) == [("operand", True, CYCLE), ("sums", True, CYCLE)]
    assert rings("v5e:2x4", collective_matmul=False) == []
    assert len(rings("v5e:2x4", collective_matmul=True)) == 2
    assert rings("v5e:2x4", shapes((64, 64), (64, 128), (128, 64))) == [], "too small to hide its way"
    for other in ("v3:2x2", "h100:1x8", "cpu:8", None):
        assert rings(other) == []
    # A compiler that hides nothing wins nothing when asked.
    v3 = Machine.of("v3:2x2")
    shown = dataclasses.replace(v3, compiler=dataclasses.replace(v3.compiler, hides=("collective_permute",)))
    asked = [rings(None, collective_matmul=CollectiveMatmul(machine=machine)) for machine in ("v3:2x2", shown)]
    assert [len(found) > 0 for found in asked] == [False, True]


def test_the_cycle_is_that_of_the_devices_whatever_the_order_of_the_axes():
    """Two axes on the links the other way round: each part's neighbour around the ring is a neighbour of its device."""

    def product(x, w):
        both = ("b", "a")
        return split(split(x, 0, both) @ split(w, 1, both), 1, both)

    mesh = gshard.Mesh.abstract(a=4, b=2)
    lowered = gshard.jit(product, mesh=mesh, machine="v5e:4x2").lower(*LARGE[:2])
    (ring,) = lowered.plan.rings.values()
    assert sorted(ring.order) == list(range(8))
    devices = [(part % 4) * 2 + part // 4 for part in ring.order]  # parts count along b first
    places = [divmod(d, 2) for d in devices]
    for (row, column), (other, beside) in zip(places, [*places[1:], places[0]], strict=True):
        assert abs(row - other) + abs(column - beside) == 1


def test_what_is_hidden_anyway_stays():
    """On v5e the gather of weights passes beside the product before, on v5p beside nothing; the first is waited for."""

    def layers(x, ws):
        for w in ws:
            x = split(jnp.tanh(split(x, 0, "d") @ split(w, 0, "d")), 0, "d")
        return x

    arguments = [*shapes((131072, 4096)), shapes(*[(4096, 4096)] * 3)]
    for machine, waiting in (("v5e:2x4", [True, False, False]), ("v5p:2x2x2", [True] * 3)):
        lowered = gshard.jit(layers, mesh=MESH, machine=machine, collective_matmul=False).lower(*arguments)
        seconds = gather_stalls(lowered.plan, Machine.of(machine))
        assert [s > 0 for s in seconds.values()] == waiting
        gathers = [k for k in gshard.explain(layers, *arguments, mesh=MESH).cost(machine).kernels if k.sent]
        assert [k.seconds for k in gathers] == pytest.approx(list(seconds.values()))
    assert rings("v5e:2x4", arguments, f=layers) == []


def test_the_plan_says_what_it_brings_and_costs_what_it_says():
    step = gshard.jit(mlp, mesh=MESH, machine="v5e:2x4")
    found = gshard.explain(step, *LARGE)
    without, taken, machine = found.plan.spared
    assert machine == "v5e:2x4"
    assert found.cost("v5e:2x4").seconds == pytest.approx(taken)
    at_once = gshard.explain(gshard.jit(mlp, mesh=MESH, machine="v5e:2x4", collective_matmul=False), *LARGE)
    assert at_once.cost("v5e:2x4").seconds == pytest.approx(without)
    assert taken < without
    assert f"takes {taken * 1e3:.4g} instead of {without * 1e3:.4g} ms; collective_matmul=False prevents that" in str(
        found
    )
    assert "collective_matmul=False" not in str(at_once)
    assert sum(c.total_bytes for c in found.spmd.collectives) == sum(c.total_bytes for c in at_once.spmd.collectives)


@pytest.mark.parametrize("sizes, names", crossed(SIZES, [("d",), ("d", "e")], one_in=2))
def test_the_numbers_are_those_of_the_unpartitioned_program(sizes, names):
    """Forward and backward, with even and uneven sizes, on one axis and beside another, around an order of the links.

    Whole numbers: sums are exact in any order.
    """
    axes = {"d": 8} if names == ("d",) else {"e": 2, "d": 4}
    # Computing and sending take about as long.
    machine = Machine.of("v5e:2x4")
    slow = dataclasses.replace(machine, flops={"f32": 3e5}, network=tuple(map(_slow, machine.network)))
    rng = np.random.default_rng(0)
    arguments = [rng.integers(-4, 5, s).astype(np.float32) for s in sizes]

    def loss(*a):
        return jnp.sum(mlp(*a) ** 2) / 8

    for f in (mlp, jax.grad(loss, (0, 1, 2))):
        step = gshard.jit(f, mesh=axes, machine=slow)
        lowered = step.lower(*arguments)
        assert lowered.plan.rings
        assert {r.order for r in lowered.plan.rings.values()} <= {(), CYCLE}
        jax.tree.map(np.testing.assert_array_equal, step(*arguments), f(*arguments))
        assert "collective_permute" in reported(lowered.spmd.collectives)


def tensor_parallel(x, w, v):
    """Without a split sequence: what is made is all-reduced."""
    h = jax.nn.relu(gshard.replicate(x) @ split(w, 1, "d"))
    return gshard.replicate(split(h, 1, "d") @ split(v, 0, "d"))


def gradients(x, w, v):
    """Of weights that every device has: each is all-reduced, and half of that passes beside its own product."""

    def loss(w, v):
        h = jax.nn.relu(split(x, 0, "d") @ gshard.replicate(w))
        return jnp.sum((h @ gshard.replicate(v)) ** 2) / 8

    return jax.grad(loss, (0, 1))(w, v)


@pytest.mark.parametrize(
    "f, axes, sizes", crossed([tensor_parallel, gradients], [{"d": 8}, {"e": 2, "d": 4}], SIZES, one_in=2)
)
@pytest.mark.one_in(2)
def test_the_first_half_of_an_all_reduce_passes_beside_its_product(f, axes, sizes):
    machine = Machine.of("v5p:8x1x1" if axes == {"d": 8} else "v5p:2x4x1")
    slow = dataclasses.replace(machine, flops={"f32": 3e5}, network=tuple(map(_slow, machine.network)))
    rng = np.random.default_rng(1)
    arguments = [rng.integers(-4, 5, s).astype(np.float32) for s in sizes]
    asked = CollectiveMatmul(machine=slow), False
    step, at_once = (gshard.jit(f, mesh=axes, machine=slow, collective_matmul=windowed) for windowed in asked)
    found, usual = (gshard.explain(g, *arguments).bytes_by_kind for g in (step, at_once))
    assert found.get("collective_permute", 0) > usual.get("collective_permute", 0)
    if len(axes) == 1:  # beside another axis sums may be scattered, since the other one splits what reads them
        assert set(usual) == {"all_reduce"}
        assert {"collective_permute", "all_gather"} <= set(found)
    if sizes[0] == (64, 24):
        assert sum(found.values()) == sum(usual.values())
    jax.tree.map(np.testing.assert_array_equal, step(*arguments), f(*arguments))


def _slow(dimension):
    return dataclasses.replace(dimension, latency=0.0, bandwidth=dimension.bandwidth / 1e6)
