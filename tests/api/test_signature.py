"""The same call gets the same program: what belongs to the key of what is kept, and what is kept no longer."""

import functools
import gc
import re
import threading
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import gshard
from gshard import split


@functools.cache
def eight() -> Mesh:
    return Mesh(np.array(jax.devices()[:8]), ("devices",))


def test_static_arguments_count_by_type_and_value() -> None:
    def f(x: Any, n: Any) -> Any:
        return jnp.where(x > 0, x, 0) if n is True else x * n

    x = jnp.arange(-4, 4)
    ours, plain = gshard.jit(f, mesh=8, static_argnums=1), jax.jit(f, static_argnums=1)
    for n in (1, True, 1.0, 1, True, -1.0):
        found, expected = ours(x, n), plain(x, n)
        np.testing.assert_array_equal(found, expected)
        assert found.dtype == expected.dtype


def test_settings_of_jax_belong_to_the_key() -> None:
    bits = gshard.jit(lambda seed: jax.random.bits(jax.random.key(seed), (2,)), mesh=8)
    usual = np.asarray(bits(0))
    with jax.threefry_partitionable(False):
        np.testing.assert_array_equal(bits(0), jax.random.bits(jax.random.key(0), (2,)))
        assert (np.asarray(bits(0)) != usual).any()
    np.testing.assert_array_equal(bits(0), usual)
    ones = gshard.jit(lambda: jnp.ones(4, float), mesh=8)
    assert ones().dtype == np.float32
    with jax.enable_x64(True):
        assert ones().dtype == np.float64
    product = gshard.jit(lambda x, y: split(x, 0, 8) @ y, mesh=8)
    x = jnp.ones((8, 8))
    assert "HIGHEST" not in str(product.lower(x, x).spmd)
    with jax.default_matmul_precision("highest"):
        assert "HIGHEST" in str(product.lower(x, x).spmd)


def test_an_earlier_call_changes_nothing() -> None:
    x = jnp.arange(8.0)
    placed = jax.device_put(x, NamedSharding(eight(), P("devices")))
    fresh, used = (gshard.jit(lambda x: x * 2, mesh=8) for _ in range(2))
    used(placed)
    assert used(placed).sharding.spec == P("devices")
    assert used(x).sharding == fresh(x).sharding
    assert used(placed).sharding == fresh(placed).sharding


def test_a_state_that_goes_round_is_compiled_once() -> None:
    """The first state is placed nowhere, later ones as the program left them; their plans are the same."""
    step = gshard.jit(lambda w, x: (w - 0.1 * split(x, 0, 8).sum(0), x.mean()), mesh=8, donate_argnums=0)
    w, x = jnp.zeros(4), jnp.ones((16, 4))
    first = step.lower(w, x)
    moved, _ = step(w, x)
    again = step.lower(moved, x)
    assert again is first
    assert moved.sharding.spec == P()


def test_dropped_functions_leave_nothing() -> None:
    class Weight:
        pass

    def one() -> list[Any]:
        w = jnp.arange(8.0)

        def loss(x: Any) -> Any:
            return jnp.sum(split(x, 0, 8) * w)

        step = gshard.jit(loss, mesh=8)
        step(w)
        jax.grad(step)(w)
        jax.vmap(step)(jnp.ones((2, 8)))
        return [weakref.ref(step), weakref.ref(w), weakref.ref(loss)]

    dropped = [one() for _ in range(3)]
    gc.collect()
    assert [[r() is None for r in refs] for refs in dropped] == [[True] * 3] * 3


def test_caches_can_be_cleared() -> None:
    traced = []

    def f(x: Any) -> Any:
        traced.append(1)
        return split(x, 0, 8) + 1

    step = gshard.jit(f, mesh=8)
    x = jnp.ones(8)
    for _ in range(3):
        step(x)
    assert len(traced) == 1
    gshard.jit(f, mesh=8)(x)
    assert len(traced) == 1, "what is jitted twice in the same way is traced once"
    jax.clear_caches()
    step(x)
    assert len(traced) == 2
    step.clear_cache()
    jax.clear_caches()  # JAX has traces of its own
    step(x)
    assert len(traced) == 3


def test_threads_may_call_one_function() -> None:
    """Seven threads with seven kinds of arguments: none is lost, none is mixed up."""
    step = gshard.jit(lambda x: (split(x, 0, 8) * 2).sum(), mesh=8)
    found: dict[int, list[float]] = {n: [] for n in range(1, 8)}
    threads = [
        threading.Thread(target=lambda n=n: [found[n].append(float(step(jnp.ones(n)))) for _ in range(5)])
        for n in found
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: [2.0 * n] * 5 for n in found}


@pytest.mark.parametrize("inside", ["jit", "vmap", "grad", "grad of the argument", "scan"])
def test_a_function_may_close_over_what_is_being_transformed(inside: str, rng: np.random.Generator) -> None:
    x = jnp.asarray(rng.standard_normal(8, np.float32))
    ws = jnp.asarray(rng.standard_normal(3, np.float32))

    def run(jit: Any) -> Any:
        if inside == "jit":
            return jax.jit(lambda w: jit(lambda v: split(v, 0, 8) * w)(x))(ws[0])
        if inside == "vmap":
            return jax.vmap(lambda w: jit(lambda v: split(v, 0, 8) * w)(x))(ws)
        if inside == "grad":
            return jax.grad(lambda w: jit(lambda v: (x * v * w).sum())(3.0))(ws[1])
        if inside == "grad of the argument":
            return jax.grad(lambda w: jit(lambda v: (x * v * w).sum())(w * 2))(ws[1])
        return jax.lax.scan(lambda c, v: (c + jit(lambda y: y * c)(v), c), ws[0], x)

    found, expected = run(lambda f: gshard.jit(f, mesh=8)), run(jax.jit)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
        assert a.dtype == b.dtype


def test_a_persistent_function_meets_new_tracers_each_time() -> None:
    """What it closed over in an earlier transformation must not come back."""
    box: list[Any] = []
    inner = gshard.jit(lambda x: x * box[-1], mesh=8)

    def outer(w: Any) -> Any:
        box.append(w)
        return inner(jnp.ones(3)).sum()

    for _ in range(2):
        jax.clear_caches()
        assert float(jax.grad(outer)(2.0)) == 3.0


def test_named_axes_of_vmap_reach_the_function() -> None:
    x = jnp.arange(1.0, 9.0)
    for jit in (jax.jit, functools.partial(gshard.jit, mesh=8)):
        mapped = jax.vmap(jit(lambda v: v / jax.lax.psum(v, "i")), axis_name="i")
        np.testing.assert_allclose(mapped(x), x / 36)
        size = jit(lambda: jax.lax.axis_size("i"))
        for n in (2, 3):
            assert int(jax.vmap(size, axis_name="i", axis_size=n, out_axes=None)()) == n


def test_methods_partial_functions_and_callables() -> None:
    class Layer:
        def __init__(self, scale: float):
            self.scale = scale

        @functools.partial(gshard.jit, mesh=8, static_argnums=0)
        def scaled(self, x: Any) -> Any:
            return split(x, 0, 8) * self.scale

        def __call__(self, x: Any) -> Any:
            return x + self.scale

    x = jnp.arange(8.0)
    assert Layer(3.0).scaled(x)[1] == 3.0
    assert gshard.jit(Layer(2.0).__call__, mesh=8)(x)[0] == 2.0
    assert gshard.jit(Layer(2.0), mesh=8)(x)[0] == 2.0
    partial = gshard.jit(functools.partial(jnp.multiply, 2.0), mesh=8)
    assert partial(x)[1] == 2.0
    assert "multiply" in repr(partial)
    assert "on devices=8" in repr(partial)


def several(count: int, *xs: Any, key: Any = None) -> Any:
    return [x * count for x in xs], key


def test_names_of_arguments_leave_static_ones_out() -> None:
    """Also beyond the named parameters: the second of ``*xs`` is not called by the name that follows them."""
    x, text = np.arange(8.0), "text"
    call = gshard.jit(several, mesh=8, static_argnums=0)
    assert call.lower(1, x, x, key=x).program.names == ("xs[0]", "xs[1]", "key")
    for arguments, named, name in (
        ((1, text), {}, "xs[0]"),
        ((1, x, [x, text]), {}, "xs[1][1]"),
        ((1, x), {"key": text}, "key"),
    ):
        with pytest.raises(TypeError, match=f"at path {re.escape(name)}\\.") as caught:
            call(*arguments, **named)
        assert text in str(caught.value)
    with pytest.raises(TypeError, match="at path x\\."):
        gshard.jit(lambda n, x: x * n, mesh=8, static_argnums=0)(2, text)
    with pytest.raises(OverflowError, match=r"xs\[0\]\['n'\], an argument of several, is too large"):
        call(1, {"n": 2**40})
    layout = gshard.Layout(rows="devices")
    named = gshard.jit(several, mesh=8, static_argnums=0, layout=layout, names={"key": "rows"})
    _, *placed = named.lower(1, x, x, key=x).argument_shardings
    assert [s.spec for s in placed] == [P(), P("devices")]


def test_names_reach_the_compiled_program() -> None:
    def train_step(x: Any) -> Any:
        with jax.named_scope("my_block"):
            return jax.nn.relu(split(x, 0, 8) @ x.T)

    x = jnp.ones((8, 4))
    step = gshard.jit(train_step, mesh=8)
    text = step.lower(x).compile().as_text()
    assert "jit_train_step" in text
    assert "jaxpr_as_fun" not in text
    for operation in ("dot_general", "max"):  # the second is in the body of a call
        (name, *_) = [line for line in text.split('op_name="')[1:] if line.split('"')[0].endswith(f"/{operation}")]
        assert name.startswith("jit(train_step)/")
        assert "/my_block/" in name
