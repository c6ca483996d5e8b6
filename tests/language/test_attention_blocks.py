"""Attention block by block computes what it computes with all scores at once, forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gshard.language.attention_blocks import WHOLE, Blocks, Mask, all_scores, merged

QUERIES, KEYS = 1100, 1300  # neither is a multiple of a block


FAST = ("causal", "window", "positions")
SLOW = ("all", "before", "after", "segments", "mask")


def masks(rng):
    segments = [jnp.asarray(rng.integers(0, 3, (1, n)), jnp.int32) for n in (QUERIES, KEYS)]
    positions = [jnp.asarray(rng.integers(0, 900, (1, n)), jnp.int32) for n in (QUERIES, KEYS)]
    return {
        "all": Mask(),
        "causal": Mask(causal=True),
        "window": Mask(window=(100, 30)),
        "before": Mask(causal=True, window=(600, None)),
        "after": Mask(window=(None, 7)),
        "segments": Mask(q_segments=segments[0], k_segments=segments[1]),
        "positions": Mask(causal=True, window=(400, None), q_positions=positions[0], k_positions=positions[1]),
        "mask": Mask(mask=jnp.asarray(rng.random((1, 1, 2, QUERIES, KEYS)) > 0.4)),
    }


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in masks(np.random.default_rng(0))],
)
def test_blocks_compute_the_whole(name, rng):
    assert QUERIES * KEYS > WHOLE
    mask = masks(rng)[name]
    shapes = {"q": (1, QUERIES, 1, 2, 3), "k": (1, KEYS, 1, 3), "v": (1, KEYS, 1, 4), "dout": (1, QUERIES, 1, 2, 4)}
    q, k, v, dout = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes.values())
    want, back = jax.vjp(lambda q, k, v: all_scores(q, k, v, 0.7, mask), q, k, v)
    out, lse = Blocks(0.7, mask).forward(q, k, v)
    np.testing.assert_allclose(out, want, rtol=2e-4, atol=2e-5)
    gradient = Blocks(0.7, mask).backward(q, k, v, lse, jnp.sum(out * dout, -1), dout)
    for x, y in zip(gradient, back(dout), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5)


def test_queries_that_see_no_key():
    q, k = jnp.ones((1, 2, 1, 1, 3)), jnp.ones((1, 2, 1, 3))
    mask = Mask(mask=jnp.asarray([[True, False], [False, False]])[None, None, None])
    out, lse = Blocks(1.0, mask).forward(q, k, k)
    assert out[0, 1].max() == 0
    assert np.isneginf(lse[0, 1])
    none = jnp.zeros_like(out), jnp.full_like(lse, -jnp.inf)
    for pair in ((out, lse), none), (none, (out, lse)):
        for x, y in zip(merged(*pair), (out, lse), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-6)


def test_what_is_not_finite_reaches_the_queries_that_see_it():
    q, k = jnp.ones((1, 4, 1, 1, 3)), jnp.ones((1, 4, 1, 3))
    for bad in (jnp.inf, jnp.nan):
        out, _ = Blocks(1.0, Mask()).forward(q, k.at[0, 1].set(bad), k)
        assert np.isnan(out).all()
