"""Associative scans are found, become one equation, and compute the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import gshard
from gshard.rules import prefixes
from gshard.tracing.trace import trace
from sampled import crossed

RNG = np.random.default_rng(0)
GRID = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def recurrence(left, right):
    return left[0] * right[0], right[0] * left[1] + right[1]


def last_that_counts(left, right):
    return jnp.where(right == 0, left, right)


def within_segments(left, right):
    """Sums that begin anew where a flag is set: neither commutes nor is the same from the other end."""
    return left[0] | right[0], jnp.where(right[0], right[1], left[1] + right[1])


def numbers(*shape):
    return RNG.integers(-9, 9, shape).astype(np.int32)


def flags(*shape):
    return RNG.random(shape) < 0.2


F = RNG.uniform(-1, 1, (37, 6)).astype(np.float32)
SCANS = {
    "sums": (lambda x: lax.associative_scan(jnp.add, x), (numbers(24, 6),)),
    "maxima": (lambda x: lax.associative_scan(jnp.maximum, x), (F,)),
    "along the second": (lambda x: lax.associative_scan(jnp.minimum, x, axis=1), (numbers(6, 21),)),
    "backwards": (lambda x: lax.associative_scan(jnp.add, x, reverse=True), (numbers(24, 6),)),
    "a linear recurrence": (lambda a, b: lax.associative_scan(recurrence, (a, b)), (F, F[::-1].copy())),
    "its states alone": (lambda a, b: lax.associative_scan(recurrence, (a, b))[1], (F[:16], F[-16:])),
    "the last that counts": (lambda x: lax.associative_scan(last_that_counts, x), (numbers(19, 6) // 6,)),
    "within segments": (lambda f, x: lax.associative_scan(within_segments, (f, x))[1], (flags(40, 6), numbers(40, 6))),
    "any before": (lambda x: lax.associative_scan(jnp.logical_or, x), (flags(16, 6),)),
    "with a number": (lambda x: lax.associative_scan(lambda a, b: a + b + 3 * a * b, x), (numbers(9, 6) % 2,)),
    "few for many": (lambda x: lax.associative_scan(jnp.add, x), (numbers(9, 2),)),
    "in a loop": (
        lambda x: lax.scan(lambda c, _: (lax.associative_scan(jnp.maximum, c) - 1, None), x, length=3)[0], (F,),
    ),
    "for each": (jax.vmap(lambda x: lax.associative_scan(jnp.add, x)), (numbers(6, 24),)),
}  # fmt: skip


def named(function, arguments):
    return [e.name for e in trace(function, *arguments).block.walk()]


@pytest.mark.parametrize("name", SCANS)
def test_a_scan_is_one_equation(name):
    names = named(*SCANS[name])
    assert names.count("associative_scan") == 1
    assert not {"slice", "pad", "concatenate", "concatenate_slices"} & set(names)


@pytest.mark.parametrize(("name", "spec"), crossed(list(SCANS), [P(("x", "y")), P("y", "x")], one_in=4))
@pytest.mark.one_in(2)
def test_the_same_on_two_axes_and_in_unequal_parts(name, spec):
    function, arguments = SCANS[name]
    jitted = gshard.jit(lambda *xs: function(*(gshard.shard(x, spec) for x in xs)), mesh=GRID)
    for found, expected in zip(
        jax.tree.leaves(jitted(*arguments)), jax.tree.leaves(jax.jit(function)(*arguments)), strict=True
    ):
        if expected.dtype == np.float32:
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
        else:
            np.testing.assert_array_equal(found, expected)


def test_one_element_of_each_device_is_sent():
    function, (f, x) = SCANS["within segments"]
    spec = P(("x", "y"))
    jitted = gshard.jit(function, mesh=GRID, in_shardings=(spec, spec), out_shardings=spec)
    sent = jitted.lower(f, x).spmd.collectives
    assert [c.kind for c in sent] == ["all_gather", "all_gather"]
    assert sum(c.total_bytes for c in sent) == 7 * 6 * (1 + 4)


@pytest.mark.parametrize("name", ["all levels are needed", "something else", "of matrices", "by an array"])
@pytest.mark.one_in(2)
def test_what_is_no_scan_or_more_stays(name):
    def almost(x):
        """A level of a scan, and then another operation."""
        y = x[0:-1:2] + x[1::2]
        return y[0:-1:2] * y[1::2]

    def products(x):
        return lax.associative_scan(lambda a, b: jnp.einsum("nij,njk->nik", a, b), x)

    def gradient(x):
        return jax.grad(lambda x: jnp.sum(lax.associative_scan(recurrence, (x, x))[1] ** 2))(x)

    cases = {
        "all levels are needed": (gradient, (F,)),
        "something else": (almost, (F,)),
        "of matrices": (products, (RNG.standard_normal((8, 2, 2)).astype(np.float32),)),
        "by an array": (lambda x, s: lax.associative_scan(lambda a, b: a + s[0, 0] * b, x), (F, F)),
    }
    function, arguments = cases[name]
    assert "associative_scan" not in named(function, arguments)
    found, expected = gshard.jit(function, mesh=8)(*arguments), jax.jit(function)(*arguments)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("few", [1, 16])
def test_of_many_parts_what_came_before_is_a_recursion(few, monkeypatch):
    monkeypatch.setattr(prefixes, "_FEW", few)
    a, b = F[:19, :3], F[:19, 3:]

    def states(a, b):
        return lax.associative_scan(recurrence, (a, b))

    spec = P("x", None)
    step = gshard.jit(states, mesh=jax.make_mesh((8,), ("x",)), in_shardings=(spec, spec))
    for got, wanted in zip(step(a, b), states(a, b), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)
