"""Estimates: the bounds in them hold for every plan, and the figures are those of an even share."""

import jax
import jax.numpy as jnp
import pytest

import gshard
from gshard import Machine, Mesh
from gshard.search.screening import estimated

ARRAY = jax.ShapeDtypeStruct


def products(w, x):
    return jnp.mean(jax.nn.relu(x @ w) @ w.T)


def step(w, x):
    return w - 0.1 * jax.grad(products)(w, x)


def looped(w, x):
    return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=5)[0]


def attended(w, x):
    q = (x @ w).reshape(8, -1, 4, 64)
    return jax.nn.dot_product_attention(q, q, q).sum()


def resized(w, x):  # products with tables become other operations
    return jax.image.resize(x @ w, (2 * x.shape[0], w.shape[1]), "linear")


@pytest.mark.parametrize("machine", ["h100:1x8", "v5e:2x4", "cpu:8"])
@pytest.mark.parametrize("f", [products, step, looped, attended, resized])
def test_no_plan_is_below_the_bounds(f, machine):
    w, x = ARRAY((256, 256), "float32"), ARRAY((512, 256), "float32")
    found = gshard.search(f, w, x, mesh=Mesh.abstract(a=2, b=4), machine=machine, progress=False)
    program = gshard.jit(f, mesh=Mesh.abstract(a=8)).lower(w, x).program
    estimate = estimated(program, Mesh.abstract(a=8), Machine.of(machine), ())
    assert 0 <= estimate.least_seconds <= found.bound * (1 + 1e-9)
    assert estimate.least_seconds > 0 or f is resized
    for plan in (found.best.chosen, *found.best.others):
        memory = plan.cost.memory
        assert memory.arguments + memory.results - memory.shared >= estimate.least_bytes * (1 - 1e-9)


def test_an_even_share():
    w, x = ARRAY((2048, 2048), "float32"), ARRAY((4096, 2048), "float32")
    program = gshard.jit(lambda w, x: x @ w, mesh=Mesh.abstract(a=8)).lower(w, x).program
    estimate = estimated(program, Mesh.abstract(a=8), Machine.of("h100:1x8"), ())
    alone = estimated(program, Mesh.abstract(a=1), Machine.of("h100:1x1"), ())
    assert estimate.seconds == pytest.approx(alone.seconds / 8)
    assert estimate.peak == pytest.approx(alone.peak / 8)
    assert estimate.least_bytes == pytest.approx(4 * (2048**2 + 2 * 4096 * 2048) / 8)


def test_parts_for_one_device_have_no_bound(rng):
    mesh = jax.make_mesh((8,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    part = jax.shard_map(lambda x: x @ x.T, mesh=mesh, in_specs=jax.P("a"), out_specs=jax.P("a"))
    program = gshard.jit(part, mesh=mesh).lower(ARRAY((64, 8), "float32")).program
    estimate = estimated(program, gshard.Mesh.of(mesh), Machine.of("cpu:8"), ())
    assert (estimate.least_seconds, estimate.least_bytes) == (0, 0)
