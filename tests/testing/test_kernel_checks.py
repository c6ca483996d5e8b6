"""``gshard.testing.check_kernel``: every split of a kernel, simulated, computes what the kernel computes whole."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from api.test_kernel_function import plain_attention, plain_rms_norm


def fast_attention(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def adam(w, g, m, v):
    m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
    return w - 0.1 * m / (jnp.sqrt(v) + 1e-3), m, v


def selected(logits, labels):
    return jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]


def sums(x, peak):
    """Two results, of which one sums exponentials up, the other a dimension of a split vocabulary."""
    return jnp.sum(jnp.exp(x - peak[:, None]), axis=1), x.max(1)


def recurrent(x, w):
    """Dimension 1 is time; each step has a product."""
    step = lambda h, row: (jnp.tanh(row + h @ w), h)  # noqa: E731
    return jnp.moveaxis(jax.lax.scan(step, jnp.zeros_like(x[:, 0]), jnp.moveaxis(x, 1, 0))[1], 0, 1)


def gated(a, b):
    return jax.lax.associative_scan(lambda x, y: (x[0] * y[0], x[1] * y[0] + y[1]), (a, b), axis=1)[1]


KERNELS = {
    "attention, shared keys": (
        fast_attention, functools.partial(plain_attention, causal=True), ((3, 4, 4, 3), (3, 4, 2, 3), (3, 4, 2, 3)),
    ),
    "product": (lambda x, w: (x.T * 1.0).T @ w, lambda x, w: x @ w, ((4, 6), (6, 7))),
    "norm": (plain_rms_norm, plain_rms_norm, ((4, 5, 6), (6,))),
    "sums": (sums, sums, ((5, 6), (5,))),
    "adam": (adam, adam, ((4, 7),) * 3 + ((4, 7),)),
    "recurrent": (recurrent, recurrent, ((6, 3, 4), (4, 4))),
    "gated": (gated, gated, ((4, 6, 4), (4, 6, 4))),
}  # fmt: skip


def arrays(shapes):
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape, np.float32) for shape in shapes]


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.one_in(3)
def test_every_split_computes_the_same(name):
    fast, plain, shapes = KERNELS[name]
    args = arrays(shapes)
    if name == "adam":
        args[3] = np.abs(args[3])
    assert gshard.testing.check_kernel(gshard.kernel(fast, like=plain), *args, most=6, tolerance=1e-4)


def test_labels_are_no_floats():
    kernel = gshard.kernel(selected, like=selected)
    logits, labels = arrays(((5, 6),))[0], np.array([0, 5, 2, 1, 3])
    checked = gshard.testing.check_kernel(kernel, logits, labels)
    assert "a@a, up to rounding" in checked


@pytest.mark.parametrize(
    ("fast", "found"),
    [
        (lambda x: 2 * x + 1e-2 * (x > 1), "do not compute the same"),
        (lambda x: 2 * x if x.shape[0] > 3 else 3 * x, "is not true of factor 'a'"),
    ],
)
def test_functions_that_differ_are_found(fast, found):
    kernel = gshard.kernel(fast, like=lambda x: 2 * x)
    with pytest.raises(gshard.rules.RuleError, match=found):
        gshard.testing.check_kernel(kernel, *arrays(((6, 4),)))


def test_only_kernels_are_checked():
    with pytest.raises(gshard.ArgumentError, match="check_kernel takes a kernel"):
        gshard.testing.check_kernel(jax.jit(jnp.sin), 1.0)
