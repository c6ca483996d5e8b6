"""A mesh that the user has set is the user's: what gshard traces for itself is traced as if none were set."""

import contextlib
import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax, random
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gshard
from gshard import shard, split
from gshard.xla.hlo_collectives import collectives
from placed import mesh_of
from sampled import crossed

KINDS = pytest.mark.parametrize("explicit", [False, True])
GRID = {"a": 4, "b": 2}


def own(x):
    """A sum that JAX does not recognise as one."""
    return lax.reduce(x, np.int32(0), lambda a, b: a + b * 1, (x.ndim - 1,))


def largest_and_sum(x):
    """Two reductions at once."""
    at = lax.iota(np.int32, x.shape[0])
    zeros = np.int32(0), np.int32(0)
    return lax.reduce((x, at), zeros, lambda p, q: (jnp.maximum(p[0], q[0]), p[1] + q[1]), (0,))


REDUCED = {
    "own": lambda x: own(split(x, 0, 8)),
    "two": lambda x: largest_and_sum(split(x, 0, 8)),
    "scan": lambda x: lax.scan(lambda s, y: (s + own(split(x + y, 0, 8)), own(x)), np.int32(0), x),
    "cond": lambda x: lax.cond(x[0] > 0, own, lambda y: -own(split(y, 0, 8)), x),
    "window": lambda x: lax.reduce_window(split(x, 0, 8), np.int32(0), lambda a, b: a + b * 1, (3,), (1,), ((1, 1),)),
}


@pytest.mark.parametrize("name, n, explicit", crossed(list(REDUCED), [8, 13], [False, True], one_in=4))
@pytest.mark.one_in(2)
def test_reductions_by_a_computation_of_ones_own(name, n, explicit):
    f, x = REDUCED[name], np.arange(-3, n - 3, dtype=np.int32)
    want = jax.tree.map(np.asarray, jax.jit(f)(x))
    mesh = mesh_of(**GRID, explicit=explicit)
    with jax.set_mesh(mesh):
        # With a machine each way to split an equation is traced alone, and the program is read back.
        for step in (gshard.jit(f), gshard.jit(f, machine="cpu:8")):
            for given in (x, jnp.asarray(x), jax.device_put(x, NamedSharding(mesh, P()))):
                jax.tree.map(np.testing.assert_array_equal, step(given), want)
        assert gshard.explain(step, x).plan


KEYS = {
    "bits": lambda key, x: jax.vmap(lambda i: random.bits(random.fold_in(key, i), (3,)))(split(x, 0, 8)),
    "normal": lambda key, x: jax.vmap(lambda k: random.normal(k, (4,)))(random.split(key, x.size)),
    "permutation of x": lambda key, x: random.permutation(key, split(x, 0, 8)),
    "categorical": lambda key, x: random.categorical(key, split(x * 0.5, 0, 8)),
    "scan": lambda key, x: lax.scan(
        lambda k, v: (random.split(k)[0], jax.vmap(lambda q: random.randint(q, (2,), 0, 99))(random.split(k, 3)) + v),
        key,
        split(x, 0, 8),
    )[1],
    "cond": lambda key, x: lax.cond(
        x[0] > 0,
        lambda k: jax.vmap(lambda i: random.bernoulli(random.fold_in(k, i)))(x),
        lambda k: random.bernoulli(k, shape=x.shape),
        key,
    ),
}


@pytest.mark.parametrize(
    "name, impl, explicit", crossed(list(KEYS), ["rbg", "unsafe_rbg", "threefry2x32"], [False, True], one_in=6)
)
@pytest.mark.one_in(3)
def test_random_keys(name, impl, explicit):
    def f(x):
        return KEYS[name](random.key(7, impl=impl), x)

    x = np.arange(-3, 13, dtype=np.int32)
    with jax.set_mesh(mesh_of(**GRID, explicit=explicit)):
        want, step = np.asarray(jax.jit(f)(x)), gshard.jit(f)
        for given in (x, jnp.asarray(x), jnp.array(x)):
            if want.dtype == np.float32:  # what is made of the bits, XLA may round otherwise where it fuses otherwise
                np.testing.assert_allclose(step(given), want, rtol=1e-6)
            else:
                np.testing.assert_array_equal(step(given), want)


@KINDS
def test_captured_arrays_of_the_users_mesh(explicit):
    mesh = mesh_of(**GRID, explicit=explicit)
    x = np.arange(-8, 8, dtype=np.int32)
    with jax.set_mesh(mesh):
        c = jax.device_put(x * 3, NamedSharding(mesh, P("a")))
        whole = np.asarray(c)
        for f in (
            lambda x, c: jax.jit(lambda y: split(y, 0, 8) + c)(x),
            lambda x, c: lax.scan(lambda s, y: (s + y, s * y + own(c)), np.int32(1), split(x, 0, 8)),
            lambda x, c: lax.cond(x[0] > 0, lambda y: y + c, lambda y: y - c, split(x, 0, 8)),
        ):
            want, step = jax.tree.map(np.asarray, f(x, whole)), gshard.jit(lambda x, f=f: f(x, c))
            for _ in range(3):
                jax.tree.map(np.testing.assert_array_equal, step(x), want)


@KINDS
@pytest.mark.parametrize("size", [2, 4])
def test_a_mesh_of_another_size_may_be_set(size, explicit):
    x = np.arange(-8, 8, dtype=np.int32)
    with jax.set_mesh(mesh_of(other=size, explicit=explicit)):
        step = gshard.jit(lambda x: (own(split(x, 0, 8)), split(x, 0, 8) * 2), mesh=8)
        for _ in range(3):
            total, twice = step(x)
            np.testing.assert_array_equal(total, x.sum())
            np.testing.assert_array_equal(twice, x * 2)


def test_nothing_of_gshards_is_traced_on_the_users_mesh(monkeypatch):
    """Only derivatives of the user's functions are; the functions themselves are traced by ``jax.jit``."""
    make, places = jax.make_jaxpr, []

    def noting(f, **options):
        traced = make(f, **options)

        def run(*args, **kwargs):
            if "a" in jax.sharding.get_abstract_mesh().axis_names:
                places.append(sys._getframe(1).f_code.co_filename.rsplit("gshard/", 1)[-1])
            return traced(*args, **kwargs)

        return run

    monkeypatch.setattr(jax, "make_jaxpr", noting)
    x, w = np.arange(-32.0, 32.0, dtype=np.float32).reshape(8, 8), np.ones((8, 8), np.float32)

    def loss(w, x):
        def layer(h, _):
            return jnp.tanh(split(h, 0, 4) @ w), jnp.cumsum(split(h, 1, 2), 1)

        h, rest = lax.scan(jax.checkpoint(layer), x, None, length=2)
        at = jnp.argsort(split(w[0], 0, 2))
        noise = jax.vmap(lambda i: random.normal(random.fold_in(random.key(0, impl="rbg"), i)))(at)
        return jnp.sum(h * noise) + jnp.sum(rest)

    with jax.set_mesh(mesh_of(**GRID, explicit=True)):
        calls = itertools.count()
        for options in ({"machine": "cpu:8"}, {"collective_matmul": True, "memory_limit": 4000}):
            step = gshard.jit(lambda w, x: jax.value_and_grad(loss)(w, x * next(calls)), **options)
            with contextlib.suppress(gshard.stages.MemoryLimitError):
                step(w, x)
        gshard.explain(gshard.jit(loss, machine="cpu:8"), w, x)
        jax.grad(gshard.jit(loss))(w, x)
        jax.jit(gshard.jit(loss))(w, x)
        gshard.search(loss, w, x, machine="cpu:8", budget_seconds=0.2)
    assert set(places) == {"api/transformations.py"}


# Devices in any order: every device gets the part that the mark gives it, and nothing is sent but for a real move.
X = np.random.default_rng(0).standard_normal((8, 24)).astype(np.float32)
OF_FOUR = [np.array(order) for order in itertools.permutations(range(4))]
OF_EIGHT = [np.random.default_rng(i).permutation(8) for i in range(10)]


def in_its_place(x, whole, ids):
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


def arrays_of(orders, shapes):
    return [order.reshape(shapes[i % len(shapes)]) for i, order in enumerate(orders)]


@pytest.mark.parametrize("devices", [4, 8])
def test_every_device_holds_what_the_mark_says(devices):
    orders = OF_FOUR[::3] if devices == 4 else OF_EIGHT
    shapes = [(2, 2), (4, 1), (1, 4)] if devices == 4 else [(2, 4), (4, 2), (8, 1), (1, 8)]
    for ids in arrays_of(orders, shapes):
        jitted = gshard.jit(lambda x, ids=ids: shard(x, ids) * 2, mesh=devices)
        assert not jitted.lower(X).spmd.collectives
        got = jitted(X)
        in_its_place(got, 2 * X, ids)
        np.testing.assert_array_equal(np.asarray(got), 2 * X)


def from_one_to_the_other(first, second, devices):
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


def test_from_one_order_to_another_is_one_permute():
    for second in OF_FOUR[2::4]:
        from_one_to_the_other(OF_FOUR[2], second, 4)
    for first, second in itertools.pairwise(OF_EIGHT[:5]):
        from_one_to_the_other(first, second, 8)


def test_the_order_is_shown():
    ids = OF_EIGHT[0].reshape(8, 1)
    text = str(gshard.explain(lambda x: shard(x, ids) + 1, X, mesh=8))
    assert f"devices in the order {','.join(map(str, OF_EIGHT[0]))}" in text
    assert gshard.explain(lambda x: shard(x, ids) + 1, X, mesh=8).data("cpu")["mesh"]["order"] == tuple(OF_EIGHT[0])


def test_after_two_marks_a_value_lies_in_the_order_of_the_second():
    first, second = OF_EIGHT[0].reshape(8, 1), OF_EIGHT[1].reshape(8, 1)
    in_its_place(gshard.jit(lambda x: shard(shard(x, first), second), mesh=8)(X), X, second)
    in_its_place(gshard.jit(lambda x: shard(shard(x, first), first), mesh=8)(X), X, first)
