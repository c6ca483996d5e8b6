"""Equations that run on shards in ways of their own: what is traced to price them."""

import math

import jax
import jax.numpy as jnp
import pytest

import gshard
from gshard.core.mesh import Mesh
from gshard.core.planning_tables import tables
from gshard.device.machine import Machine
from gshard.device.network import interchangeable
from gshard.planning.reshard_costs import axes_of
from gshard.planning.strategies import components, splits
from gshard.search import emitted
from gshard.search.emitted import OwnWays, emitted_alone, has_own_way
from gshard.search.pipeline import plans_of
from gshard.search.seconds import Seconds, on_machine
from gshard.tracing.trace import trace

MESH = Mesh.abstract(a=2, b=2, c=2)


def stencil(x):
    return x[1:-1, :, 2:] + jnp.pad(x, ((0, 0), (1, 2), (0, 0)))[1:-1, 1:-2, 2:] + jnp.cumsum(x, 1)[2:, :, :-2]


def program():
    return trace(stencil, jax.ShapeDtypeStruct((10, 8, 9), jnp.float32))


@pytest.mark.parametrize("name", ["h100", "h100:4x2"])
def test_axes_in_each_others_places_change_no_time(name):
    """All that is emitted, and each window, as if the split itself were traced; windows name the split's own axes."""
    machine = Machine.of(name, MESH.size)
    mesh = on_machine(MESH, machine)
    ways, compared = OwnWays(mesh, machine), 0
    with tables():
        for e in program().block.walk():
            assert e.rule is not None
            own = [s for s in splits(e.rule, components(e.rule)[0], mesh, axes_of(mesh)) if has_own_way(e.rule, s)]
            for split in own[::8]:
                found, expected = ways.of(e, split), emitted_alone(e, split, mesh, machine)
                assert found is not None
                assert found.seconds == pytest.approx(expected.seconds, rel=1e-12)
                assert [w[:2] for w in found.windows] == [w[:2] for w in expected.windows]
                for got, want in zip(found.windows, expected.windows, strict=True):
                    assert got.cost == pytest.approx(want.cost, rel=1e-12)
                compared += 1
    assert compared > 5


def test_axes_across_a_network_keep_their_places():
    assert interchangeable(MESH, Machine.of("h100:4x2")) == (("a", "b"), ("c",))
    assert all(len(alike) == 1 for alike in interchangeable(MESH, Machine.of("v5p", 8)))


def convolved(x, w):
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def convolution():
    """A convolution and the gradient of its weights, which read the same windows of the images."""

    def step(x, w, d):
        return convolved(x, w), jax.vjp(lambda w: convolved(x, w), w)[1](d)[0]

    image, kernel = jax.ShapeDtypeStruct((2, 16, 16, 8), jnp.float32), jax.ShapeDtypeStruct((3, 3, 8, 8), jnp.float32)
    return trace(step, image, kernel, image)


@pytest.mark.parametrize("name", ["h100", "v5e"])
def test_what_is_emitted_takes_no_less_than_is_assumed(name):
    """So that no other plan is better than the one that is chosen so."""
    machine, compared = Machine.of(name, MESH.size), 0
    mesh = on_machine(MESH, machine)
    costs = Seconds(mesh, machine, axes_of(mesh))
    with tables():
        for program_of in (program, convolution):
            for kernel, _ in costs.kernels(program_of().block):
                rule = kernel.equation.rule
                assert rule is not None
                some = splits(rule, components(rule)[0], mesh, axes_of(mesh))[::7]
                own = [split for split in some if has_own_way(rule, split)]
                least = Seconds(mesh, machine, axes_of(mesh)).assuming().split_costs(kernel, own, math.inf)
                assert (costs.split_costs(kernel, own, math.inf) >= least * (1 - 1e-9)).all()
                compared += len(own)
    assert compared > 20


@pytest.mark.parametrize("mode", ["wrap", pytest.param("symmetric", marks=pytest.mark.slow)])
def test_few_ways_of_a_padding_are_traced(mode, monkeypatch):
    """Of some thousand ways to split the equations of one padding, on three axes."""
    traced = []

    def counted(*args):
        traced.append(args)
        return emitted_alone(*args)

    monkeypatch.setattr(emitted, "emitted_alone", counted)

    def padded(v, w):
        return jnp.pad(v, [(0, 2), (1, 0), (3, 2)], mode=mode), 2 * gshard.split(w, 0, ("b", "c"))

    shapes = jax.ShapeDtypeStruct((19, 9, 12), jnp.uint32), jax.ShapeDtypeStruct((16, 4), jnp.float32)
    machine = Machine.of("h100", MESH.size)
    with tables():
        found = plans_of(trace(padded, *shapes), on_machine(MESH, machine), machine)
        assert found[0].cost is not None
        assert len(traced) <= 12, "what is chosen splits nothing that has to be fetched"
        assert all(made.choice is not None and made.choice() is not None for made in found)  # every choice is priced
    assert 0 < len(traced) <= 120
    assert len({(e.rule, tuple(sorted(split.items()))) for e, split, *_ in traced}) == len(traced)
