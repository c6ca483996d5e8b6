"""A mesh that the user has set is the user's: what gshard traces for itself is traced as if none were set."""

import contextlib
import itertools
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax, random
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gshard
from gshard import split
from sampled import crossed

KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)


def mesh_of(kind: AxisType, shape: tuple[int, ...] = (4, 2), names: tuple[str, ...] = ("a", "b")) -> jax.sharding.Mesh:
    """A mesh with all axes of a type."""
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape))


def own(x: Any) -> Any:
    """A sum that JAX does not recognise as one."""
    return lax.reduce(x, np.int32(0), lambda a, b: a + b * 1, (x.ndim - 1,))


def largest_and_sum(x: Any) -> Any:
    """Two reductions at once."""
    at = lax.iota(np.int32, x.shape[0])
    zeros = np.int32(0), np.int32(0)
    return lax.reduce((x, at), zeros, lambda p, q: (jnp.maximum(p[0], q[0]), p[1] + q[1]), (0,))


REDUCED: dict[str, Callable[[Any], Any]] = {
    "own": lambda x: own(split(x, 0, 8)),
    "two": lambda x: largest_and_sum(split(x, 0, 8)),
    "vmap": lambda x: jax.vmap(own)(split(jnp.stack([x, -x], 1), 0, 8)),
    "vmap of the split one": lambda x: jax.vmap(own)(split(jnp.stack([x, -x]), 1, 8)),
    "jit": lambda x: jax.jit(lambda y: jax.jit(own)(split(y, 0, 8)))(x),
    "scan": lambda x: lax.scan(lambda s, y: (s + own(split(x + y, 0, 8)), own(x)), np.int32(0), x),
    "cond": lambda x: lax.cond(x[0] > 0, own, lambda y: -own(split(y, 0, 8)), x),
    "while": lambda x: lax.while_loop(lambda s: s < 30, lambda s: s + own(split(x + s, 0, 8)), np.int32(1)),
    "window": lambda x: lax.reduce_window(split(x, 0, 8), np.int32(0), lambda a, b: a + b * 1, (3,), (1,), ((1, 1),)),
    "remat": lambda x: jax.checkpoint(lambda y: own(split(y, 0, 8)))(x),
}


@pytest.mark.parametrize("name, n, kind", crossed(list(REDUCED), [8, 13], [AxisType.Auto, AxisType.Explicit], one_in=4))
@pytest.mark.one_in(3)
def test_reductions_by_a_computation_of_ones_own(name: str, n: int, kind: AxisType) -> None:
    f, x = REDUCED[name], np.arange(-3, n - 3, dtype=np.int32)
    want = jax.tree.map(np.asarray, jax.jit(f)(x))
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        step = gshard.jit(f)
        for given in (x, jnp.asarray(x), jax.device_put(x, NamedSharding(mesh, P()))):
            jax.tree.map(np.testing.assert_array_equal, step(given), want)


@KINDS
@pytest.mark.parametrize("name", ["own", "two", "scan", "window"])
def test_reductions_are_priced(name: str, kind: AxisType) -> None:
    """With a machine each way to split an equation is traced alone, and the program is read back."""
    f, x = REDUCED[name], np.arange(-4, 4, dtype=np.int32)
    want = jax.tree.map(np.asarray, jax.jit(f)(x))
    with jax.set_mesh(mesh_of(kind)):
        step = gshard.jit(f, machine="cpu:8")
        for _ in range(3):
            jax.tree.map(np.testing.assert_array_equal, step(x), want)
        assert gshard.explain(step, x).plan


KEYS: dict[str, Callable[[Any, Any], Any]] = {
    "bits": lambda key, x: jax.vmap(lambda i: random.bits(random.fold_in(key, i), (3,)))(split(x, 0, 8)),
    "bits of none": lambda key, x: jax.vmap(lambda i: random.bits(random.fold_in(key, i)))(x),
    "vmap of vmap": lambda key, x: jax.vmap(jax.vmap(lambda i: random.bits(random.fold_in(key, i), (2,))))(
        split(jnp.stack([x, x + 1], 1), 0, 8)
    ),
    "split": lambda key, x: jax.vmap(lambda i: random.key_data(random.split(random.fold_in(key, i), 3)))(x),
    "normal": lambda key, x: jax.vmap(lambda k: random.normal(k, (4,)))(random.split(key, x.size)),
    "normal marked": lambda key, x: split(random.normal(key, (x.size, 4)), 0, 8),
    "categorical": lambda key, x: jax.vmap(lambda k: random.categorical(k, split(x, 0, 8) * 0.1))(random.split(key, 4)),
    "permutation": lambda key, x: jax.vmap(lambda k: random.permutation(k, 16))(random.split(key, 4)),
    "permutation of x": lambda key, x: random.permutation(key, split(x, 0, 8)),
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
    "name, impl, kind",
    crossed(list(KEYS), ["rbg", "unsafe_rbg", "threefry2x32"], [AxisType.Auto, AxisType.Explicit], one_in=6),
)
@pytest.mark.one_in(3)
def test_random_keys(name: str, impl: str, kind: AxisType) -> None:
    def f(x: Any) -> Any:
        return KEYS[name](random.key(7, impl=impl), x)

    x = np.arange(-3, 13, dtype=np.int32)
    with jax.set_mesh(mesh_of(kind)):
        want, step = np.asarray(jax.jit(f)(x)), gshard.jit(f)
        for given in (x, jnp.asarray(x), jnp.array(x)):
            if want.dtype == np.float32:  # what is made of the bits, XLA may round otherwise where it fuses otherwise
                np.testing.assert_allclose(step(given), want, rtol=1e-6)
            else:
                np.testing.assert_array_equal(step(given), want)


@KINDS
def test_captured_arrays_of_the_users_mesh(kind: AxisType) -> None:
    mesh = mesh_of(kind)
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
def test_a_mesh_of_another_size_may_be_set(size: int, kind: AxisType) -> None:
    x = np.arange(-8, 8, dtype=np.int32)
    with jax.set_mesh(mesh_of(kind, (size,), ("other",))):
        step = gshard.jit(lambda x: (own(split(x, 0, 8)), split(x, 0, 8) * 2), mesh=8)
        for _ in range(3):
            total, twice = step(x)
            np.testing.assert_array_equal(total, x.sum())
            np.testing.assert_array_equal(twice, x * 2)


def test_nothing_of_gshards_is_traced_on_the_users_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the user's functions are, and derivatives of them."""
    make, places = jax.make_jaxpr, []

    def noting(f: Any, **options: Any) -> Any:
        traced = make(f, **options)

        def run(*args: Any, **kwargs: Any) -> Any:
            if "a" in jax.sharding.get_abstract_mesh().axis_names:
                places.append(sys._getframe(1).f_code.co_filename.rsplit("gshard/", 1)[-1])
            return traced(*args, **kwargs)

        return run

    monkeypatch.setattr(jax, "make_jaxpr", noting)
    x, w = np.arange(-32.0, 32.0, dtype=np.float32).reshape(8, 8), np.ones((8, 8), np.float32)

    def loss(w: Any, x: Any) -> Any:
        def layer(h: Any, _: Any) -> Any:
            return jnp.tanh(split(h, 0, 4) @ w), jnp.cumsum(split(h, 1, 2), 1)

        h, rest = lax.scan(jax.checkpoint(layer), x, None, length=2)
        at = jnp.argsort(split(w[0], 0, 2))
        noise = jax.vmap(lambda i: random.normal(random.fold_in(random.key(0, impl="rbg"), i)))(at)
        return jnp.sum(h * noise) + jnp.sum(rest)

    with jax.set_mesh(mesh_of(AxisType.Explicit)):
        calls = itertools.count()
        for options in ({"machine": "cpu:8"}, {"collective_matmul": True, "memory_limit": 4000}):
            step = gshard.jit(lambda w, x: jax.value_and_grad(loss)(w, x * next(calls)), **options)
            with contextlib.suppress(gshard.stages.MemoryLimitError):
                step(w, x)
        gshard.explain(gshard.jit(loss, machine="cpu:8"), w, x)
        jax.grad(gshard.jit(loss))(w, x)
        jax.jit(gshard.jit(loss))(w, x)
        gshard.search(loss, w, x, machine="cpu:8", budget_seconds=0.2)
    assert set(places) <= {"tracing/by_jax.py", "api/transformations.py"}
    assert "tracing/by_jax.py" in places


@KINDS
def test_arrays_of_other_devices_are_moved_to_the_mesh_that_is_set(kind: AxisType) -> None:
    """Arguments, donated or not and under derivatives, and arrays that the function closes over."""
    reverse = jax.sharding.Mesh(np.array(jax.devices()[::-1]), ("c",))
    places = [jax.devices()[5], NamedSharding(reverse, P("c")), NamedSharding(reverse, P())]
    x = np.arange(16, dtype=np.float32)
    for place in places:
        closed_over = jax.device_put(x, place)
        with jax.set_mesh(mesh_of(kind)):
            donating = gshard.jit(lambda x: split(x, 0, 8) + 1, donate_argnums=0)
            loss = gshard.jit(lambda x: jnp.sum(split(x, 0, 8) ** 2))
        for _ in range(2):
            donated = jax.device_put(x, place)
            with jax.set_mesh(mesh_of(kind)):
                np.testing.assert_array_equal(np.asarray(donating(donated)), x + 1)
            if kind is AxisType.Auto:  # JAX does not trace these types under an Explicit mesh
                with jax.set_mesh(mesh_of(kind)):
                    np.testing.assert_array_equal(np.asarray(jax.grad(loss)(jax.device_put(x, place))), 2 * x)
                    adding = gshard.jit(lambda x: split(x, 0, 8) + closed_over)  # noqa: B023
                    np.testing.assert_array_equal(np.asarray(adding(x)), 2 * x)
