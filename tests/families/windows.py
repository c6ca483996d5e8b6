"""Windows: convolution and pooling of images whose rows are split."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import gshard
from families.case import GRID, LINE, Family

CASES = Family("windows")

IMAGE, KERNEL = (2, 64, 32, 8), (3, 3, 8, 8)


def convolve(x, w, stride=1, **options):
    return lax.conv_general_dilated(
        x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), **options
    )


def pool(x, size, stride):
    window, steps = (1, size, size, 1), (1, stride, stride, 1)
    return lax.reduce_window(x, -jnp.inf, lax.max, window, steps, "SAME")


@CASES.add(LINE, IMAGE, KERNEL, gradient=(0, 1))
def convolution(x, w):
    return convolve(gshard.split(x, 1, "x"), w)


@CASES.add(LINE, IMAGE, KERNEL, gradient=(0, 1))
def convolution_stride_2(x, w):
    return convolve(gshard.split(x, 1, "x"), w, 2)


@CASES.add(LINE, IMAGE, KERNEL, gradient=(0, 1))
def convolution_dilated(x, w):
    return convolve(gshard.split(x, 1, "x"), w, rhs_dilation=(4, 4))


@CASES.add(LINE, IMAGE, KERNEL)
def convolution_transposed(x, w):
    x = gshard.split(x, 1, "x")
    return gshard.split(lax.conv_transpose(x, w, (2, 2), "SAME"), 1, "x")


@CASES.add(LINE, (16, 64, 32, 8), KERNEL, gradient=(0, 1))
def convolution_of_batch(x, w):
    return convolve(gshard.split(x, 0, "x"), w)


@CASES.add(LINE, (16, 64, 32, 8), (3, 3, 2, 8))
def convolution_grouped(x, w):
    return convolve(gshard.split(x, 0, "x"), w, feature_group_count=4)


@CASES.add(GRID, IMAGE, KERNEL, gradient=(0, 1))
def convolution_two_axes(x, w):
    return convolve(gshard.shard(x, P(None, "y", "x")), w)


@CASES.add(GRID, (4, 64, 32, 8), (3, 3, 8, 16), gradient=(0, 1))
def convolution_of_features(x, w):
    """Images split by batch and rows, kernels by what they make."""
    return convolve(gshard.split(x, 1, "y"), gshard.split(w, 3, "x"))


@CASES.add(LINE, IMAGE, gradient=(0,))
def pooling(x):
    return pool(gshard.split(x, 1, "x"), 2, 2)


@CASES.add(LINE, IMAGE, gradient=(0,))
def pooling_stride_1(x):
    return pool(gshard.split(x, 1, "x"), 3, 1)


@CASES.add(LINE, IMAGE, gradient=(0,))
def average(x):
    x = gshard.split(x, 1, "x")
    return lax.reduce_window(x, 0.0, lax.add, (1, 3, 3, 1), (1, 2, 2, 1), "SAME") / 9


@CASES.add(LINE, IMAGE, {"a": KERNEL, "b": KERNEL, "c": KERNEL}, gradient=(1,))
def stack(x, w):
    """Three convolutions and a pooling, as at the start of a U-Net."""
    x = jax.nn.relu(convolve(gshard.split(x, 1, "x"), w["a"]))
    x = pool(jax.nn.relu(convolve(x, w["b"])), 2, 2)
    return convolve(x, w["c"])


@CASES.add(LINE, (2, 60, 32, 8), KERNEL)
def convolution_uneven(x, w):
    return jnp.sum(convolve(gshard.split(x, 1, "x"), w), 1)
