"""Results, errors and plans speak of the mesh and the axis names that the user gave; explicit axes work."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gshard

SHAPE = (4, 2)


@pytest.fixture
def auto():
    return jax.make_mesh(SHAPE, ("data", "model"), axis_types=(AxisType.Auto,) * 2)


@pytest.fixture
def explicit():
    return jax.make_mesh(SHAPE, ("data", "model"), axis_types=(AxisType.Explicit,) * 2)


@pytest.mark.parametrize("spec", [P(None, "model"), P(("model", "data")), P()])
def test_results_have_the_sharding_that_was_asked_for(spec, auto):
    x = jnp.arange(64.0).reshape(8, 8)
    y = gshard.jit(lambda x: gshard.shard(x * 2, spec), mesh=auto)(x)
    assert y.sharding == NamedSharding(auto, spec)
    assert y.sharding.mesh is auto
    np.testing.assert_array_equal(y, x * 2)
    under_jit = jax.jit(gshard.jit(lambda x: gshard.shard(x * 2, spec), mesh=auto))(x)
    assert under_jit.sharding.is_equivalent_to(y.sharding, 2)
    assert under_jit.sharding.mesh.axis_names == ("data", "model")


def test_a_part_of_an_axis_is_said_in_parts_of_it_where_no_mesh_of_jax_was_given():
    y = gshard.jit(lambda x: gshard.split(x, 0, 2), mesh={"data": 4, "model": 2})(jnp.arange(8.0))
    assert y.sharding.spec == P("data.0")
    np.testing.assert_array_equal(y, np.arange(8.0))


PARTS = {
    "10 rows": (10, lambda x: gshard.split(x, 0, "data") * 2),
    "6 rows, marked": (6, lambda x: gshard.split(x * 2, 0, ("data", "model"))),
    "a part of an axis": (16, lambda x: gshard.split(x, 0, 2) * 2),
    "devices by number": (16, lambda x: gshard.shard(x * 2, np.array([[0, 4], [1, 5], [2, 6], [3, 7]]))),
}
USES = {
    "eager": lambda y, on: y + 1,
    "jax.jit, with an array on the mesh": lambda y, on: jax.jit(lambda a, b: a.sum(0, keepdims=True) + b)(y, on),
    "gradient": lambda y, on: jax.grad(lambda a: jnp.sum(a * a))(y),
}


@pytest.mark.parametrize("set_mesh", [False, True])
@pytest.mark.parametrize("case", PARTS)
@pytest.mark.one_in(2)
def test_a_result_can_be_used_beside_arrays_on_the_users_mesh(case, set_mesh, auto, rng):
    """Also where its parts inside are uneven, or over a part of an axis: JAX has neither under ``jax.set_mesh``."""
    rows, f = PARTS[case]
    x = jnp.asarray(rng.integers(-9, 9, (rows, 4)), jnp.float32)  # whole numbers: sums are exact in any order
    on = jax.device_put(jnp.asarray(rng.integers(-9, 9, (8, 4)), jnp.float32), NamedSharding(auto, P("data")))
    step = gshard.jit(f, mesh=auto)
    for _ in range(2):
        y = step(x)
        assert y.sharding.mesh is auto
        np.testing.assert_array_equal(y, x * 2)
        for use in USES.values():
            want = use(jnp.asarray(np.asarray(y)), np.asarray(on))
            with jax.set_mesh(auto) if set_mesh else contextlib.nullcontext():
                np.testing.assert_array_equal(use(y, on), want)
        x = y  # the next call takes what this one returned


def test_a_sharding_on_another_mesh_of_the_devices_is_kept(auto):
    """Where the result was asked for in it: over the first half of ``data``, which ``auto`` has no name for."""
    other = jax.sharding.Mesh(auto.devices.reshape(2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    said = NamedSharding(other, P("a"))
    x = jnp.arange(32.0).reshape(8, 4)
    for f in (
        gshard.jit(lambda x: x * 2, mesh=auto, out_shardings=said),
        gshard.jit(lambda x: jax.lax.with_sharding_constraint(x * 2, said), mesh=auto),
    ):
        y = f(x)
        assert y.sharding.is_equivalent_to(said, 2)
        np.testing.assert_array_equal(y, x * 2)


def test_explain_lists_the_results_in_fewer_shards(auto):
    ten = gshard.explain(lambda x: gshard.split(x, 0, "data") * 2, jnp.ones((10, 4)), mesh=auto)
    (row,) = ten.lists["returned"]
    assert "f32[10@data,4] inside (48 B a device), f32[10,4] returned (160 B)" in row
    assert "pad the array to a size that divides" in row
    assert row in str(ten)
    part = gshard.explain(lambda x: gshard.split(x, 0, 2) * 2, jnp.ones((16, 4)), mesh=auto)
    (row,) = part.lists["returned"]
    assert "f32[16@data.0,4] inside (128 B a device), f32[16,4] returned (256 B)" in row
    assert "an axis of the mesh" in row
    assert part.bytes_by_kind == {"all_gather": 128}  # and what it costs is among the collectives
    even = gshard.explain(lambda x: gshard.split(x, 0, "data") * 2, jnp.ones((16, 4)), mesh=auto)
    assert even.lists["returned"] == ()
    assert even.total_bytes == 0


def test_explicit_arrays_come_and_go(explicit):
    w = jax.device_put(jnp.arange(32.0).reshape(8, 4), NamedSharding(explicit, P("data", "model")))
    step = gshard.jit(lambda x: (x * 2, x.sum()), mesh=explicit)

    def checked():
        y, loss = step(w)
        assert jax.typeof(y).str_short() == "float32[8@data,4@model]"
        assert jax.typeof(y + 1).str_short() == "float32[8@data,4@model]"
        assert float(loss) == 496.0
        assert bool(jnp.isfinite(loss))

    checked()
    with jax.set_mesh(explicit):
        checked()
        under_jit = jax.jit(lambda x: step(x)[0] + x)(w)
        assert jax.typeof(under_jit).str_short() == "float32[8@data,4@model]"
        np.testing.assert_array_equal(under_jit, w * 3)
        gradient = jax.grad(lambda x: (step(x)[0] * x).sum() + step(x)[1])(w)
        assert jax.typeof(gradient).str_short() == "float32[8@data,4@model]"
        np.testing.assert_allclose(gradient, 4 * w + 1)


def test_reshard_inside_is_a_mark(explicit, rng):
    x = jnp.asarray(rng.standard_normal((8, 8), np.float32))
    with jax.set_mesh(explicit):
        w = jax.device_put(x, NamedSharding(explicit, P("data", "model")))
        turned = gshard.jit(lambda x: jax.sharding.reshard(x, P("model", "data")) * 2)
        y = turned(w)
        assert y.sharding.spec == P("model", "data")
        np.testing.assert_array_equal(y, x * 2)

        @jax.sharding.auto_axes(out_sharding=P("data", None))
        def product(a, b):
            return a @ b

        z = gshard.jit(lambda x: product(x, x) + 1)(w)
        np.testing.assert_allclose(z, x @ x + 1, rtol=1e-5, atol=1e-5)
        assert z.sharding.spec == P("data")


def test_explain_says_the_mesh_of_a_sharding_on_another_one(auto):
    """``data`` of 8 devices where ``data`` of the function's mesh is 4."""
    other = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def f(x):
        return jax.lax.with_sharding_constraint(x * 2, NamedSharding(other, P("data")))

    told = gshard.explain(f, x := jnp.ones((16, 4)), mesh=auto).format(tensors=12)
    assert "marked shard(x, P('data', None)) on a mesh of data=8 at" in told
    own = gshard.explain(lambda x: gshard.shard(x, NamedSharding(auto, P("data"))), x, mesh=auto).format(tensors=12)
    assert "marked shard(x, P('data', None)) at" in own
