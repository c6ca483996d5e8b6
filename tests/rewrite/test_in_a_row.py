"""Slices, paddings and concatenations in a row: what they become, and that it computes the same."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import gshard
from gshard.rewrite.compose_movement import compose_movement
from gshard.rewrite.driver import run
from gshard.tracing.builder import Builder

N, M = 24, 5
RNG = np.random.default_rng(0)
X = RNG.integers(-99, 99, (N, M)).astype(np.float32)
X[0, 1], X[3, 4], X[5, 2], X[-1, 0] = -0.0, -0.0, np.inf, np.nan
MOVES = {"slice", "pad", "concatenate", "concatenate_slices", "broadcast_in_dim", "split"}
ROW = M * 4


def wrapped(x):
    border = jnp.pad(x, ((1, 1), (0, 0)), mode="wrap")
    return border[2:] + border[:-2] - 2 * border[1:-1]


def wrapped_twice(x):
    border = jnp.pad(x, ((1, 1), (2, 2)), mode="wrap")
    return border[2:, 2:-2] + border[:-2, 2:-2] + border[1:-1, 4:] - border[1:-1, :-4]


def zeros_around(x):
    border = jnp.pad(x, ((1, 1), (1, 1)))
    return border[2:, 1:-1] - border[:-2, 1:-1] + border[1:-1, 2:] * border[1:-1, :-2]


# What they become, and how many rows each device sends at most if the first dimension is split.
ROWS = {
    "shifted": (lambda x: jnp.pad(x[:-1], ((1, 0), (0, 0))), ["pad"], 1),
    "shifted back": (lambda x: jnp.pad(x, ((0, 1), (0, 0)), constant_values=-0.0)[1:], ["pad"], 1),
    "shifted by a number of the program's": (
        lambda x: jnp.concatenate([jnp.broadcast_to(x[1, 1], (1, M)), x[:-1]]), ["pad", "slice"], 2,
    ),
    "the first replaced": (lambda x: jnp.pad(x[1:], ((1, 0), (0, 0))), ["concatenate_slices"], 0),
    "the border replaced": (lambda x: jnp.pad(x[1:-1, 1:-1], 1), ["concatenate_slices"] * 2, 0),
    "two numbers": (
        lambda x: jnp.concatenate([jnp.zeros((1, M)), x[2:], jnp.full((1, M), 7.0)]), ["concatenate_slices"], 1,
    ),
    "two numbers around": (
        lambda x: jnp.concatenate([jnp.zeros((1, M)), x, jnp.full((1, M), 7.0)]), ["concatenate_slices"], 21,
    ),
    "something in front, and cut off": (lambda x: jnp.concatenate([jnp.sin(x[:1]), x])[1:], ["slice"], 0),
    "a part of a part": (lambda x: x[1:][1:][:-2], ["slice"], 8),
    "turned twice": (lambda x: jnp.roll(jnp.roll(x, 1, 0), 1, 0), ["concatenate_slices"], 2),
    "turned there and back": (lambda x: jnp.roll(jnp.roll(x, 3, 0), -3, 0), ["slice"], 0),
    "wrapped": (wrapped, ["concatenate_slices", "concatenate_slices", "slice"], 2),
    "wrapped twice": (wrapped_twice, ["concatenate_slices"] * 4, 2),
    "zeros around": (zeros_around, ["pad"] * 4, 2),
    "padded twice": (lambda x: jnp.pad(jnp.pad(x, 1), ((0, 2), (0, 0)))[1:-3, 1:-1], ["slice"], 0),
    "cut, and padded with another number": (
        lambda x: jnp.pad(jnp.pad(x, ((0, 4), (0, 0)), constant_values=7.0)[:-3], ((0, 2), (0, 0))),
        ["concatenate_slices"], 34,
    ),
    "twice, and cut along the other": (
        lambda x: jnp.concatenate([x, x], 1)[1:-1], ["slice", "concatenate_slices"], 21
    ),
    "padded with two": (lambda x: jnp.pad(jnp.pad(x, 1), 1, constant_values=3.0), ["pad", "pad"], 20),
    "split and joined": (lambda x: jnp.concatenate(jnp.split(x, [5, 9])[::-1])[::1], ["concatenate_slices"], 9),
    "differences": (lambda x: jnp.diff(x, axis=0, prepend=0.0), ["pad", "slice"], 1),
    "turned by nothing, backwards": (lambda x: jax.vjp(lambda y: jnp.roll(y, (0, 0), (0, 1)), x)[1](x)[0], [], 0),
    "turned by nothing and by one, backwards": (
        lambda x: jax.vjp(lambda y: jnp.roll(y, (0, 1), (0, 1)), x)[1](x)[0], ["concatenate_slices"], 0,
    ),
    "nothing, filled up": (
        lambda x: jnp.concatenate([x, jnp.pad(x[2:2], ((4, 0), (0, 0)), constant_values=7.0)])[3:], ["pad"], 34,
    ),
    # Four rows more than with an all-to-all and two gathers, in one message less, which counts 256 bytes.
    "one row of many": (lambda x: jnp.concatenate([x, x * 2])[N + 3 : N + 4], ["slice"], 9),
}  # fmt: skip


def moves_of(f, *arguments):
    return [e.name for e in gshard.stages.trace(f, *arguments).block.equations if e.name in MOVES]


@pytest.mark.parametrize("name", ROWS)
def test_what_they_become_and_what_is_sent(name):
    f, expected, rows = ROWS[name]
    assert sorted(moves_of(f, X)) == sorted(expected)
    block = gshard.stages.trace(f, X).block
    assert not run([compose_movement], block.equations, block.outputs, Builder(itertools.count(10_000)))[1]
    marked = lambda x: gshard.split(f(gshard.split(x, 0, 8)), 0, 8)  # noqa: E731
    lowered = gshard.jit(marked, mesh=gshard.Mesh.abstract(devices=8)).lower(X)
    assert sum(c.total_bytes for c in lowered.spmd.collectives) <= rows * ROW


def backwards(x):
    """What derivatives make of halves that change places: a sum of what zeros are put to."""
    n = x.shape[0] // 2
    zero = x.dtype.type(0)
    return lax.pad(x[n:], zero, ((0, n, 0), (0, 0, 0))) + lax.pad(-x[:n], zero, ((n, 0, 0), (0, 0, 0)))


MOVED = {
    "halves": lambda x: jnp.concatenate([-x[N // 2 :], x[: N // 2]]), "halves, in derivatives": backwards,
    "thirds": lambda x: jnp.concatenate([jnp.abs(x[14:]), -jnp.abs(x[:6]), x[6:14]]),
    "all of it": lambda x: jnp.concatenate([-x[N // 2 :], -x[: N // 2]]),
}  # fmt: skip


def all_of(dim):
    programs = {name: f for name, (f, *_) in ROWS.items()} | MOVED
    return lambda x: {name: f(x if dim is None else gshard.split(x, dim, 8)) for name, f in programs.items()}


def same_bits(found, expected, name):
    np.testing.assert_array_equal(found, expected, name)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(expected), name)


@pytest.mark.parametrize("dim", [None, 0, 1])
def test_the_same_comes_out(dim):
    expected = jax.jit(all_of(None))(X)
    for name, found in gshard.jit(all_of(dim), mesh=8)(X).items():
        same_bits(found, expected[name], name)


def test_a_shift_and_its_gradient_send_one_row_each_way():
    def both(x, y):
        out, back = jax.vjp(lambda x: jnp.pad(gshard.split(x, 0, 8)[:-1], ((1, 0), (0, 0))), x)
        return out, back(gshard.split(y, 0, 8))

    lowered = gshard.jit(both, mesh=gshard.Mesh.abstract(devices=8)).lower(X, X)
    assert [(c.kind, c.total_bytes) for c in lowered.spmd.collectives] == [("collective_permute", ROW)] * 2


@pytest.mark.parametrize(("number", "masks"), [(0.0, 0), (-0.0, 1), (7.0, 1)])
def test_zeros_that_nobody_sends_are_not_masked(number, masks):
    f = gshard.jit(
        lambda x: jnp.pad(x[:-1], ((1, 0), (0, 0)), constant_values=number), mesh=8, in_shardings=jax.P("devices")
    )
    assert f.lower(X).as_text().count("stablehlo.select") == masks
    np.testing.assert_array_equal(np.signbit(np.asarray(f(X))[0]), np.signbit(np.full(M, number)))


def test_derivatives_in_three_pieces_are_one():
    def f(x):
        return lax.pad(x[:4], 0.0, [(6, 0, 0)]) + (lax.pad(x[4:7], 0.0, [(3, 4, 0)]) + lax.pad(x[7:], 0.0, [(0, 7, 0)]))

    x = np.array([1, -0.0, np.nan, 3, -4, 5, np.inf, -0.0, 8, -9], np.float32)
    assert moves_of(f, x) == ["concatenate_slices"]
    assert not any(e.name in ("add", "add_any") for e in gshard.stages.trace(f, x).block.equations)
    same_bits(gshard.jit(lambda x: f(gshard.split(x, 0, 8)), mesh=8)(x), jax.jit(f)(x), "sum of pieces")


def test_sums_that_are_more_than_pieces_side_by_side_stay():
    x = np.arange(10, dtype=np.float32)
    for f in (
        lambda x: lax.pad(x[:5], 0.0, [(0, 5, 0)]) + lax.pad(x[4:], 0.0, [(4, 0, 0)]),  # they overlap
        lambda x: lax.pad(x[:5], -0.0, [(0, 5, 0)]) + lax.pad(x[5:], -0.0, [(5, 0, 0)]),  # nothing is added to -0.0
        lambda x: lax.pad(x[:5], 1.0, [(0, 5, 0)]) + lax.pad(x[5:], 1.0, [(5, 0, 0)]),
        lambda x: lax.pad(x[:5], x[0], [(0, 5, 0)]) + lax.pad(x[5:], x[1], [(5, 0, 0)]),
    ):
        assert {e.name for e in gshard.stages.trace(f, x).block.equations} & {"add", "add_any"}
