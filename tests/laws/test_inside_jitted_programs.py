"""The law: inside of a jitted program, a partitioned function computes what it computes without partitions.

It is called in each transformation and in each control structure of JAX. ``jax.jit`` lowers many of these before their
operands are sharded, so that XLA's partitioner determines how the function is partitioned (``api/transformations.py``).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import gshard
from placed import mesh_of, three_calls
from sampled import crossed
from small_programs import PROGRAMS, Small, numbers

Pair = Callable[[Any, Any], Any]


def moved(x, y):
    """Each movement of an uneven dimension sends by a table of positions."""
    x, y = gshard.split(x, 0, 8), gshard.split(y, 0, 8)
    return jnp.roll(x, 1, 0), y[3:11], x[::-2], jnp.concatenate([y[2:], x]), jnp.pad(y, ((3, 1), (0, 0)))


def two_tables(x, y):
    """Two arrays of one type are captured."""
    return gshard.split(x, 0, 8)[:7, :7] * TABLES[1] - TABLES[0] @ y[:7, :7]


def late(x, y):
    """Newer JAX keeps these as one operator until transformations are done."""
    x = gshard.split(x, 0, 8)
    return x * jnp.searchsorted(jnp.arange(8.0), x) * jnp.frexp(x)[0] + y


TABLES = jnp.asarray(numbers((7, 7), 3)), jnp.asarray(numbers((7, 7), 4))
X, Y = numbers((13, 11), 1, np.float32), numbers((13, 11), 2, np.float32)
SMALL = PROGRAMS | {"moved": Small(moved), "two tables": Small(two_tables), "late": Small(late)}
del SMALL["centred"]  # it has no derivative


def squares(f):
    return lambda x, y: sum(jnp.sum(a**2) for a in jax.tree.leaves(f(x, y)))


def with_own_derivative(f):
    @jax.custom_vjp
    def g(x, y):
        return f(x, y)

    g.defvjp(lambda x, y: (f(x, y), (x, y)), lambda xy, _: (3 * xy[0], 2 * jax.tree.leaves(f(*xy))[0].sum() + xy[1]))
    return jax.value_and_grad(squares(g), (0, 1))


def with_own_tangent(f):
    g = jax.custom_jvp(lambda x, y: f(x, y))
    g.defjvp(lambda xy, dxy: (f(*xy), f(*dxy)))
    return lambda x, y: jax.jvp(g, (x, y), (y, x))


def looped(f):
    def body(state):
        i, x, y, _ = state
        return i + 1, y, x, f(x, y)

    return lambda x, y: lax.while_loop(lambda state: state[0] < 3, body, (0, x, y, f(x, y)))


TRANSFORMATIONS = {
    "grad": lambda f: jax.grad(squares(f), (0, 1)),
    "jvp": lambda f: lambda x, y: jax.jvp(f, (x, y), (y, x)),
    "linearize": lambda f: lambda x, y: jax.linearize(f, x, y)[1](y, x),
    "second derivative": lambda f: lambda x, y: jax.jvp(jax.grad(squares(f), (0, 1)), (x, y), (y, x))[1],
    "grad of a norm of grad": lambda f: jax.grad(squares(jax.grad(squares(f)))),
    "gshard.jit": lambda f: gshard.jit(f, mesh=mesh_of(d=8)),
    "linearized outside": lambda f: jax.linearize(f, X, Y)[1],
    "grad of vmap": lambda f: jax.grad(squares(TRANSFORMATIONS["vmap"](f)), (0, 1)),
    "vmap": lambda f: lambda x, y: jax.vmap(f, (0, None))(jnp.stack([x, -y]), y),
    "checkpoint": jax.checkpoint,
    "grad of checkpoint": lambda f: jax.grad(squares(jax.checkpoint(f)), (0, 1)),
    "custom_vjp": with_own_derivative,
    "custom_jvp": with_own_tangent,
    "jit": jax.jit,
    "scan": lambda f: lambda x, y: lax.scan(lambda c, a: ((c[1], c[0]), f(a, c[0])), (x, y), jnp.stack([x, -y])),
    "grad of scan": lambda f: jax.grad(squares(TRANSFORMATIONS["scan"](f)), (0, 1)),
    "map": lambda f: lambda x, y: lax.map(lambda a: f(*a), (jnp.stack([x, -y]), jnp.stack([y, x]))),
    "while": looped,
    "cond": lambda f: lambda x, y: lax.cond(x[0, 0] > 0, f, lambda x, y: f(y, x), x, y),
    "switch": lambda f: lambda x, y: lax.switch(2, [f, f, lambda x, y: f(-x, y)], x, y),
}  # fmt: skip

CONTROL = {"scan", "grad of scan", "map", "while", "cond", "switch"}


@pytest.mark.parametrize(("inside", "name"), crossed(list(TRANSFORMATIONS), list(SMALL), one_in=8))
def test_it_computes_the_same_inside(inside, name):
    small, mesh, transform = SMALL[name], mesh_of(a=2, b=4), TRANSFORMATIONS[inside]
    if "vmap" in inside and not small.mapped:
        pytest.skip("its marks cannot be mapped")
    jitted = gshard.jit(small.function, mesh=mesh)
    want = jax.jit(transform(lambda x, y: small.function(*small.arguments(x, y))))(X, Y)
    run = jax.jit(transform(lambda x, y: jitted(*small.arguments(x, y))))
    outside = () if inside in CONTROL else (run.__wrapped__(X, Y),)  # of a jitted program
    for got in (*outside, *three_calls(run, mesh, X, Y)):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, want)
