"""The law: transformations of a partitioned function are those of the function, whenever JAX expands its operators.

Newer JAX keeps ``searchsorted``, ``frexp`` and others as one operator until transformations are done.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from placed import in_every_way, mesh_of


def loss(x):
    x = gshard.split(x, 0, "a")
    mantissa, _ = jnp.frexp(x)
    return jnp.sum(x * jnp.searchsorted(jnp.arange(8.0), x) * mantissa)


TRANSFORMATIONS = {
    "grad": jax.grad,
    "grad in jit": lambda f: jax.jit(jax.grad(f)),
    "grad of jit": lambda f: jax.grad(jax.jit(f)),
    "hessian": jax.hessian,
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,)),
    "vmap": lambda f: lambda x: jax.vmap(f)(jnp.stack([x, 2 * x])),
    "grad of scan": lambda f: jax.grad(lambda x: jax.lax.scan(lambda c, _: (c * f(x), None), 1.0, length=2)[0]),
    "grad of checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
}

FAST = ("grad", "vmap")
WAYS = ("numpy", "rows", "numpy", "rows")


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in TRANSFORMATIONS])
def test_transformed(name):
    mesh, x = mesh_of(a=8), np.linspace(0.1, 7.9, 16, dtype=np.float32)
    transform = TRANSFORMATIONS[name]
    want = jax.tree.leaves(transform(loss)(x))
    for got in in_every_way(transform(gshard.jit(loss, mesh=mesh)), (x,), mesh, WAYS):
        for a, b in zip(jax.tree.leaves(got), want, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5)
