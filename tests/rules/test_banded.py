"""Products with a table that is nearly all zeros: halos instead of all of what they sum over, and the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from sampled import crossed

METHODS = "linear", "cubic", "lanczos3"
# Larger and smaller, evenly and not; in one pattern, in another on each device, and of one element each.
SIZES = (
    (64, 128), (64, 96), (64, 32), (128, 32), (64, 80), (100, 200), (60, 90), (128, 63), (63, 128), (250, 256), (96, 8),
    (48, 5),
)  # fmt: skip
TOLERANCE = {"float32": 1e-6, "bfloat16": 2**-8, "float16": 2**-10, "int32": 0.0, "int8": 0.0}


def columns(rng, n, dtype=np.float32):
    """Columns of numbers: finite ones, and such with one or more that are not, near each other and far apart."""
    x = rng.standard_normal((n, 10)).astype(dtype)
    x[0, 0] = np.nan
    x[n - 1, 1] = -np.inf
    x[n // 2, 2] = np.inf
    x[n // 2 : n // 2 + 2, 3] = np.inf
    x[n // 2 : n // 2 + 2, 4] = np.inf, -np.inf
    x[[1, n - 2], 5] = np.inf
    x[:, 6] = np.inf
    x[n // 3 : n // 3 + 3, 7] = np.inf
    return x


def resized(m, method):
    return lambda x: jax.image.resize(x, (m, *x.shape[1:]), method)


def split(f, dim=0, parts=8):
    return lambda x: f(gshard.split(x, dim, parts))


def lowered(f, x, dim=0):
    return gshard.jit(split(f, dim), mesh=gshard.Mesh.abstract(devices=8)).lower(x)


def names(found):
    return [e.name for e in found.plan.program.block.walk()]


def check(f, x, dim=0, rounding=4.0):
    """Compares with ``jax.jit``; ``rounding`` in units of the last place of the largest number."""
    a, b = gshard.jit(split(f, dim), mesh=8)(x), jax.jit(f)(x)
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    tolerance = TOLERANCE[str(b.dtype)]
    a, b = np.asarray(a), np.asarray(b)
    if tolerance:
        a, b = a.astype(np.float64), b.astype(np.float64)
    finite = np.abs(b[np.isfinite(b)]).max(initial=0)
    np.testing.assert_allclose(a, b, rtol=0, atol=rounding * tolerance * finite, equal_nan=True)


@pytest.mark.parametrize(("sizes", "method"), crossed(SIZES, METHODS[:2], one_in=4))
@pytest.mark.one_in(2)
def test_images_in_another_size(sizes, method, rng):
    n, m = sizes
    check(resized(m, method), columns(rng, n))


@pytest.mark.parametrize(("n", "m"), [(100, 150)])
def test_gradients(n, m, rng):
    x = rng.standard_normal((n, 3)).astype(np.float32)

    def gradient(x):
        return jax.grad(lambda x: jnp.sum(jnp.sin(resized(m, "linear")(x))))(x)

    check(gradient, x)
    assert names(lowered(gradient, x)).count("banded") == 2


def table(rng, n, m, dtype):
    """Numbers in a band, zeros among them; no number in some rows."""
    made = np.zeros((m, n), dtype)
    for j in range(m):
        low = j * n // m + rng.integers(-2, 2)
        for i in range(max(0, low), min(n, low + 3)):
            made[j, i] = rng.integers(-4, 5) if j % 7 else 0
    return made


@pytest.mark.parametrize("dtype", ["float32", "int32", "int8"])
@pytest.mark.parametrize(("n", "m"), [(64, 64), (96, 64), (61, 87), (64, 9), (40, 200)])
@pytest.mark.one_in(2)
def test_any_band(n, m, dtype, rng):
    weights = table(rng, n, m, dtype)
    x = columns(rng, n) if dtype == "float32" else rng.integers(-128, 128, (n, 3)).astype(dtype)
    check(lambda x: jnp.asarray(weights) @ x, x)
    check(lambda x: x @ jnp.asarray(weights.T), x.T.copy(), dim=1)


@pytest.mark.parametrize(("n", "m"), [(512, 1024), (512, 256), (512, 640), (500, 1000), (510, 255)])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.one_in(3)
def test_a_halo_is_sent(n, m, method):
    x = jax.ShapeDtypeStruct((n, 24), np.float32)
    found = lowered(resized(m, method), x)
    assert "dot_general" not in names(found)
    sent = sum(c.total_bytes for c in found.spmd.collectives if c.kind != "all_gather")
    assert sent < n * 24 * 4 / 8  # less than one device's part; what is uneven leaves whole
    if n % 8 == m % 8 == 0:
        assert [c.kind for c in found.spmd.collectives] == ["all_reduce", "collective_permute", "collective_permute"]


def test_integers_are_not_counted(rng):
    weights = table(rng, 64, 64, np.int32)
    found = lowered(lambda x: jnp.asarray(weights) @ x, jax.ShapeDtypeStruct((64, 3), np.int32))
    assert "banded" in names(found)
    assert {c.kind for c in found.spmd.collectives} == {"collective_permute"}


OTHERS = {
    "a table of numbers everywhere": (lambda x: jnp.cos(jnp.arange(64.0)[:, None] * jnp.arange(64.0)) @ x, (64, 8)),
    "a triangle": (lambda x: jnp.tri(128) @ x, (128, 8)),
    "a table with what is no number": (lambda x: jnp.diag(jnp.full(64, jnp.nan)) @ x, (64, 8)),
    "nothing but zeros": (lambda x: jnp.zeros((64, 64)) @ x, (64, 8)),
    "a band as wide as a part": (resized(32, "linear"), (16, 8)),
    "a table of the data": (lambda x: jnp.diag(x[:, 0]) @ x, (64, 8)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_others_stay(name):
    f, shape = OTHERS[name]
    assert "banded" not in names(lowered(f, jax.ShapeDtypeStruct(shape, np.float32)))
