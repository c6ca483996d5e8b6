"""Loops whose rounds need nothing of each other: each device runs the rounds whose slices it holds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import gshard
from gshard.testing import assert_proved

RNG = np.random.default_rng(0)
W = RNG.integers(-3, 4, (6, 5)).astype(np.float32)


def slices(n):
    return RNG.integers(-9, 9, (n, 4, 6)).astype(np.float32)


def mapped(w, xs):
    return lax.map(lambda x: jnp.maximum(x @ w, 0.0), xs)


def summed(w, xs):
    """A round whose slice is the zeros of padding would add something too."""
    return lax.scan(lambda c, x: (c + (2 * (x @ w) + 1).sum(0), None), jnp.arange(5.0), xs)[0]


def nested(w, xs):
    return lax.map(lambda x: lax.scan(lambda c, row: (2 * c + row @ w, c), jnp.zeros(5), x), xs)


def first(f, argument):
    return jax.grad(lambda *a: jnp.sum(jax.tree.leaves(f(*a))[0] ** 2), argument)


ZEROS = np.zeros((4, 6), np.float32)
APART = {
    "mapped": mapped, "summed": summed, "nested": nested,
    "taken_away": lambda w, xs: lax.scan(lambda c, x: (c - x @ w, x[0]), jnp.ones((4, 5)), xs, reverse=True),
    # Each slice goes round as often as it needs, which padding would do for ever.
    "until": lambda w, xs: lax.map(
        lambda x: lax.while_loop(lambda y: (y != 0).any(), lambda y: jnp.trunc(y / 2), x), xs
    ),
    "chosen": lambda w, xs: lax.map(lambda x: lax.cond(x.sum() > 0, lambda x: x @ w, lambda x: x[:, :5], x), xs),
    "integers": lambda w, xs: lax.scan(
        lambda c, x: (c + (7 - x.astype(jnp.int32)), c.shape[0] * x), ZEROS.astype(np.int32), xs
    ),
    "mapped, gradient of weights": first(mapped, 0), "mapped, gradient of slices": first(mapped, 1),
    "summed, gradient of slices": first(summed, 1), "nested, gradient of weights": first(nested, 0),
}  # fmt: skip


def over(f, dim=0):
    return lambda w, xs: f(w, gshard.split(xs, dim, 8))


@pytest.mark.parametrize("n", [16, 13, 12, 3])
@pytest.mark.one_in(2)
def test_the_same_comes_out(n):
    xs = slices(n)

    def every(w, xs):
        return {name: f(w, xs) for name, f in APART.items()}

    expected = jax.jit(every)(W, xs)
    found = gshard.jit(over(every), mesh=8)(W, xs)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("name", APART)
def test_only_sums_are_sent(name):
    lowered = gshard.jit(over(APART[name]), mesh=gshard.Mesh.abstract(devices=8)).lower(W, slices(16))
    kinds = {c.kind for c in lowered.spmd.collectives}
    assert kinds <= {"all_reduce"}
    assert all(c.times == 1 for c in lowered.spmd.collectives)
    assert "scan" in {e.name for e in lowered.plan.program.block.equations if e.rule is not None}


@pytest.mark.parametrize("f", [
    lambda w, xs: lax.scan(lambda c, x: (x - c, None), ZEROS, xs)[0],
    lambda w, xs: lax.scan(lambda c, x: (x + c[::-1], None), ZEROS, xs)[0],
    lambda w, xs: lax.scan(lambda c, x: (c + x, c), ZEROS, xs),
    lambda w, xs: lax.scan(lambda c, x: (after := c + x, after), ZEROS, xs),
    lambda w, xs: lax.map(lambda x: gshard.split(x, 0, 2) @ w, xs),
], ids=["turned", "reversed", "read", "given out", "marked"])  # fmt: skip
@pytest.mark.one_in(2)
def test_rounds_that_need_one_another_stay_in_order(f):
    xs = slices(16)
    run = gshard.jit(over(f), mesh=8)
    assert all(e.rule is None for e in run.lower(W, xs).plan.program.block.walk() if e.name == "scan")
    assert_proved(run, (W, xs))


def test_it_prints_from_each_round_once(capfd):
    """What has an effect runs in order."""

    def f(xs):
        def step(x):
            jax.debug.print("round {}", x[0, 0])
            return x * 2

        return lax.map(step, gshard.split(xs, 0, 8))

    xs = np.arange(8 * 24, dtype=np.float32).reshape(8, 4, 6)
    np.testing.assert_array_equal(gshard.jit(f, mesh=8)(xs), 2 * xs)
    jax.effects_barrier()
    assert sorted(capfd.readouterr().out.split("\n")) == sorted(["", *(f"round {24.0 * i}" for i in range(8))])
