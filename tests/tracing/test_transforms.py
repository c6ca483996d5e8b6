"""Fourier transforms of dimensions that are split: one after the other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from checked_calls import near_largest

RNG = np.random.default_rng(0)
TOLERANCE = 2e-6  # of the largest number of a result: sums are added up in another order


def real(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def complex_(*shape):
    return (real(*shape) + 1j * real(*shape)).astype(np.complex64)


def filtered(x):
    return jnp.fft.irfft2(jnp.fft.rfft2(x) * jnp.exp(-0.1 * jnp.arange(x.shape[-1] // 2 + 1)), s=x.shape[-2:])


# A function, its argument, and what is sent at most, as a part of what gathering that as complex numbers would send.
TRANSFORMS = {
    "rows and columns": (jnp.fft.fft2, complex_(16, 24), 1 / 8),
    "of real numbers": (jnp.fft.rfft2, real(16, 30), 2 / 8),
    "to real numbers": (lambda x: jnp.fft.irfft2(x, s=(16, 31)), complex_(16, 16), 2 / 8),
    "three dimensions": (jnp.fft.fftn, complex_(16, 8, 6), 1 / 8),
    "the last of four": (lambda x: jnp.fft.fftn(x, axes=(1, 2, 3)), complex_(3, 8, 6, 8), 1 / 8),
    "uneven": (jnp.fft.fft2, complex_(13, 11), 2 / 8),
    "there and back": (filtered, real(16, 16), 3 / 8),
}


def split_of(name, x):
    f, _, _ = TRANSFORMS[name]
    first = int(name == "the last of four")
    return f(gshard.split(x, first, 8))


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.one_in(3)
def test_the_same_numbers(name):
    f, x, _ = TRANSFORMS[name]
    near_largest(gshard.jit(lambda x: split_of(name, x), mesh=8)(x), jax.jit(f)(x), TOLERANCE)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_nothing_is_gathered(name):
    _, x, most = TRANSFORMS[name]
    lowered = gshard.jit(lambda x: split_of(name, x), mesh=gshard.Mesh.abstract(devices=8)).lower(x)
    program, sent = lowered.plan.program, lowered.spmd.collectives
    assert all(len(e.params["fft_lengths"]) == 1 for e in program.block.walk() if e.name == "fft")
    if x.shape[0] % 8 == 0:
        assert {c.kind for c in sent} <= {"all_to_all", "collective_permute"}
    if name != "uneven":  # which leaves whole
        assert sum(c.total_bytes for c in sent) <= 7 / 8 * most * np.size(x) * 8


@pytest.mark.parametrize("name", ["rows and columns", "of real numbers", "there and back"])
@pytest.mark.one_in(2)
def test_derivatives(name):
    f, x, _ = TRANSFORMS[name]

    def energy(f):
        return jax.grad(lambda x: jnp.sum(jnp.abs(f(x)) ** 2 * jnp.arange(1.0, 1 + f(x).shape[-1]) / f(x).size))

    near_largest(gshard.jit(energy(lambda x: split_of(name, x)), mesh=8)(x), jax.jit(energy(f))(x), TOLERANCE)


def test_two_dimensions_over_two_axes():
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    x = complex_(8, 12, 16)
    spec = jax.sharding.PartitionSpec("x", "y")
    f = gshard.jit(lambda x: jnp.fft.fftn(gshard.shard(x, spec)), mesh=mesh)
    near_largest(f(x), jax.jit(jnp.fft.fftn)(x), TOLERANCE)
    assert {c.kind for c in f.lower(x).spmd.collectives} == {"all_to_all"}


def test_what_is_not_split_stays_as_it_is():
    for dim, shape in ((0, (8, 16, 16)), (0, (8, 4096))):
        f = gshard.jit(lambda x, d=dim: (jnp.fft.fft2 if x.ndim > 2 else jnp.fft.fft)(gshard.split(x, d, 8)), mesh=8)
        lowered = f.lower(complex_(*shape))
        assert lowered.plan.program is lowered.program
        assert not lowered.spmd.collectives
