"""In what form the TPU compiler keeps values: by hand, what is alive at the peak of small programs."""

import jax
import jax.numpy as jnp
import pytest

import gshard
from gshard.device.fusion_model import device_program
from gshard.device.memory import memory_of

N, M, H = 96, 32, 160  # tokens of a device, and the sizes of weights
X, W, V = (jnp.ones(shape) for shape in ((8 * N, M), (M, H), (H, M)))


def temporaries(f, *args):
    spmd = gshard.jit(f, mesh=gshard.Mesh.abstract(a=4, b=2)).lower(*args).spmd
    return [memory_of(device_program(spmd), keeps_low_precision_copies=tpu).temporaries for tpu in (False, True)]


def rows(x):
    return gshard.split(x, 0, 8)


def test_what_only_products_read_is_held_in_half():
    """Two readers, so that it is no part of either; with all bits asked for it is held whole."""

    def f(x, w, precision=None):
        y = jnp.tanh(jnp.sin(rows(x)) * 3.0)
        a = jnp.einsum("nm,mh->nh", y, w, precision=precision)
        return a, jnp.einsum("nm,nk->mk", y, y, precision=precision)

    whole, narrow = temporaries(f, X, W)
    assert whole - narrow == N * M * 2
    whole, narrow = temporaries(lambda x, w: f(x, w, "highest"), X, W)
    assert whole == narrow


@pytest.mark.parametrize("moved", [lambda y: y.T, lambda y: gshard.split(y, 1, 8)], ids=["transposed", "sent"])
def test_so_is_what_is_moved_before_they_read_it(moved):
    def f(x, w):
        y = moved(jnp.cumsum(rows(x), axis=1))
        return jnp.einsum("nm,mh->nh", y, w) if y.shape[0] != M else y.T @ w, y @ y.T

    whole, narrow = temporaries(f, X, W)
    assert narrow < whole


def test_of_what_is_compared_later_the_outcome_is_held():
    """A layer's gradient: the hidden layer in half, and one byte for each of its signs; never the sums before it."""

    def loss(w, v, x):
        return jnp.sum(jnp.sin(jax.nn.relu(rows(x) @ w) @ v))

    def f(w, v, x):
        return jax.grad(loss, argnums=(0, 1))(w, v, x)

    hidden = N * H
    whole, narrow = temporaries(f, W, V, X)
    assert whole >= 2 * 4 * hidden  # sums before the relu and after
    assert narrow <= (4 + 2 + 1) * hidden + 8 * N * M * 4


def test_a_product_and_what_reads_it_element_by_element_are_one():
    def f(x, w, v):
        return jnp.tanh(rows(x) @ w) @ v

    whole, narrow = temporaries(f, X, W, V)
    assert whole == 4 * N * H  # in place
    assert narrow == 2 * N * H


def test_a_result_is_whole():
    def f(x, w):
        y = jnp.tanh(rows(x))
        return y, y @ w, jnp.einsum("nm,nk->mk", y, y)

    whole, narrow = temporaries(f, X, W)
    assert whole == narrow
