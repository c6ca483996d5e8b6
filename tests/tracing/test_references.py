"""References (jax.new_ref) inside of partitioned functions, as arguments, and closed over."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gshard
from checked_calls import near
from placed import mesh_of, put

X = np.random.default_rng(3).standard_normal((16, 8)).astype(np.float32)
F = Callable[..., Any]


LINE, GRID, EXPLICIT = mesh_of(d=8), mesh_of(d=2, e=4), mesh_of(d=8, explicit=True)


def whole(x):
    r = jax.new_ref(x)
    r[...] += 1
    return jax.freeze(r) * 2


def places(x):
    r = jax.new_ref(x)
    r[3] = x[0]
    r[:, 2:4] += 1.0
    r[jnp.array([1, 5])] = jnp.zeros((2, 8))
    i = jnp.int32(2)
    r[i] = r[i + 1] * 2
    jax.ref.addupdate(r, (slice(0, 3),), jnp.full((3, 8), 2.0))
    old = jax.ref.swap(r, (4,), x[7])
    return r[...], old


def in_scan(x):
    rows, total = jax.new_ref(x), jax.new_ref(jnp.zeros(8))

    def body(i, row):
        total[...] += row
        rows[i] = rows[i] * 2
        return i + 1, total[0]

    n, firsts = lax.scan(body, 0, x)
    return rows[...], total[...], firsts, n


def in_loops(x):
    r = jax.new_ref(x)

    def body(i):
        r[i] = r[i] + i
        return i + 1

    lax.while_loop(lambda i: i < 5, body, 0)
    lax.cond(x.sum() > 0, lambda: r.__setitem__(0, r[1]), lambda: r.__setitem__(2, r[3]))
    return r[...]


def in_calls(x):
    r = jax.new_ref(x)

    @jax.jit
    def inner(r, y):
        r[...] = r[...] * y
        return r[0]

    @jax.jit
    def closing_over(y):
        r[1] = y[0]
        return r[...].sum()

    return inner(r, x) + inner(r, x), closing_over(x), r[...]


def gradient(x):
    def loss(x):
        r = jax.new_ref(jnp.zeros(8))

        def body(c, row):
            r[...] = jnp.sin(r[...] + row)
            return c, None

        lax.scan(body, 0.0, x)
        return (r[...] ** 2).sum()

    return jax.value_and_grad(loss)(x)


def mapped(x):
    def f(row):
        r = jax.new_ref(row)
        r[0] = row.sum()
        r[1:3] *= 2
        return r[...]

    return jax.vmap(f)(x)


def beside_a_kernel(x):
    """The references of a kernel are its own."""
    r = jax.new_ref(x)
    r[...] += 1

    def kernel(a, b):
        b[...] = a[...] * 2

    row = pallas.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((8,), x.dtype), interpret=True)(r[0])
    return r[...] + row


INSIDE = (whole, places, in_scan, in_loops, in_calls, gradient, mapped, beside_a_kernel)


@pytest.mark.parametrize("f", INSIDE, ids=lambda f: f.__name__)
@pytest.mark.one_in(3)
def test_references_inside_are_values(f):
    wanted = jax.jit(f)(X)
    g = gshard.jit(f, mesh=LINE)
    for x in (put(X, LINE, "d"), X):
        near(g(x), wanted)
    explained = gshard.explain(g, put(X, LINE, "d"))
    assert f is beside_a_kernel or explained.lists["gathered"] == ()
    assert f not in (whole, mapped) or explained.bytes_by_kind == {}, "along a split dimension nothing is sent"


def test_transformations_around_a_function_that_uses_references_inside():
    f = gshard.jit(lambda x: (whole(x) ** 2).sum(), mesh=LINE)
    wanted = jax.grad(lambda x: ((x + 1) ** 2).sum() * 4)(X)
    near(jax.grad(f)(X), wanted)
    near(jax.jit(jax.grad(f))(X), wanted)
    near(jax.vmap(gshard.jit(whole, mesh=LINE))(X), (X + 1) * 2)
    near(jax.jit(gshard.jit(whole, mesh=LINE))(X), (X + 1) * 2)


def step(r, y):
    r[...] = r[...] * 2 + y
    return r[0:2].sum()


@pytest.mark.parametrize("where", (LINE, GRID, EXPLICIT), ids=("line", "grid", "explicit"))
def test_a_reference_is_written_and_keeps_its_sharding(where):
    f = gshard.jit(step, mesh=where)
    specs = [("d",), ()] + ([("e", "d")] if where is GRID else [])
    if where is EXPLICIT:
        specs = [(None, "d"), ()]  # JAX slices no dimension that is split
    for spec in (*specs, *specs[:1]):
        r = jax.new_ref(put(X, where, *spec))
        came, y = r.sharding, put(np.ones_like(X), where, *spec)
        for _ in range(3):
            first = f(r, y)
            assert r.sharding == came
        np.testing.assert_allclose(r[...], X * 8 + 7, rtol=1e-5)
        np.testing.assert_allclose(first, (X * 8 + 7)[:2].sum(), rtol=1e-5)
        jax.jit(lambda r: r.__setitem__(..., r[...] * 0))(r)  # somebody else writes to it
        f(r, y)
        np.testing.assert_array_equal(r[...], np.ones_like(X))


def test_a_reference_that_is_elsewhere_stays_there():
    f = gshard.jit(lambda r: r.__setitem__(..., gshard.split(r[...] * 2, 0, 8)), mesh=LINE)
    reversed_mesh = jax.sharding.Mesh(np.array(jax.devices()[::-1]), ("d",))
    for x in (np.resize(X, (11, 8)), put(X, reversed_mesh, "d"), jax.device_put(X, jax.devices()[3])):
        r = jax.new_ref(x)
        came = r.sharding
        for _ in range(3):
            f(r)
        assert r.sharding == came
        np.testing.assert_array_equal(r[...], np.asarray(x) * 8)


def test_the_memory_of_a_reference_is_used_again():
    r, y = jax.new_ref(put(X, LINE, "d")), put(X, LINE, "d")
    compiled = gshard.jit(step, mesh=LINE).lower(r, y).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == X.nbytes // 8
    by_type = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=r.sharding, is_ref=True)
    assert compiled.input_shardings == gshard.jit(step, mesh=LINE).lower(by_type, y).compile().input_shardings
    for _ in range(3):
        compiled(r, y)
    np.testing.assert_allclose(r[...], X * 15, rtol=1e-5)


@pytest.mark.parametrize("where", (LINE, EXPLICIT), ids=("line", "explicit"))
def test_a_reference_that_is_closed_over_is_written(where):
    r, count = jax.new_ref(put(X, where, "d")), jax.new_ref(put(np.int32(0), where))

    def f(x, k=1.0):
        r[...] += x * k
        count[...] += 1
        return x.sum()

    with jax.set_mesh(where):
        g = gshard.jit(f)
        y = put(np.ones_like(X), where, "d")
        for k in (1.0, 2.0, 1.0):
            assert float(g(y, k=k)) == 128
        r[...] = r[...] * 0
        g(y)
    np.testing.assert_array_equal(r[...], np.ones_like(X))
    assert int(count[...]) == 4
    assert r.sharding.is_equivalent_to(NamedSharding(where, P("d")), 2)


def test_one_reference_is_given_once():
    r = jax.new_ref(put(X, LINE, "d"))
    with pytest.raises(gshard.GShardError, match="one reference twice, as a and b") as told:
        gshard.jit(lambda a, b: a.__setitem__(0, b[1]), mesh=LINE)(r, r)
    assert isinstance(told.value, ValueError)  # as of jax.jit
    assert "test_references.py" in str(told.value)
    with pytest.raises(gshard.GShardError, match="as a and closed-over reference 0"):
        gshard.jit(lambda a: r.__setitem__(0, a[1]), mesh=LINE)(r)


def test_a_derivative_of_a_call_with_references_is_refused():
    r = jax.new_ref(put(X, LINE, "d"))
    f = gshard.jit(step, mesh=LINE)

    def call(y):
        return f(r, y)

    for around in (jax.grad, lambda call: lambda x: jax.vmap(call)(x[None])):
        for inner in (call, jax.jit(call)):
            with pytest.raises(gshard.GShardError, match="a transformation around it would differentiate or") as told:
                around(inner)(X)
            assert "test_references.py" in str(told.value)
    np.testing.assert_array_equal(r[...], X)
    jax.checkpoint(call)(X)  # no derivative is taken
    np.testing.assert_allclose(r[...], X * 3, rtol=1e-5)


@pytest.mark.parametrize("where", (LINE, EXPLICIT), ids=("line", "explicit"))
@pytest.mark.parametrize("options", ({}, {"in_shardings": (P(None, "d"), None)}), ids=("", "in"))
def test_a_reference_is_marked_inside_a_program_of_jax(where, options):
    r = jax.new_ref(put(X, where, None, "d"))
    f = gshard.jit(step, mesh=where, **options)
    first = jax.jit(lambda y: f(r, y))(X)
    np.testing.assert_allclose(first, (X * 3)[:2].sum(), rtol=1e-5)
    np.testing.assert_allclose(r[...], X * 3, rtol=1e-5)


def test_what_jax_cannot_replace_is_named():
    @jax.custom_jvp
    def inner(x):
        return whole(x)

    inner.defjvp(lambda p, t: (inner(*p), t[0]))
    with pytest.raises(gshard.GShardError, match="where JAX cannot replace it by arrays") as told:
        gshard.jit(lambda x: inner(x), mesh=LINE)(X)
    assert isinstance(told.value, NotImplementedError)
    assert "test_references.py" in str(told.value)
    with pytest.raises(gshard.GShardError, match="freezes a reference that it was given"):
        gshard.jit(jax.freeze, mesh=LINE)(jax.new_ref(X))
