"""What a loop computes of positions alone is computed before it: by structure, and against ``jax.jit``."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec as P

import gshard
from gshard.language.region import beforehand

MASKS = frozenset(("and", "eq", "ne", "lt", "le", "gt", "ge", "or", "not"))


def plate(x):
    """Heat in the inside of a plate: masks of the border in both dimensions, in every round."""

    def step(u, _):
        inner = (u[2:, 1:-1] + u[:-2, 1:-1] + u[1:-1, 2:] + u[1:-1, :-2]) / 4
        return u.at[1:-1, 1:-1].set(inner), None

    return lax.scan(step, x, None, length=3)[0]


def until_small(x):
    """A while loop with a mask of rows."""
    rows = lambda v: (jnp.arange(v.shape[0]) % 3 != 1)[:, None]  # noqa: E731
    return lax.while_loop(lambda v: jnp.max(jnp.abs(v)) > 0.2, lambda v: jnp.where(rows(v), v / 2, v / 3), x)


def nested(x):
    """A loop in a loop, with running sums whose padding is masked, and a stack of results."""

    def outer(u, _):
        u, sums = lax.scan(lambda u, _: (jnp.cumsum(jnp.sin(u), 0) * 0.1, u[0].sum()), u, None, length=2)
        return jnp.pad(u[:-1], ((1, 0), (0, 0))), sums

    return lax.scan(outer, x, None, length=2)


def never(x):
    return lax.scan(lambda u, _: (jnp.where(jnp.arange(u.shape[0])[:, None] < 2, u, 0), None), x, None, length=0)[0]


def gradient(x):
    return jax.grad(lambda x: jnp.sum(plate(x) ** 2))(x)


def drawn(x):
    """Of data: nothing of it is known before; and a counter that is carried."""

    def step(carry, _):
        i, u = carry
        return (i + 1, jnp.where((jnp.arange(u.shape[0]) == i)[:, None], -u, u)), i

    return lax.scan(step, (jnp.int32(0), x), None, length=4)


def loops(jaxpr):
    for e in jaxpr.eqns:
        if e.primitive.name == "scan":
            yield e.params["jaxpr"].jaxpr
        for inner in jaxprs_in_params(e.params):
            yield from loops(inner)


@pytest.mark.parametrize("function", [plate, until_small, nested, never, gradient, drawn])
@pytest.mark.parametrize("rows", [16, 13, 3])
@pytest.mark.one_in(3)
def test_loops_compute_what_they_computed(function, rows, rng):
    x = rng.standard_normal((rows, 5)).astype(np.float32)
    x[0, 1], x[-1, 2] = (np.inf, np.nan) if function is plate else (x[0, 1], x[-1, 2])
    mesh = jax.make_mesh((8,), ("x",))
    expected = jax.tree.leaves(jax.jit(function)(x))
    found = jax.tree.leaves(gshard.jit(lambda x: function(gshard.split(x, 0, "x")), mesh=mesh)(x))
    for got, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(wanted), rtol=1e-4, atol=1e-5)


def test_masks_are_made_before_the_loop():
    x = jax.ShapeDtypeStruct((64, 32), jnp.float32)
    mesh = gshard.Mesh.abstract(x=8)
    lowered = gshard.jit(plate, mesh=mesh, in_shardings=P("x")).lower(x)
    (body,) = loops(lowered.spmd.jaxpr.jaxpr)
    made = [e for e in body.eqns if e.primitive.name in MASKS]
    assert not [e for e in made if sum(n > 1 for n in e.outvars[0].aval.shape) == 1], body


def test_effects_stay_in_every_round():
    seen = []

    def step(x):
        jax.debug.callback(lambda n: seen.append(int(n)), jnp.arange(4).sum())
        return x + 1

    once = beforehand(step, jnp.zeros(3))
    jax.block_until_ready(jax.jit(lambda x: lax.fori_loop(0, 3, lambda _, x: once(x), x))(jnp.zeros(3)))
    jax.effects_barrier()
    assert seen == [6, 6, 6]
