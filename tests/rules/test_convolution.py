"""Convolutions and averages of what is spread: nothing is multiplied by zeros, nothing moves but halos."""

import jax
import numpy as np
import pytest
from jax import lax

import flops
import gshard
from gshard.testing import assert_proved

RNG = np.random.default_rng(0)
IMAGE = RNG.standard_normal((2, 32, 12, 4)).astype(np.float32)
KERNEL = RNG.standard_normal((3, 3, 4, 4)).astype(np.float32)
LAYOUT = ("NHWC", "HWIO", "NHWC")


def transposed(x, w):
    return lax.conv_transpose(x, w, (2, 2), "SAME")


def strided(x, w):
    return lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=LAYOUT)


def gradient(f):
    return lambda x, w: jax.vjp(lambda x: f(x, w), x)[1](f(x, w))[0]


def rows(f):
    """The function of an image whose rows are split, and whose result's rows are."""
    return lambda x, w: gshard.split(f(gshard.split(x, 1, 8), w), 1, 8)


@pytest.mark.parametrize("f", [transposed, gradient(strided), gradient(transposed)])
def test_each_device_does_an_eighth(f):
    whole = jax.jit(f).lower(IMAGE, KERNEL).compile()
    lowered = gshard.jit(rows(f), mesh=8).lower(IMAGE, KERNEL)
    parts = lowered.executable.compiled
    # At the border of the array fewer elements are under the kernel than a device in the middle has.
    assert flops.executed(parts) <= 1.25 * flops.executed(whole) / 8
    assert_proved(gshard.jit(rows(f), mesh=8), (IMAGE[:, :, :4], KERNEL))
    assert {c.kind for c in lowered.spmd.collectives} == {"collective_permute"}


def pooled(size, stride, padding):
    def f(x):
        return lax.reduce_window(x, 0.0, lax.add, (1, size, size, 1), (1, stride, stride, 1), padding)

    return lambda x: jax.vjp(f, x)[1](f(x))[0]


# Windows, and how many rows each device sends at most: of averages, and of their derivatives.
POOLS = {(2, 2, "VALID"): 0, (3, 2, "SAME"): 2, (3, 1, "SAME"): 4, (2, 4, "VALID"): 0, (3, 3, "SAME"): 10}


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.one_in(2)
def test_derivatives_of_averages_pad_by_themselves(pool):
    f = pooled(*pool)
    program = gshard.stages.trace(f, IMAGE)
    assert "pad" not in {e.name for e in program.block.equations}
    run = gshard.jit(lambda x: gshard.split(f(gshard.split(x, 1, 8)), 1, 8), mesh=8)
    assert_proved(run, (IMAGE,))
    row = IMAGE[:, 0].nbytes
    assert sum(c.total_bytes for c in run.lower(IMAGE).spmd.collectives) <= POOLS[pool] * row


def test_windows_pad_with_what_their_monoid_does_not_notice_and_nothing_else():
    def over(f, start, number, config):
        return lambda x: lax.reduce_window(lax.pad(x, number, [config]), start, f, (3,), (1,), "VALID")

    x = RNG.integers(-9, 9, 16).astype(np.float32)
    cases = [
        (over(lax.add, 0.0, 0.0, (1, 2, 1)), True), (over(lax.max, -np.inf, -np.inf, (2, 0, 0)), True),
        (over(lax.min, np.inf, np.inf, (0, 0, 3)), True), (over(lax.add, 0.0, -0.0, (1, 1, 0)), True),
        (over(lax.add, 0.0, 1.0, (1, 2, 1)), False), (over(lax.max, -np.inf, 0.0, (1, 1, 0)), False),
        (over(lax.add, 0.0, 0.0, (-1, 2, 0)), False), (over(lax.add, 0.0, np.nan, (1, 0, 0)), False),
    ]  # fmt: skip
    for f, gone in cases:
        assert ("pad" in {e.name for e in gshard.stages.trace(f, x).block.equations}) != gone

    def every(x):
        return [f(x) for f, _ in cases]

    assert_proved(gshard.jit(lambda x: every(gshard.split(x, 0, 8)), mesh=8), (x,))
