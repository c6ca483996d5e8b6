"""The law of rewrites: a random program computes the same bits with all of them and with none.

Programs of 4 to 12 operators that move, combine or look up elements of int32 arrays, whose sums wrap. They are run
operator by operator.
"""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from gshard.core.jax_adapter import jaxpr_without_dead_code
from gshard.language.region import Interpreter
from gshard.tracing.builder import Builder

N, M = 8, 3


def fitted(x):
    """An array of the size that all operators take, so that equal operators are compiled once."""
    return x[:N] if x.shape[0] >= N else jnp.pad(x, ((0, N - x.shape[0]), (0, 0)), constant_values=1)


def inner(x):
    return x[1:-1] * 2


UNARY = (
    lambda x: -x, lambda x: x[1:], lambda x: x[:-2], lambda x: x[::2], lambda x: x[::-1], lambda x: jnp.roll(x, 1, 0),
    lambda x: jnp.roll(x, -2, 1), lambda x: jnp.pad(x[2:] + x[:-2], ((1, 1), (0, 0))),
    lambda x: jnp.pad(inner(x), ((1, 1), (0, 0)), constant_values=7),
    lambda x: jnp.concatenate([-x[N // 2 :], x[: N // 2]]), lambda x: x.at[1:-1].set(inner(x)),
    lambda x: x.at[::2].add(x[1::2]), lambda x: jnp.concatenate([x[-1:], x, x[:1]])[1:],
    lambda x: x * jnp.concatenate([jnp.arange(5), jnp.arange(3)[::-1]])[:, None],
    lambda x: (jnp.stack([x, -x]).reshape(-1, M) @ (jnp.ones((M, M), x.dtype) + x[:M])).reshape(2, N, M).sum(0) * 3,
    lambda x: (x.T @ x).T[:, :M],
    lambda x: lax.reduce_window(jnp.pad(x, ((1, 0), (0, 0))), 0, lax.add, (2, 1), (1, 1), "VALID"),
    lambda x: lax.associative_scan(jnp.add, x),
    lambda x: jnp.zeros((N, 5), x.dtype).at[jnp.arange(N)[:, None], x % 7].add(x).sum(1)[:, None] + x,
    lambda x: x + jnp.searchsorted(jnp.sort(x[:, 0])[::-1], x[:, 1])[:, None].astype(x.dtype),
)  # fmt: skip
BINARY = (
    lambda x, y: x + y, jnp.maximum, lambda x, y: jnp.where(x > y, x, -y),
    lambda x, y: jnp.concatenate([x[2:], y[:2]]),
    lambda x, y: jnp.pad(x[:5], ((0, 3), (0, 0))) + jnp.pad(y[:3], ((5, 0), (0, 0))),
)  # fmt: skip


def program_of(seed):
    rng = np.random.default_rng(seed)
    count = len(UNARY) + len(BINARY)
    chosen = [(int(rng.integers(count)), *rng.integers(99, size=2)) for _ in range(rng.integers(4, 13))]

    def program(*arrays):
        values = list(arrays)
        for operator, i, k in chosen:
            x, y = values[i % len(values)], values[k % len(values)]
            made = UNARY[operator](x) if operator < len(UNARY) else BINARY[operator - len(UNARY)](x, y)
            values.append(fitted(made))
        return values[-3:]

    return program


def check(seeds):
    fired = Counter()
    for seed in seeds:
        x, y = np.random.default_rng(seed).integers(-(2**31), 2**31, (2, N, M)).astype(np.int32)
        jaxpr = jax.make_jaxpr(program_of(seed))(x, y)
        body = jaxpr_without_dead_code(jaxpr.jaxpr)
        every, none = Builder(), Builder(rewrites=())
        found = [Interpreter().run(builder.block(body), [*jaxpr.consts, x, y]) for builder in (every, none)]
        for got, want in zip(*found, strict=True):
            np.testing.assert_array_equal(got, want, f"seed {seed}")
        fired.update(one.rewrite for one in every.fired)
    return fired


def test_programs_compute_the_same_with_all_rewrites_and_with_none():
    assert len(check(range(15))) >= 5


@pytest.mark.slow
def test_many_programs_do():
    assert len(check(range(100, 500))) == 6  # all that do not depend on shardings
