"""Unreduced values pass on: parts are combined where that sends the fewest bytes, and no sooner."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import gshard
from gshard import replicate, split
from gshard.core.mesh import Mesh
from gshard.core.rule import is_valid, operand_sharding, result_sharding
from gshard.testing import assert_proved
from gshard.tracing.permitted import permitted
from gshard.tracing.trace import trace
from harness import normal


def difference_of_choices(x, v, w):
    a, b = (x @ split(m, 0, 8) for m in (v, w))
    return replicate(a.T.reshape(4, -1) - jnp.where(v[:1, :1] > 0, b, a).T.reshape(4, -1))


def chain(u, v, w):
    return replicate((split(u, 1, 8) @ v) @ w[:, :3])


def accumulated(w, xs, targets):
    def loss(w, x, y):
        return jnp.sum((jnp.tanh(split(x, 0, 8) @ w["in"]) @ w["out"] - y) ** 2)

    def step(so_far, batch):
        value, gradient = jax.value_and_grad(loss)(w, *batch)
        return (so_far[0] + value, jax.tree.map(jnp.add, so_far[1], gradient)), None

    (value, gradient), _ = lax.scan(step, (0.0, jax.tree.map(jnp.zeros_like, w)), (xs, targets))
    return value, jax.tree.map(lambda p, g: p - 0.01 * g, w, gradient)


def stacked(w, xs):
    def loss(w, x):
        return jnp.sum(lax.scan(lambda c, w: (jnp.tanh(c @ w), None), split(x, 0, 8), w)[0] ** 2)

    def step(so_far, x):
        return so_far + jnp.where(x[0, 0] > 0, jax.grad(loss)(w, x), 0.0), None

    return lax.scan(step, jnp.zeros_like(w), xs)[0]


def averaged(w, xs, targets):
    def loss(w, x, y):
        return jnp.mean((jnp.tanh(split(x, 0, 8) @ w["in"]) @ w["out"] - y) ** 2)

    def step(i, so_far):
        value, gradient = jax.value_and_grad(loss)(w, xs[i], targets[i])
        return so_far[0] + value / 5, jax.tree.map(lambda a, g: a + 0.2 * g, so_far[1], gradient)

    return lax.fori_loop(0, 5, step, (0.0, jax.tree.map(jnp.zeros_like, w)))


def largest(xs, v, w):
    def step(so_far, x):
        return jnp.maximum(so_far, jnp.max(split(x, 0, 8), 0)), None

    return lax.scan(step, jnp.full(v.shape[:1], -jnp.inf), xs)[0] + w[0, 0]


X, V, W = normal(16, 64), normal(64, 24), normal(64, 24)
WEIGHTS = {"in": normal(8, 16), "out": normal(16, 4)}
BATCHES = (normal(5, 512, 8), normal(5, 512, 4))

# What may be sent: kind, how often, bytes.
CASES = {
    "one reduction for two products": (
        lambda x, v, w: replicate(x @ split(v, 0, 8) + x @ split(w, 0, 8)), (X, V, W),
        [("all_reduce", 1, 2 * 16 * 24 * 4 * 7 // 8)],
    ),
    "through transposes, reshapes, choices": (
        difference_of_choices, (X, V, W),
        # The second is the flag's: an element of a matrix that is split.
        [("all_reduce", 1, 2 * 16 * 24 * 4 * 7 // 8), ("all_reduce", 1, 2 * 4 * 7 // 8)],
    ),
    "a bias changes nothing": (
        lambda x, v, bias: replicate(x @ split(v, 0, 8) + bias), (X, V, normal(24)),
        [("all_reduce", 1, 2 * 16 * 24 * 4 * 7 // 8)],
    ),
    # What is in W is not known: it may be infinite where the sum is zero and its parts are not. Devices go on with
    # their rows of the sum.
    "U V, and then W": (
        chain, (X, V, normal(24, 6)),
        [("reduce_scatter", 1, 16 * 24 * 4 * 7 // 8), ("all_gather", 1, 16 * 3 * 4 * 7 // 8)],
    ),
    "U V W of integers without a reduction between": (
        chain, tuple((10 * x).astype(np.int32) for x in (X, V, normal(24, 6))),
        [("all_reduce", 1, 2 * 16 * 3 * 4 * 7 // 8)],
    ),
    "after the sum, not before": (
        lambda x, v, w: jnp.sum(x @ split(v, 0, 8)) * 0.3 + jnp.max(w), (X, V, W), [("all_reduce", 1, 2 * 4 * 7 // 8)],
    ),
    "into a split": (
        lambda x, v, w: split(x @ split(v, 0, 8) + x @ split(w, 0, 8), 0, 8), (X, V, W),
        [("reduce_scatter", 1, 16 * 24 * 4 * 7 // 8)],
    ),
    "once after a loop": (
        accumulated, (WEIGHTS, *BATCHES),
        [
            ("all_reduce", 1, 2 * 8 * 16 * 4 * 7 // 8), ("all_reduce", 1, 2 * 16 * 4 * 4 * 7 // 8),
            ("all_reduce", 1, 2 * 4 * 7 // 8),
        ],
    ),
    "once after a loop that averages": (
        averaged, (WEIGHTS, *BATCHES),
        [
            ("all_reduce", 1, 2 * 8 * 16 * 4 * 7 // 8), ("all_reduce", 1, 2 * 16 * 4 * 4 * 7 // 8),
            ("all_reduce", 1, 2 * 4 * 7 // 8),
        ],
    ),
    "once after a loop around a loop": (
        stacked, (normal(3, 8, 8), normal(5, 512, 8)),
        # The second is the element that decides whether a micro-batch counts.
        [("all_reduce", 1, 2 * 3 * 8 * 8 * 4 * 7 // 8), ("all_reduce", 5, 5 * 2 * 4 * 7 // 8)],
    ),
    # Of each row one number, and NaN where there is none: what is filled in counts once.
    "of what is looked up, or filled in, alone": (
        lambda x, v, labels: replicate(jnp.take_along_axis(x @ split(v, 0, 8), labels[:, None], 1)),
        (X, V, np.array([3, 24, 0, -1, 23, -25, 7, 99] * 2)), [("all_reduce", 1, 2 * 16 * 4 * 7 // 8)],
    ),
    "a maximum once after a loop": (
        largest, (normal(5, 64, 24), normal(24, 2), W), [("all_reduce", 1, 2 * 24 * 4 * 7 // 8)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.one_in(2)
def test_parts_are_combined_where_it_costs_least(name):
    function, arguments, expected = CASES[name]
    partitioned = gshard.jit(function, mesh=8)
    assert_proved(partitioned, arguments)
    found = gshard.explain(partitioned, *arguments)
    assert sorted((row.kind, row.times, row.bytes) for row in found.collectives) == sorted(expected)


TINY = np.float32(2e-38)  # normal, and half of it is not


@pytest.mark.parametrize("f", [
    lambda x, y: split(x, 0, 8).mean() + split(y, 0, 8).mean(),
    lambda x, y: 0.25 * split(x, 0, 8).sum() + split(y, 0, 8).sum() / 8,
    lambda x, y: jax.vmap(lambda a, b: split(a, 0, 8).mean() - split(-b, 0, 8).mean())(
        jnp.stack([x, y, x]), jnp.stack([y, x, x])
    ),
    lambda x, y: lax.cond(
        x[0] > 0, lambda: split(x, 0, 8).mean() + split(y, 0, 8).mean(), lambda: split(x, 0, 8).mean()
    ),
    lambda x, y: lax.scan(lambda s, v: (s, split(v, 0, 8).mean() + split(x, 0, 8).mean()), 0, jnp.stack([x, y]))[1],
    lambda x, y: jax.jit(lambda a: jax.checkpoint(lambda b: split(b, 0, 8).mean() * 0.5 + y[0])(a))(x),
    lambda x, y: (split(x, 0, 8).reshape(8, 1) * jnp.ones((1, 3))).mean(0).mean(),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.one_in(3)
def test_a_mean_of_small_numbers_is_not_zero(f, dtype):
    """Each device's part of it would be."""
    x, y = np.full(8, TINY).astype(dtype), np.full(8, 3 * TINY).astype(dtype)
    want, step = np.asarray(jax.jit(f)(x, y), np.float32), gshard.jit(f, mesh=8)
    assert (want != 0).all()
    for given in (x, jnp.asarray(x), jax.device_put(x, jax.devices()[1])):
        np.testing.assert_allclose(np.asarray(step(given, y), np.float32), want, rtol=1e-2)


def test_a_sum_that_is_infinite_stays_so_in_a_wider_type():
    with jax.enable_x64(True):
        x = np.full(8, 1e38, np.float32)

        def f(x, y):
            return replicate(split(x, 0, 8).sum().astype(np.float64) + split(y, 0, 8).astype(np.float64).sum())

        step = gshard.jit(f, mesh=8)
        for given in (x, jnp.asarray(x), jax.device_put(x, jax.devices()[1])):
            assert np.isinf(jax.jit(f)(given, x))
            assert np.isinf(step(given, x))


@pytest.mark.parametrize(("dtype", "finite"), [(np.float32, False), (np.float32, True), (np.int32, False)])
def test_the_signatures_of_a_matrix_product(dtype, finite):
    """OneFlow's table for one axis: S(0) B, B S(1), S(1) S(0) -> P, B B; P B -> P and B P -> P for integers, and floats
    that the user says are finite."""
    program = trace(lambda x, w: x @ w, X.astype(dtype), V.astype(dtype))
    rule = permitted(program.block, finite=finite).equations[0].rule
    mesh = Mesh.abstract(a=2)

    def sbp(sharding):
        cut = next((f"S({d})" for d, atoms in enumerate(sharding.dims) if atoms), "B")
        return "P" if sharding.unreduced else cut

    keys = [*range(len(rule.factors)), *(-1 - k for k in range(len(rule.linear)))]
    splits = [{key: ("a",) for key in chosen} for n in (0, 1, 2) for chosen in itertools.combinations(keys, n)]
    found = {
        (sbp(operand_sharding(rule, 0, s)), sbp(operand_sharding(rule, 1, s)), sbp(result_sharding(rule, 0, s)))
        for s in splits
        if is_valid(rule, s, mesh)
    }
    unfinished = {("P", "B", "P"), ("B", "P", "P")} if finite or dtype is np.int32 else set()
    others = {("S(0)", "B", "S(0)"), ("B", "S(1)", "S(1)"), ("S(1)", "S(0)", "P"), ("B", "B", "B")}
    assert found == others | unfinished


def test_what_is_added_may_be_multiplied_by_itself_many_times():
    """Each product has two ways back to the same factor; all ways would be too many to follow."""

    def f(xs):
        def step(so_far, x):
            for _ in range(40):
                x = x * x
            return so_far + jnp.sum(split(x, 0, 8), 0), None

        return lax.scan(step, jnp.zeros(3), xs)[0]

    xs = 1 + normal(5, 16, 3) / 1e13
    assert_proved(gshard.jit(f, mesh=8), (xs,))


@pytest.mark.parametrize(("width", "rows", "rounds"), [(8, 1 << 14, 1), (256, 1024, 3)])
def test_gradients_of_wide_layers_are_scattered_in_the_rounds_that_make_them(width, rows, rounds):
    """A stack of whole gradients is held if it is small beside the arrays of a round: they share one message."""

    def f(w, x):
        def loss(w):
            return jnp.mean(lax.scan(lambda c, w: (jnp.tanh(c @ w), None), split(x, 0, 8), w)[0] ** 2)

        return split(jax.grad(loss)(w), 1, 8)

    w, x = normal(3, width, width) / width**0.5, normal(rows, width)
    partitioned = gshard.jit(f, mesh=8)
    assert_proved(partitioned, (w, x))
    scattered = [r for r in gshard.explain(partitioned, w, x).collectives if r.kind == "reduce_scatter"]
    assert [(r.times, r.bytes) for r in scattered] == [(rounds, 3 * width * width * 4 * 7 // 8)]
