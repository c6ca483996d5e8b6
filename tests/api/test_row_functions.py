"""``put_rows`` and ``take_rows``: rows are sent to the devices that hold their places, whatever their placement."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import gshard
from gshard.testing.rule_checks import emitted, reported

MESH = {"a": 2, "b": 4}


def case(tokens, size, copies, dtype=np.float32, seed=0):
    """Rows, their places, and the result; a third of the numbers are out of range."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(tokens, 3)) * 10
    x = (x > 0) if dtype is np.bool_ else x + 1j * x if dtype is np.complex64 else x
    x = np.asarray(jnp.asarray(x).astype(dtype))
    count = tokens * copies
    places = rng.permutation(max(size, count) * 3 // 2)[:count] - size // 4
    places = places.reshape(tokens, copies).astype(np.int32)
    result = np.zeros((size, 3), x.dtype)
    for t, k in itertools.product(range(tokens), range(copies)):
        if 0 <= places[t, k] < size:
            result[places[t, k]] = x[t]
    return x, places, result


def taken(x, places):
    inside = (places >= 0) & (places < len(x))
    return np.where(inside[..., None], x[np.where(inside, places, 0)], np.zeros((), x.dtype))


def both(x, places, size, axes=("a", "b")):
    """There and back, split over all devices."""
    sent = gshard.split(gshard.put_rows(gshard.split(x, 0, axes), places, size), 0, axes)
    return sent, gshard.take_rows(sent, places)


def agrees_wherever_they_are(f, arguments, want, spec):
    """Three calls, with arrays placed differently."""
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    for placement in (None, SingleDeviceSharding(jax.devices()[3]), NamedSharding(mesh, spec)):
        args = arguments if placement is None else jax.device_put(arguments, placement)
        jax.tree.map(np.testing.assert_array_equal, f(*args), want)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("axes", [("a", "b"), ("b", "a"), "b"])
@pytest.mark.parametrize(
    "tokens, size, copies", [(16, 24, 1), (16, 40, 2), (13, 29, 2), (5, 3, 1), (3, 41, 3), (1, 1, 1)]
)
def test_rows_arrive_and_return(tokens, size, copies, axes):
    """Even and uneven, fewer rows than devices, more than places; three calls with arrays placed differently."""
    x, places, want = case(tokens, size, copies)
    f = gshard.jit(functools.partial(both, size=size, axes=axes), mesh=MESH)
    np.testing.assert_array_equal(gshard.put_rows(x, places, size), want)
    agrees_wherever_they_are(f, (x, places), (want, taken(want, places)), P(("a", "b")) if tokens % 8 == 0 else P())


def test_bits_stay():
    """NaN, infinities and signed zeros reach their own places only."""
    x = np.array([[np.nan, -0.0], [np.inf, 1.0], [-np.inf, 0.0], [2.0, np.nan]] * 4, np.float32)
    places = np.random.default_rng(1).permutation(20)[:16].astype(np.int32)
    want = np.zeros((20, 2), np.float32)
    want[places] = x
    sent, back = gshard.jit(lambda x, p: both(x, p, 20), mesh=MESH)(x, places)
    np.testing.assert_array_equal(np.asarray(sent).view(np.int32), want.view(np.int32))
    np.testing.assert_array_equal(np.asarray(back).view(np.int32), x.view(np.int32))


@pytest.mark.parametrize("kind", [np.int64, np.uint32, np.uint8, np.int16])
def test_numbers_of_every_kind(kind):
    places = np.array([3, 0, 5, 2, 200, 1], kind)
    x = np.arange(6.0, dtype=np.float32)
    want = [1, 5, 3, 0]
    with jax.enable_x64(True):
        assert gshard.put_rows(x, places, 4).tolist() == want
        assert gshard.take_rows(x, places).tolist() == [3, 0, 5, 2, 0, 1]
        assert gshard.jit(lambda x, p: gshard.put_rows(gshard.split(x, 0, 8), p, 4), mesh=8)(x, places).tolist() == want
    if kind is np.uint32:
        assert gshard.take_rows(x, np.array([2**32 - 1], kind)).tolist() == [0]


def test_derivatives():
    x, places, _ = case(16, 40, 2)
    weights = np.random.default_rng(3).normal(size=(40, 3)).astype(np.float32)

    def loss(x, places, put, take):
        sent = jnp.sin(put(gshard.split(x, 0, 8), places, 40)) * weights
        return jnp.sum(sent**2) + jnp.sum(take(sent, places) ** 3)

    def plain_put(x, places, size):
        places = jnp.where(places < 0, size, places)
        return jnp.zeros((size, 3)).at[places].set(jnp.broadcast_to(x[:, None], (*places.shape, 3)), mode="drop")

    def plain_take(x, places):
        return x.at[jnp.where(places < 0, len(x), places)].get(mode="fill", fill_value=0)

    plain = functools.partial(loss, put=plain_put, take=plain_take)
    ours = functools.partial(loss, put=gshard.put_rows, take=gshard.take_rows)
    for transform in (jax.jacfwd, lambda f: jax.grad(lambda x, p: jnp.sum(jax.grad(f)(x, p) ** 2))):
        want = transform(plain)(x, places)
        np.testing.assert_allclose(gshard.jit(transform(ours), mesh=8)(x, places), want, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(jax.grad(ours)(x, places), jax.grad(plain)(x, places), rtol=1e-4, atol=1e-4)


def test_rows_of_a_batch_stay_among_its_devices():
    x, places = jax.ShapeDtypeStruct((2, 512, 64), "float32"), jax.ShapeDtypeStruct((2, 512, 2), "int32")

    def f(x, places):
        sent = jax.vmap(functools.partial(gshard.put_rows, size=2048))(gshard.split(x, {0: "a", 1: "b"}), places)
        return gshard.split(sent, {0: "a", 1: "b"})

    found = gshard.explain(f, x, places, mesh=gshard.Mesh.abstract(**MESH))
    rows = 512 * 2 // 4
    assert found.bytes_by_kind == {"all_to_all": rows * (64 + 1) * 4 * 3 // 4, "all_gather": 4 * 4 * 3}
    atoms = set(found.mesh.atoms_of["b"])
    assert all(set(c.atoms) <= atoms for c in found.spmd.collectives)


@pytest.mark.parametrize("machine", [None, "v5e:2x4"])
def test_bytes(machine):
    """Each device sends its own rows, and the numbers of their places once for all equations."""
    x, places = jax.ShapeDtypeStruct((4096, 512), "float32"), jax.ShapeDtypeStruct((4096, 2), "int32")
    of_device = 4096 * 2 // 8

    def f(x, places):
        sent, back = both(x, places, 16384)
        return jnp.sum(sent**2) + jnp.sum(back)

    for g, exchanges in ((f, 2), (jax.value_and_grad(f), 4)):
        found = gshard.explain(g, x, places, mesh=gshard.Mesh.abstract(**MESH), machine=machine)
        assert found.bytes_by_kind["all_to_all"] == of_device * (exchanges * 512 + 1) * 4 * 7 // 8
        assert found.bytes_by_kind["all_gather"] == 8 * 4 * 7
        assert found.cost("v5e:2x4").seconds > 0
        assert emitted(found.spmd.jaxpr, found.spmd.mesh.atom_sizes) == reported(found.spmd.collectives)


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_accelerators_send_what_is_routed(platform):
    mesh = jax.make_mesh((8,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    x, places, _ = case(64, 256, 2)
    args = [jax.ShapeDtypeStruct(y.shape, y.dtype, sharding=NamedSharding(mesh, P())) for y in (x, places)]
    check = jax.export.DisabledSafetyCheck.custom_call("ragged_all_to_all")
    f = jax.jit(gshard.jit(lambda x, p: both(x, p, 256, "a"), mesh=mesh))
    text = jax.export.export(f, platforms=[platform], disabled_checks=[check])(*args).mlir_module()
    assert text.count("@ragged_all_to_all") == 3  # numbers, rows there, rows back


def test_equal_places_reach_no_memory_of_others():
    """The result is undefined, and nothing is written beyond the room."""
    x = np.ones((16, 3), np.float32)
    places = np.zeros(16, np.int32)
    sent, _ = gshard.jit(lambda x, p: both(x, p, 8), mesh=MESH)(x, places)
    assert sent.shape == (8, 3)
    np.testing.assert_array_equal(np.asarray(sent)[1:], 0)


@pytest.mark.parametrize("call, message", [
    (lambda x: gshard.put_rows(x, np.zeros(4, np.int32), 8), "rows has a number for each row of x"),
    (lambda x: gshard.put_rows(x, np.zeros(6, np.int32), -1), "size is the number of places"),
    (lambda x: gshard.put_rows(x, np.zeros(6, np.int32), jnp.int32(8)), "size is the number of places"),
    (lambda x: gshard.take_rows(x, np.zeros((2, 2, 2), np.int32)), "rows are integers"),
    (lambda x: gshard.take_rows(1.0, np.zeros(2, np.int32)), "at least one dimension"),
])  # fmt: skip
def test_errors(call, message):
    with pytest.raises(gshard.ArgumentError, match=message) as caught:
        call(np.ones((6, 2), np.float32))
    assert "test_row_functions.py" in str(caught.value)
