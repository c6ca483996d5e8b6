"""``put_rows`` and ``take_rows``: rows are sent to the devices that hold their places, whatever their placement."""

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import gshard
from gshard.core.jax_adapter_context import context_of
from gshard.testing.rule_checks import emitted, reported
from placed import in_every_way, mesh_of

MESH = {"a": 2, "b": 4}


def case(tokens: int, size: int, copies: int, dtype: Any = np.float32, seed: int = 0) -> tuple[Any, Any, Any]:
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


def taken(x: Any, places: Any) -> Any:
    inside = (places >= 0) & (places < len(x))
    return np.where(inside[..., None], x[np.where(inside, places, 0)], np.zeros((), x.dtype))


def both(x: Any, places: Any, size: int, axes: Any = ("a", "b")) -> Any:
    """There and back, split over all devices."""
    sent = gshard.split(gshard.put_rows(gshard.split(x, 0, axes), places, size), 0, axes)
    return sent, gshard.take_rows(sent, places)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("axes", [("a", "b"), ("b", "a"), "b"])
@pytest.mark.parametrize(
    "tokens, size, copies", [(16, 24, 1), (16, 40, 2), (13, 29, 2), (5, 3, 1), (3, 41, 3), (1, 1, 1)]
)
def test_rows_arrive_and_return(tokens: int, size: int, copies: int, axes: Any) -> None:
    """Even and uneven, fewer rows than devices, more than places; three calls with arrays placed differently."""
    x, places, want = case(tokens, size, copies)
    f = gshard.jit(functools.partial(both, size=size, axes=axes), mesh=MESH)
    np.testing.assert_array_equal(gshard.put_rows(x, places, size), want)
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    even = P(("a", "b")) if tokens % 8 == 0 else P()
    placements: list[Any] = [None, SingleDeviceSharding(jax.devices()[3]), NamedSharding(mesh, even)]
    for placement in placements:
        args = (x, places) if placement is None else jax.device_put((x, places), placement)
        sent, back = f(*args)
        np.testing.assert_array_equal(sent, want)
        np.testing.assert_array_equal(back, taken(want, places))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.int8, np.bool_, np.complex64, np.uint32, np.float16])
def test_every_dtype(dtype: Any) -> None:
    x, places, want = case(16, 40, 2, dtype)
    for _ in range(3):
        sent, back = gshard.jit(functools.partial(both, size=40), mesh=MESH)(x, places)
        np.testing.assert_array_equal(sent, want)
        np.testing.assert_array_equal(back, taken(want, places))


def test_bits_stay() -> None:
    """NaN, infinities and signed zeros reach their own places only."""
    x = np.array([[np.nan, -0.0], [np.inf, 1.0], [-np.inf, 0.0], [2.0, np.nan]] * 4, np.float32)
    places = np.random.default_rng(1).permutation(20)[:16].astype(np.int32)
    want = np.zeros((20, 2), np.float32)
    want[places] = x
    sent, back = gshard.jit(lambda x, p: both(x, p, 20), mesh=MESH)(x, places)
    np.testing.assert_array_equal(np.asarray(sent).view(np.int32), want.view(np.int32))
    np.testing.assert_array_equal(np.asarray(back).view(np.int32), x.view(np.int32))


@pytest.mark.parametrize("kind", [np.int64, np.uint32, np.uint8, np.int16])
def test_numbers_of_every_kind(kind: Any) -> None:
    places = np.array([3, 0, 5, 2, 200, 1], kind)
    x = np.arange(6.0, dtype=np.float32)
    want = [1, 5, 3, 0]
    with jax.enable_x64(True):
        assert gshard.put_rows(x, places, 4).tolist() == want
        assert gshard.take_rows(x, places).tolist() == [3, 0, 5, 2, 0, 1]
        assert gshard.jit(lambda x, p: gshard.put_rows(gshard.split(x, 0, 8), p, 4), mesh=8)(x, places).tolist() == want
    if kind is np.uint32:
        assert gshard.take_rows(x, np.array([2**32 - 1], kind)).tolist() == [0]


def test_derivatives() -> None:
    x, places, _ = case(16, 40, 2)
    weights = np.random.default_rng(3).normal(size=(40, 3)).astype(np.float32)

    def loss(x: Any, places: Any, put: Any, take: Any) -> Any:
        sent = jnp.sin(put(gshard.split(x, 0, 8), places, 40)) * weights
        return jnp.sum(sent**2) + jnp.sum(take(sent, places) ** 3)

    def plain_put(x: Any, places: Any, size: int) -> Any:
        places = jnp.where(places < 0, size, places)
        return jnp.zeros((size, 3)).at[places].set(jnp.broadcast_to(x[:, None], (*places.shape, 3)), mode="drop")

    def plain_take(x: Any, places: Any) -> Any:
        return x.at[jnp.where(places < 0, len(x), places)].get(mode="fill", fill_value=0)

    plain = functools.partial(loss, put=plain_put, take=plain_take)
    ours = functools.partial(loss, put=gshard.put_rows, take=gshard.take_rows)
    for transform in (
        jax.grad,
        lambda f: jax.jacfwd(f),
        lambda f: jax.grad(lambda x, p: jnp.sum(jax.grad(f)(x, p) ** 2)),
    ):
        want = transform(plain)(x, places)
        np.testing.assert_allclose(transform(ours)(x, places), want, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(gshard.jit(transform(ours), mesh=8)(x, places), want, rtol=1e-4, atol=1e-4)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dims", [(0, 0), (1, None), (None, 1), (0, 1)])
def test_vmap(dims: tuple[int | None, int | None]) -> None:
    cases = [case(8, 12, 2, seed=seed) for seed in range(3)]
    xs, places = (np.stack([c[i] for c in cases]) for i in range(2))
    x = np.moveaxis(xs, 0, dims[0]) if dims[0] is not None else xs[0]
    to = np.moveaxis(places, 0, dims[1]) if dims[1] is not None else places[0]

    def each(x: Any, to: Any) -> Any:
        sent = gshard.put_rows(x, to, 12)
        return sent, gshard.take_rows(x, to)

    want = [each(xs[i if dims[0] is not None else 0], places[i if dims[1] is not None else 0]) for i in range(3)]
    mapped = jax.vmap(each, dims)
    split = gshard.jit(lambda x, to: mapped(gshard.split(x, 0 if dims[0] != 0 else 1, 8), to), mesh=8)
    for got in (mapped(x, to), split(x, to)):
        for i in range(3):
            jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda y, i=i: y[i], got), want[i])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("batches, tokens, size, copies", [(2, 8, 16, 2), (3, 5, 13, 2), (4, 13, 5, 1), (1, 6, 9, 2)])
def test_batches_are_split_beside_their_rows(batches: int, tokens: int, size: int, copies: int) -> None:
    """One, two and padded batches on a device, even and uneven rows; three calls with arrays placed differently."""
    cases = [case(tokens, size, copies, seed=seed) for seed in range(batches)]
    x, places, want = (np.stack([c[i] for c in cases]) for i in range(3))
    back = np.stack([taken(*of) for of in zip(want, places, strict=True)])

    def both(x: Any, places: Any) -> Any:
        x = gshard.split(x, {0: "a", 1: "b"})
        sent = gshard.split(jax.vmap(functools.partial(gshard.put_rows, size=size))(x, places), {0: "a", 1: "b"})
        return sent, jax.vmap(gshard.take_rows)(sent, places)

    f = gshard.jit(both, mesh=MESH)
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    placements: list[Any] = [None, SingleDeviceSharding(jax.devices()[3]), NamedSharding(mesh, P())]
    for placement in placements:
        args = (x, places) if placement is None else jax.device_put((x, places), placement)
        for got, expected in zip(f(*args), (want, back), strict=True):
            np.testing.assert_array_equal(got, expected)


def test_rows_of_a_batch_stay_among_its_devices() -> None:
    x, places = jax.ShapeDtypeStruct((2, 512, 64), "float32"), jax.ShapeDtypeStruct((2, 512, 2), "int32")

    def f(x: Any, places: Any) -> Any:
        sent = jax.vmap(functools.partial(gshard.put_rows, size=2048))(gshard.split(x, {0: "a", 1: "b"}), places)
        return gshard.split(sent, {0: "a", 1: "b"})

    found = gshard.explain(f, x, places, mesh=gshard.Mesh.abstract(**MESH))
    rows = 512 * 2 // 4
    assert found.bytes_by_kind == {"all_to_all": rows * (64 + 1) * 4 * 3 // 4, "all_gather": 4 * 4 * 3}
    atoms = set(found.mesh.atoms_of["b"])
    assert all(set(c.atoms) <= atoms for c in found.spmd.collectives)


@pytest.mark.parametrize("machine", [None, "v5e:2x4"])
def test_bytes(machine: str | None) -> None:
    """Each device sends its own rows, and the numbers of their places once for all equations."""
    x, places = jax.ShapeDtypeStruct((4096, 512), "float32"), jax.ShapeDtypeStruct((4096, 2), "int32")
    of_device = 4096 * 2 // 8

    def f(x: Any, places: Any) -> Any:
        sent, back = both(x, places, 16384)
        return jnp.sum(sent**2) + jnp.sum(back)

    for g, exchanges in ((f, 2), (jax.value_and_grad(f), 4)):
        found = gshard.explain(g, x, places, mesh=gshard.Mesh.abstract(**MESH), machine=machine)
        assert found.bytes_by_kind["all_to_all"] == of_device * (exchanges * 512 + 1) * 4 * 7 // 8
        assert found.bytes_by_kind["all_gather"] == 8 * 4 * 7
        assert found.cost("v5e:2x4").seconds > 0
        assert emitted(found.spmd.jaxpr, found.spmd.mesh.atom_sizes) == reported(found.spmd.collectives)


def test_exchanges_have_no_context_of_the_user() -> None:
    """As other collectives that gshard adds: a context is for the user's equations."""
    x, places, _ = case(64, 256, 2)

    def f(x: Any, places: Any) -> Any:
        with set_xla_metadata(mine="yes"):
            return both(x * 2, places, 256)

    body = gshard.jit(f, mesh=MESH).lower(x, places).spmd.jaxpr.jaxpr.eqns[0].params["jaxpr"]
    exchanges = [e for e in body.eqns if e.primitive.name == "ragged_all_to_all"]
    assert len(exchanges) == 3
    assert not any(context_of(e).metadata for e in exchanges)
    assert any(context_of(e).metadata for e in body.eqns if e.primitive.name == "mul")


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "mesh, batches, as_they_lie",
    [
        ({"a": 4}, 1, True), ({"a": 8}, 1, True), ({"a": 2}, 1, False), ({"a": 3}, 1, False), ({"a": 4}, 2, False),
        ({"a": 4, "b": 2}, 2, True),
    ],
    ids=str,
)  # fmt: skip
def test_sorted_rows_are_sent_as_they_lie(mesh: dict[str, int], batches: int, as_they_lie: bool) -> None:
    """Four sorted parts on as many devices, on more and on fewer, and batches; three calls placed differently."""
    rng = np.random.default_rng(0)
    size = 41
    places = np.stack([rng.permutation(size + 7)[:40].reshape(4, 10) for _ in range(batches)])
    places = np.sort(np.minimum(places, size), axis=2).reshape(batches, 40).astype(np.int32)
    x = rng.normal(size=(batches, 40, 3)).astype(np.float32)
    weights = rng.normal(size=(batches, size, 3)).astype(np.float32)

    def gradient(x: Any, places: Any, parts: int) -> Any:
        def loss(x: Any) -> Any:
            dims = {0: "b", 1: "a"} if "b" in mesh else {1: "a"}
            put = functools.partial(gshard.put_rows, size=size, sorted_parts=parts)
            take = functools.partial(gshard.take_rows, sorted_parts=parts)
            sent = gshard.split(jax.vmap(put)(gshard.split(x, dims), places), dims)
            back = jax.vmap(take)(jnp.sin(sent) * weights, places)
            return jnp.sum(back**3), (sent, back)

        return jax.value_and_grad(loss, has_aux=True)(x)

    want = gradient(x, places, 0)
    devices = mesh_of(order=range(math.prod(mesh.values())), **mesh)
    f = gshard.jit(functools.partial(gradient, parts=4), mesh=devices)
    for got in in_every_way(f, (x, places), devices):
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), got, want)
    unsorted = gshard.jit(functools.partial(gradient, parts=0), mesh=devices)
    sorts = [str(g.lower(x, places).spmd.jaxpr).count(" sort[") for g in (f, unsorted)]
    assert sorts == [0 if as_they_lie else 1, 1]


def test_features_are_split_without_communication() -> None:
    x, places, _ = case(64, 256, 2)
    found = gshard.explain(lambda x, p: gshard.put_rows(gshard.split(x, 1, 3), p, 256), x, places, mesh=3)
    assert not found.bytes_by_kind


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_accelerators_send_what_is_routed(platform: str) -> None:
    mesh = jax.make_mesh((8,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    x, places, _ = case(64, 256, 2)
    args = [jax.ShapeDtypeStruct(y.shape, y.dtype, sharding=NamedSharding(mesh, P())) for y in (x, places)]
    check = jax.export.DisabledSafetyCheck.custom_call("ragged_all_to_all")
    f = jax.jit(gshard.jit(lambda x, p: both(x, p, 256, "a"), mesh=mesh))
    text = jax.export.export(f, platforms=[platform], disabled_checks=[check])(*args).mlir_module()
    assert text.count("@ragged_all_to_all") == 3  # numbers, rows there, rows back


def test_equal_places_reach_no_memory_of_others() -> None:
    """The result is undefined, and nothing is written beyond the room."""
    x = np.ones((16, 3), np.float32)
    places = np.zeros(16, np.int32)
    sent, _ = gshard.jit(lambda x, p: both(x, p, 8), mesh=MESH)(x, places)
    assert sent.shape == (8, 3)
    np.testing.assert_array_equal(np.asarray(sent)[1:], 0)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda x: gshard.put_rows(x, np.zeros(4, np.int32), 8), "rows has a number for each row of x"),
        (lambda x: gshard.put_rows(x, np.zeros(6, np.float32), 8), "rows are integers"),
        (lambda x: gshard.put_rows(x, np.zeros(6, np.int32), -1), "size is the number of places"),
        (lambda x: gshard.put_rows(x, np.zeros(6, np.int32), jnp.int32(8)), "size is the number of places"),
        (lambda x: gshard.put_rows(x, np.zeros(6, np.int32), 8, sorted_parts=4), "sorted_parts is the number"),
        (lambda x: gshard.take_rows(x, np.zeros((6, 2), np.int32), sorted_parts=2), "sorted_parts is the number"),
        (lambda x: gshard.take_rows(x, np.zeros((2, 2, 2), np.int32)), "rows are integers"),
        (lambda x: gshard.take_rows(1.0, np.zeros(2, np.int32)), "at least one dimension"),
    ],
)
def test_errors(call: Any, message: str) -> None:
    with pytest.raises(gshard.ArgumentError, match=message) as caught:
        call(np.ones((6, 2), np.float32))
    assert "test_row_functions.py" in str(caught.value)
