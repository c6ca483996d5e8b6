"""Devices in any order: every device gets the part that the mark gives it, and nothing is sent but for a real move."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gshard
from gshard import shard
from gshard.xla.hlo_collectives import collectives

X = np.random.default_rng(0).standard_normal((8, 24)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((24, 16)).astype(np.float32)
OF_FOUR = [np.array(order) for order in itertools.permutations(range(4))]
OF_EIGHT = [np.random.default_rng(i).permutation(8) for i in range(200)]


def in_its_place(x: jax.Array, whole: np.ndarray, ids: np.ndarray) -> None:
    """Every device holds the part of ``whole`` that ids give it."""
    size = [n // p for n, p in zip(whole.shape, ids.shape, strict=True)]
    copies = len(x.sharding.device_set) // ids.size
    seen = set()
    for s in x.addressable_shards:
        at = np.argwhere(ids == s.device.id // copies)[0]
        part = tuple(slice(i * n, (i + 1) * n) for i, n in zip(at, size, strict=True))
        np.testing.assert_array_equal(np.asarray(s.data), whole[part])
        seen.add(s.device.id)
    assert len(seen) == len(x.sharding.device_set)


def arrays_of(orders: list[np.ndarray], shapes: list[tuple[int, int]]) -> list[np.ndarray]:
    return [order.reshape(shapes[i % len(shapes)]) for i, order in enumerate(orders)]


@pytest.mark.parametrize("devices", [4, 8])
def test_every_device_holds_what_the_mark_says(devices: int) -> None:
    orders = OF_FOUR if devices == 4 else OF_EIGHT[:24]
    shapes = [(2, 2), (4, 1), (1, 4)] if devices == 4 else [(2, 4), (4, 2), (8, 1), (1, 8)]
    for ids in arrays_of(orders, shapes):
        jitted = gshard.jit(lambda x, ids=ids: shard(x, ids) * 2, mesh=devices)
        assert not jitted.lower(X).spmd.collectives
        got = jitted(X)
        in_its_place(got, 2 * X, ids)
        np.testing.assert_array_equal(np.asarray(got), 2 * X)


@pytest.mark.slow
def test_two_hundred_orders_of_eight_compute_the_same_with_the_same_bytes() -> None:
    """A contraction over what is cut in a crooked order: its sums are reduced among the devices that hold the parts."""

    def f(x: Any, w: Any, ids: Any) -> Any:
        return jnp.tanh(shard(x, ids) @ w)

    plain = gshard.explain(lambda x, w: f(x, w, np.arange(8).reshape(2, 4)), X, W, mesh=8)
    for order in OF_EIGHT:
        ids = order.reshape(2, 4)
        jitted = gshard.jit(lambda x, w, ids=ids: f(x, w, ids), mesh=8)
        np.testing.assert_allclose(np.asarray(jitted(X, W)), np.tanh(X @ W), rtol=2e-5, atol=1e-5)
        assert gshard.explain(jitted, X, W).bytes_by_kind == plain.bytes_by_kind


def from_one_to_the_other(first: np.ndarray, second: np.ndarray, devices: int) -> None:
    x = jax.device_put(X, NamedSharding(jax.sharding.Mesh(np.array(jax.devices())[first], "d"), P("d")))
    jitted = gshard.jit(lambda x: shard(x, second.reshape(-1, 1)), mesh=devices)
    got = jitted(x)
    in_its_place(got, X, second.reshape(-1, 1))
    sent = jitted.lower(x).spmd.collectives
    if (first == second).all():
        assert not sent
        return
    assert [c.kind for c in sent] == ["collective_permute"]
    assert sent[0].bytes == X.nbytes // devices
    compiled = collectives(jitted.lower(x).executable.compiled.as_text())
    assert [(c.kind, c.total_bytes) for c in compiled] == [("collective_permute", X.nbytes // devices)]


@pytest.mark.parametrize("i", range(24))
@pytest.mark.one_in(4)
def test_from_each_order_of_four_to_each_other_is_one_permute(i: int) -> None:
    for second in OF_FOUR if i == 2 else OF_FOUR[i % 8 :: 8]:
        from_one_to_the_other(OF_FOUR[i], second, 4)


@pytest.mark.parametrize("i", range(4))
def test_between_random_orders_of_eight_it_is_one_permute(i: int) -> None:
    for first, second in zip(OF_EIGHT[i::50], OF_EIGHT[i + 1 :: 50], strict=False):
        from_one_to_the_other(first, second, 8)


def test_a_state_that_stays_in_its_order_is_never_moved() -> None:
    """Results leave in the order of the mark, and the next call takes them so: nothing is sent, on either way."""
    ids = OF_EIGHT[3].reshape(4, 2)
    step = gshard.jit(lambda x: shard(x, ids) + 1, mesh=8, donate_argnums=0)
    start = np.arange(8 * 24, dtype=np.int32).reshape(8, 24)
    x = step(start)
    where = x.sharding
    for _ in range(3):
        assert not step.lower(x).spmd.collectives
        x = step(x)
        assert x.sharding == where
    np.testing.assert_array_equal(np.asarray(x), start + 4)


def test_two_orders_in_one_program() -> None:
    """The larger array keeps its order at home; the smaller is moved on its way out."""
    first, second = OF_EIGHT[0].reshape(8, 1), OF_EIGHT[1].reshape(8, 1)
    jitted = gshard.jit(lambda x, w: (shard(x, first) + 1, shard(w * 2, second)), mesh=8)
    big, small = jitted(W, X)
    in_its_place(big, W + 1, first)
    in_its_place(small, 2 * X, second)
    assert [c.total_bytes for c in jitted.lower(W, X).spmd.collectives] == [X.nbytes // 8]


def test_names_of_the_mesh_keep_their_meaning_beside_a_device_order(mesh_2x4: jax.sharding.Mesh) -> None:
    """A result marked by names is where JAX would put it, though the program runs in another order."""
    ids = OF_EIGHT[5].reshape(8, 1)
    jitted = gshard.jit(lambda x, w: (shard(w, ids) + 1, shard(x * 2, P("model", "data"))), mesh=mesh_2x4)
    first, second = jitted(X, W)
    in_its_place(first, W + 1, ids)
    wanted = jax.device_put(2 * X, NamedSharding(mesh_2x4, P("model", "data")))
    held = {s.device: np.asarray(s.data) for s in second.addressable_shards}
    for s in wanted.addressable_shards:
        np.testing.assert_array_equal(held[s.device], np.asarray(s.data))


def test_gradients_and_uneven_results() -> None:
    ids = OF_EIGHT[7].reshape(2, 4)
    x = np.random.default_rng(2).standard_normal((7, 10)).astype(np.float32)

    def loss(x: Any) -> Any:
        return jnp.sum(jnp.sin(shard(x, ids)) ** 2)

    jitted = gshard.jit(jax.value_and_grad(loss), mesh=8, uneven="keep")
    value, gradient = jitted(x)
    expected, wanted = jax.value_and_grad(lambda x: jnp.sum(jnp.sin(x) ** 2))(x)
    np.testing.assert_allclose(float(value), float(expected), rtol=1e-5)
    np.testing.assert_allclose(np.asarray(gradient), wanted, rtol=1e-5, atol=1e-6)
    again = 2 * np.sin(wanted) * np.cos(wanted)
    np.testing.assert_allclose(np.asarray(jitted(gradient)[1]), again, rtol=1e-5, atol=1e-6)


def test_under_a_transformation_the_order_is_the_meshs() -> None:
    ids = OF_EIGHT[9].reshape(8, 1)
    jitted = gshard.jit(lambda x: jnp.sin(shard(x, ids)), mesh=8)
    got = jax.jit(lambda x: jitted(x) * 2)(X)
    np.testing.assert_allclose(np.asarray(got), 2 * np.sin(X), rtol=1e-6, atol=1e-6)
    gradient = jax.grad(lambda x: jitted(x).sum())(X)
    np.testing.assert_allclose(np.asarray(gradient), np.cos(X), rtol=1e-6, atol=1e-6)


def test_the_order_is_shown() -> None:
    ids = OF_EIGHT[0].reshape(8, 1)
    text = str(gshard.explain(lambda x: shard(x, ids) + 1, X, mesh=8))
    assert f"devices in the order {','.join(map(str, OF_EIGHT[0]))}" in text
    assert gshard.explain(lambda x: shard(x, ids) + 1, X, mesh=8).data("cpu")["mesh"]["order"] == tuple(OF_EIGHT[0])


def test_after_two_marks_a_value_lies_in_the_order_of_the_second() -> None:
    first, second = OF_EIGHT[0].reshape(8, 1), OF_EIGHT[1].reshape(8, 1)
    in_its_place(gshard.jit(lambda x: shard(shard(x, first), second), mesh=8)(X), X, second)
    in_its_place(gshard.jit(lambda x: shard(shard(x, first), first), mesh=8)(X), X, first)


def test_keys_and_weak_types_leave_in_another_order() -> None:
    """JAX wants the parts of keys in the order of the devices, and forgets weak types of what is made of parts."""
    turned = jax.sharding.Mesh(np.array(jax.devices()[::-1]).reshape(2, 4), ("p", "q"))

    def f(key: Any, x: Any) -> Any:
        keys = jax.random.split(key, 8)
        return keys, keys[0], x + jax.random.bits(key), 2, jnp.full(8, 2.0)

    x, key = np.arange(16), jax.random.key(3)
    wanted = jax.jit(f)(key, x)
    call = gshard.jit(f, mesh=8)
    for placed in (jax.device_put(key, NamedSharding(turned, P())), key):
        for _ in range(2):
            keys, first, *numbers = call(placed, jax.device_put(x, NamedSharding(turned, P("q"))))
            for ours, theirs in zip((keys, first), wanted[:2], strict=True):
                np.testing.assert_array_equal(jax.random.key_data(ours), jax.random.key_data(theirs))
            for ours, theirs in zip(numbers, wanted[2:], strict=True):
                assert ours.weak_type == theirs.weak_type
                np.testing.assert_array_equal(ours, theirs)
        call(first, numbers[0])
