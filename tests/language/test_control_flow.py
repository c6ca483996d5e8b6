"""Loops and branches against ``jax.jit``: lengths that differ by example, carries of all kinds, one in another."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import gshard
from checked_calls import near
from gshard import split
from gshard.testing.rule_checks import emitted, reported
from harness import normal
from placed import mesh_of


@dataclasses.dataclass(frozen=True)
class Case:
    """A program whose arguments come split along their first dimension, if they have one.

    Attributes:
        silent: whether devices only say to each other, before the results leave, that they have ended; None: not looked
            at.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    silent: bool | None = None


def integers(*shape, high=9):
    return np.random.default_rng([3, *shape]).integers(0, high, shape).astype(np.int32)


def halved(x):
    """How often it can be halved until it is small."""
    return lax.while_loop(lambda c: jnp.abs(c[1]) > 0.1, lambda c: (c[0] + 1, c[1] / 2), (0, x))


def norm_of(x):
    """The condition adds up what every example holds."""
    return lax.while_loop(lambda v: (v * v).sum() < 50, lambda v: v * 1.25, x)


def kinds(n, x):
    """A carry of seven types, one of them empty and one a key."""

    def change(c):
        i, f, b, u, z, k, e = c
        k, drawn = jax.random.split(k)
        more = jax.random.bits(drawn, (), jnp.uint8)
        return i + 1, f * 1.5, ~b, u + more, z * 1j, k, e + 1

    start = 0, x, True, jnp.uint8(250), 1 + 2j, jax.random.key(5), jnp.zeros((0, 2), jnp.bfloat16)
    end = lax.while_loop(lambda c: c[0] < n, change, start)
    return *end[:5], jax.random.key_data(end[5]), end[6]


def nested(n, m):
    inner = lambda i, c: c + lax.fori_loop(0, m, lambda j, d: d + i * j, 0)  # noqa: E731
    return lax.fori_loop(0, n, inner, 0)


def resharded(x, n):
    """The carry is split along another dimension than the examples are."""
    grow = lambda i, c: split(c, 1, 8) * 2 + i  # noqa: E731
    return jax.vmap(lambda x, n: lax.fori_loop(0, n, lambda i, c: c * 2 + i, x))(x, n), lax.fori_loop(
        0, n.sum(), grow, x
    )


def meeting(x, n):
    """Examples meet in the body: each round adds their mean."""
    mean = lambda v: lax.pmean(v, "examples")  # noqa: E731
    return jax.vmap(lambda x, n: lax.fori_loop(0, n, lambda i, c: 0.5 * c + mean(c), x), axis_name="examples")(x, n)


def switched(i, x):
    return lax.switch(i, [lambda v: v, jnp.sin, lambda v: v * jnp.nan, lambda v: -v], x)


def branches(i, x):
    """A branch that loops: under vmap both run."""
    return lax.cond(i > 3, lambda x: halved(x)[1], lambda x: lax.fori_loop(0, i, lambda _, c: c - 1, x), x)


def constants(x):
    """Condition and body close over arrays, the condition over one that differs by example."""
    limit, step = jnp.abs(x) + 2, jnp.arange(1.0, 4.0)
    return jax.vmap(
        lambda v, most: lax.while_loop(lambda c: c.sum() < most, lambda c: c + step * (1 + v**2), step * v)
    )(x, limit)


def infinite_parts(x):
    """What an example that has ended would become counts for nothing, be it a NaN."""
    logs = lambda v: lax.while_loop(lambda c: c > 0, lambda c: jnp.log(c), v)  # noqa: E731
    return jax.vmap(logs)(x)


N, X = integers(8), normal(8, 6)
CASES = [
    Case("while", jax.vmap(halved), (X[:, 0],), True),
    Case("while, five over eight", jax.vmap(halved), (X[:5, 0],)),
    Case("condition reduces a split dimension", jax.vmap(norm_of, in_axes=1, out_axes=1), (X,), False),
    Case("fori_loop", jax.vmap(lambda n: lax.fori_loop(0, n, lambda i, c: c + i, 0)), (N,), True),
    Case("carry of seven types", jax.vmap(kinds), (N, X[:, 0])),
    Case("nested", jax.vmap(nested), (N, N[::-1].copy()), True),
    Case("resharded carry", resharded, (normal(8, 8), N)),
    Case("examples meet", meeting, (X, N), False),
    Case("examples meet, five over eight", meeting, (X[:5], N[:5])),
    Case("switch, mapped index", jax.vmap(switched), (N - 2, X), True),
    Case("branches that loop", jax.vmap(branches), (N, X[:, 0]), True),
    Case("constants", constants, (X[:, 0],), True),
    Case("NaN of those that ended", infinite_parts, (np.abs(X[:, 0]),), True),
]  # fmt: skip


def specs(arguments):
    return tuple(P("x") if np.ndim(a) else None for a in arguments)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.one_in(2)
def test_equals_jax_jit(case):
    jitted = gshard.jit(case.function, mesh=mesh_of(x=8), in_shardings=specs(case.arguments))
    near(jitted(*case.arguments), jax.jit(case.function)(*case.arguments), 1e-6)
    lowered = jitted.lower(*case.arguments)
    assert lowered.plan.gathered == ()
    assert emitted(lowered.spmd.jaxpr, lowered.spmd.mesh.atom_sizes) == reported(lowered.spmd.collectives)
    if case.silent is not None:
        assert all(c.kind == "all_reduce" and c.shape == "pred[]" for c in lowered.spmd.collectives) == case.silent


def test_what_somebody_notices_happens_equally_often():
    """A print in the body: all devices go round together, and it is called as often as under jax.jit."""
    called = []

    def f(x, n):
        tell = lambda c: jax.debug.callback(lambda v: called.append(float(v)), c)  # noqa: E731
        return jax.vmap(lambda x, n: lax.fori_loop(0, n, lambda i, c: (tell(c), c + 1)[1], x))(x, n)

    counts = []
    for g in (jax.jit(f), gshard.jit(f, mesh=mesh_of(x=8), in_shardings=(P("x"), P("x")))):
        called.clear()
        jax.block_until_ready(g(X[:, 0], N))
        jax.effects_barrier()
        counts.append(sorted(called))
    assert counts[0] == counts[1]
    assert len(counts[0]) >= N.max()
