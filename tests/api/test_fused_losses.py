"""Kernels that users write for a loss over a split vocabulary and for a state-space scan, as ``gshard.kernel``."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas
from jax.sharding import PartitionSpec as P

import gshard


def _call(body: Any, *shapes: jax.ShapeDtypeStruct) -> Any:
    return pallas.pallas_call(body, shapes if len(shapes) > 1 else shapes[0], interpret=True)


def _rows(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape[:1], x.dtype)


@gshard.kernel(like=lambda logits: jnp.max(logits, axis=1))
def largest(logits: Any) -> Any:
    def body(x: Any, out: Any) -> None:
        out[...] = jnp.max(x[...], axis=1)

    return _call(body, _rows(logits))(logits)


def plain_sums(logits: Any, peak: Any, labels: Any, words: Any) -> Any:
    own = jnp.where(words[None] == labels[:, None], logits, 0)
    return jnp.sum(jnp.exp(logits - peak[:, None]), axis=1), jnp.sum(own, axis=1)


@gshard.kernel(like=plain_sums)
def sums(logits: Any, peak: Any, labels: Any, words: Any) -> Any:
    """The sum of the exponentials of each row, and the logit of its label; one pass over the logits."""

    def body(x: Any, peak: Any, labels: Any, words: Any, exponentials: Any, own: Any) -> None:
        exponentials[...] = jnp.sum(jnp.exp(x[...] - peak[...][:, None]), axis=1)
        own[...] = jnp.sum(jnp.where(words[...][None] == labels[...][:, None], x[...], 0), axis=1)

    return _call(body, _rows(logits), _rows(logits))(logits, peak, labels, words)


def plain_gradient(logits: Any, log_sum: Any, labels: Any, words: Any, cotangent: Any) -> Any:
    hit = (words[None] == labels[:, None]).astype(logits.dtype)
    return (jnp.exp(logits - log_sum[:, None]) - hit) * cotangent[:, None]


@gshard.kernel(like=plain_gradient)
def gradient(logits: Any, log_sum: Any, labels: Any, words: Any, cotangent: Any) -> Any:
    def body(x: Any, log_sum: Any, labels: Any, words: Any, cotangent: Any, out: Any) -> None:
        hit = (words[...][None] == labels[...][:, None]).astype(x.dtype)
        out[...] = (jnp.exp(x[...] - log_sum[...][:, None]) - hit) * cotangent[...][:, None]

    return _call(body, jax.ShapeDtypeStruct(logits.shape, logits.dtype))(logits, log_sum, labels, words, cotangent)


@jax.custom_vjp
def cross_entropy(logits: Any, labels: Any) -> Any:
    return _forward(logits, labels)[0]


def _forward(logits: Any, labels: Any) -> Any:
    peak = largest(logits)
    exponentials, own = sums(logits, peak, labels, jnp.arange(logits.shape[1]))
    log_sum = jnp.log(exponentials) + peak
    return log_sum - own, (logits, log_sum, labels)


def _backward(residuals: Any, cotangent: Any) -> Any:
    logits, log_sum, labels = residuals
    return gradient(logits, log_sum, labels, jnp.arange(logits.shape[1]), cotangent), None


cross_entropy.defvjp(_forward, _backward)


def plain_cross_entropy(logits: Any, labels: Any) -> Any:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1)[:, 0]


def loss(of_logits: Any, h: Any, w: Any, labels: Any) -> Any:
    return jnp.mean(of_logits(gshard.shard(h @ gshard.split(w, 1, "model"), P("data", "model")), labels))


@pytest.mark.parametrize("words", [64, 60])
@pytest.mark.parametrize("mesh", [{"data": 1, "model": 8}, {"data": 2, "model": 4}])
def test_a_cross_entropy_over_a_split_vocabulary(mesh: dict[str, int], words: int, rng: np.random.Generator) -> None:
    """The kernels read shards of the logits: what is sent grows with the rows, and not with the vocabulary."""
    h, w = rng.standard_normal((16, 8), np.float32), rng.standard_normal((8, words), np.float32)
    labels = np.concatenate([[0, words - 1, words // 2], rng.integers(0, words, 13)])
    step = jax.value_and_grad(functools.partial(loss, cross_entropy), (0, 1))
    want = jax.value_and_grad(functools.partial(loss, plain_cross_entropy), (0, 1))(h, w, labels)
    f = gshard.jit(step, mesh=mesh)
    on_one = [jax.device_put(x, jax.devices()[-1]) for x in (h, w, labels)]
    for args in ((h, w, labels), (jnp.asarray(h), jnp.asarray(w), jnp.asarray(labels)), on_one):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6), f(*args), want)
    found = gshard.explain(f, h, w, labels)
    assert not found.gathered
    if words % 8 == 0 and mesh["data"] == 1:
        # Peaks and sums of the rows, the loss with the own logits, and the gradient of h.
        assert found.bytes_by_kind.keys() == {"all_reduce"}
        assert found.total_bytes == 2 * 7 * (2 * 16 * 4 + 4 + h.nbytes) // 8


def plain_scan(a: Any, b: Any) -> Any:
    """Time steps are dimension 1: ``h[t] = a[t] h[t - 1] + b[t]``."""

    def step(h: Any, at: Any) -> Any:
        h = at[0] * h + at[1]
        return h, h

    return jnp.moveaxis(
        jax.lax.scan(step, jnp.zeros_like(a[:, 0]), (jnp.moveaxis(a, 1, 0), jnp.moveaxis(b, 1, 0)))[1], 0, 1
    )


@gshard.kernel(like=plain_scan)
def state_space_scan(a: Any, b: Any) -> Any:
    def body(a: Any, b: Any, out: Any) -> None:
        h = jnp.zeros_like(a[:, 0])
        for t in range(a.shape[1]):
            h = a[:, t] * h + b[:, t]
            out[:, t] = h

    return _call(body, jax.ShapeDtypeStruct(a.shape, a.dtype))(a, b)


@pytest.mark.parametrize(("dim", "sends"), [(0, False), (2, False), (1, True)])
def test_a_state_space_scan(dim: int, sends: bool, rng: np.random.Generator) -> None:
    """Sequences and channels are independent. Time is not: the kernel gets all steps."""
    a, b = rng.uniform(0, 1, (8, 16, 8)).astype(np.float32), rng.standard_normal((8, 16, 8), np.float32)
    f = gshard.jit(lambda a, b: state_space_scan(gshard.split(a, dim, 8), b), mesh=8)
    want = plain_scan(a, b)
    for args in ((a, b), (jnp.asarray(a), b), (a, jax.device_put(b, jax.devices()[3]))):
        np.testing.assert_allclose(f(*args), want, rtol=1e-5, atol=1e-6)
    assert (gshard.explain(f, a, b).total_bytes > 0) == sends


def test_the_kernels_compute_what_their_plain_functions_compute(rng: np.random.Generator) -> None:
    logits = rng.standard_normal((3, 4), np.float32)
    labels, words = np.array([0, 3, 1]), np.arange(4)
    peak, cotangent = logits.max(1), rng.standard_normal(3).astype(np.float32)
    a, b = rng.standard_normal((2, 3, 3, 2), np.float32)
    check = functools.partial(gshard.testing.check_kernel, mesh={"d": 2}, tolerance=1e-5, gradient=False)
    assert set(check(largest, logits)) == {"a@d", "b@d"}
    assert set(check(sums, logits, peak, labels, words)) == {"a@d", "b@d"}
    assert set(check(gradient, logits, peak, labels, words, cotangent)) == {"a@d", "b@d"}
    assert len(check(state_space_scan, a, b)) == 2
