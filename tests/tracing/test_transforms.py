"""Fourier transforms of dimensions that are split: one after the other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from gshard.testing import assert_proved

RNG = np.random.default_rng(0)


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


def energy(f):
    return lambda x: jnp.sum(jnp.abs(f(x)) ** 2 * jnp.arange(1.0, 1 + f(x).shape[-1]) / f(x).size)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_nothing_is_gathered(name):
    f, x, most = TRANSFORMS[name]
    of_parts = lambda x: f(gshard.split(x, int(name == "the last of four"), 8))  # noqa: E731
    step = gshard.jit(of_parts, mesh=gshard.Mesh.abstract(devices=8))
    assert_proved(step, (x,))
    assert_proved(gshard.jit(jax.grad(energy(of_parts)), mesh=8), (x,))
    lowered = step.lower(x)
    program, sent = lowered.plan.program, lowered.spmd.collectives
    assert all(len(e.params["fft_lengths"]) == 1 for e in program.block.walk() if e.name == "fft")
    if x.shape[0] % 8 == 0:
        assert {c.kind for c in sent} <= {"all_to_all", "collective_permute"}
    if name != "uneven":  # which leaves whole
        assert sum(c.total_bytes for c in sent) <= 7 / 8 * most * np.size(x) * 8


def test_two_dimensions_over_two_axes():
    spec = jax.sharding.PartitionSpec("x", "y")
    f = gshard.jit(lambda x: jnp.fft.fftn(gshard.shard(x, spec)), mesh={"x": 2, "y": 4})
    x = complex_(8, 12, 16)
    assert_proved(f, (x,))
    assert {c.kind for c in f.lower(x).spmd.collectives} == {"all_to_all"}


def test_what_is_not_split_stays_as_it_is():
    for dim, shape in ((0, (8, 16, 16)), (0, (8, 4096))):
        f = gshard.jit(lambda x, d=dim: (jnp.fft.fft2 if x.ndim > 2 else jnp.fft.fft)(gshard.split(x, d, 8)), mesh=8)
        lowered = f.lower(complex_(*shape))
        assert lowered.plan.program is lowered.program
        assert not lowered.spmd.collectives
