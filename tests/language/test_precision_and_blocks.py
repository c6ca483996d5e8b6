"""What sends round arrays to, and attention block by block."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gshard.core.mark import Mark
from gshard.language.attention_primitive import WHOLE, AttentionParams, Blocks, merged
from gshard.language.mark_primitive import SENT, error_bound, rounded

SHAPES = ((5, 7), (3, 1), (13,), (2, 3, 130), (), (0, 4), (4, 0))
TINY = float(np.finfo(np.float32).tiny)


def marked(x, send):
    return rounded(jnp.asarray(x), Mark(send=send, wide=str(jnp.asarray(x).dtype)))


def largest_of_row(x):
    return np.abs(x).max(axis=tuple(range(x.ndim))[-1:], keepdims=True, initial=0)


@pytest.mark.parametrize(
    ("send", "dtype"), [("bfloat16", np.float32), ("int8", np.float32), ("int8", np.float16), ("int8", jnp.bfloat16)]
)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
@pytest.mark.one_in(4)
def test_the_error_is_within_its_bound(rng, send, shape, dtype, size):
    x = np.asarray(size * rng.standard_normal(shape), dtype)
    got = marked(x, send)
    assert (got.dtype, got.shape) == (dtype, shape)
    wide = x.astype(np.float64)
    reference = np.abs(wide) if send == "bfloat16" else largest_of_row(wide)
    error = np.abs(np.asarray(got, np.float64) - wide)
    assert (error <= error_bound(dtype, send) * reference + TINY).all()
    assert (np.sign(np.asarray(got, np.float64)) * np.sign(wide) >= 0).all()


@pytest.mark.parametrize("send", SENT)
def test_the_bound_is_reached(rng, send):
    x = np.abs(rng.standard_normal((4, 1 << 16))).astype(np.float32) + np.float32(1e-3)
    reference = x if send == "bfloat16" else largest_of_row(x)
    relative = np.abs(np.asarray(marked(x, send)) - x.astype(np.float64)) / reference
    assert 0.98 * error_bound(np.float32, send) < relative.max()


def test_bfloat16_is_that_of_jax(rng):
    x = (rng.standard_normal((9, 11)) * 2.0 ** rng.integers(-120, 120, (9, 11))).astype(np.float32)
    np.testing.assert_array_equal(marked(x, "bfloat16"), np.asarray(x, jnp.bfloat16).astype(np.float32))


@pytest.mark.parametrize("send", SENT)
def test_zeros_stay_zeros(send):
    x = np.array([[0, 0, 0], [0, 1, -2]], np.float32)
    np.testing.assert_array_equal(marked(x, send)[0], [0, 0, 0])
    assert np.isfinite(marked(x, send)).all()


def test_what_is_no_number_is_none_afterwards():
    x = np.array([[1, np.nan, 3], [1, 2, 3], [np.inf, 1, 0], [0, -np.inf, np.inf]], np.float32)
    narrow = np.asarray(marked(x, "bfloat16"))
    np.testing.assert_array_equal(narrow, x)
    for f in (marked, jax.jit(marked, static_argnums=1)):
        steps = np.asarray(f(x, "int8"))
        assert np.isnan(steps[[0, 2, 3]]).all()
        assert np.isfinite(steps[1]).all()


def test_the_largest_and_smallest_numbers_stay_finite():
    limits = np.finfo(np.float32)
    x = np.array([[limits.max, -limits.max, 1], [limits.tiny, -limits.tiny, 0], [1e-40, 0, -1e-40]], np.float32)
    got = np.asarray(marked(x, "int8"))
    assert np.isfinite(got).all()
    assert (np.abs(got - x) <= error_bound(np.float32, "int8") * largest_of_row(x) + limits.tiny).all()
    halves = np.array([[np.finfo(np.float16).max, 1, -3]], np.float16)
    assert np.isfinite(marked(halves, "int8")).all()


@pytest.mark.optimised
def test_the_numbers_are_the_same_compiled_mapped_and_in_loops(rng):
    x, send = rng.standard_normal((4, 6, 10)).astype(np.float32), "int8"
    want = np.asarray(marked(x, send))
    for f in (
        jax.jit(lambda x: marked(x, send)),
        jax.vmap(lambda x: marked(x, send)),
        jax.vmap(lambda x: marked(x, send), in_axes=1, out_axes=1),
        jax.jit(lambda x: jax.lax.map(lambda row: marked(row, send), x)),
        jax.checkpoint(lambda x: marked(x, send)),
    ):
        np.testing.assert_array_equal(f(x), want)


@pytest.mark.parametrize("send", SENT)
def test_the_derivative_is_that_of_the_mark(rng, send):
    x, v = rng.standard_normal((2, 3, 5)).astype(np.float32)
    value, tangent = jax.jvp(lambda x: marked(x, send), (x,), (v,))
    np.testing.assert_array_equal(value, marked(x, send))
    np.testing.assert_array_equal(tangent, v)
    (cotangent,) = jax.vjp(lambda x: marked(x, send), x)[1](v)
    np.testing.assert_array_equal(cotangent, v)
    second = jax.grad(lambda x: jax.grad(lambda x: (marked(x, send) ** 3).sum())(x).sum())(x)
    np.testing.assert_allclose(second, 6 * np.asarray(marked(x, send)), rtol=1e-6)


QUERIES, KEYS = 1100, 1300  # neither is a multiple of a block


def masks(rng):
    segments = [jnp.asarray(rng.integers(0, 3, (1, n)), jnp.int32) for n in (QUERIES, KEYS)]
    positions = [jnp.asarray(rng.integers(0, 900, (1, n)), jnp.int32) for n in (QUERIES, KEYS)]
    return {
        "causal, segments": ({"causal": True}, "segments", segments),
        "window": ({"window": (100, 30)}, "", ()),
        "positions": ({"causal": True, "window": (400, None)}, "positions", positions),
    }


@pytest.mark.parametrize("name", ["causal, segments", "window", "positions"])
def test_blocks_compute_the_whole(name, rng):
    assert QUERIES * KEYS > WHOLE
    details, kind, pair = masks(rng)[name]
    params = AttentionParams(0.7, **details, **({kind: True} if kind else {}))
    more = dict(zip((f"q_{kind}", f"k_{kind}"), pair))
    shapes = {"q": (1, QUERIES, 1, 2, 3), "k": (1, KEYS, 1, 3), "v": (1, KEYS, 1, 4), "dout": (1, QUERIES, 1, 2, 4)}
    q, k, v, dout = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes.values())
    want, back = jax.vjp(lambda q, k, v: Blocks(params, {"q": q, "k": k, "v": v, **more}).plain(), q, k, v)
    arrays = {"q": q, "k": k, "v": v, **more}
    out, lse = Blocks(params, arrays).forward()
    np.testing.assert_allclose(out, want, rtol=2e-4, atol=2e-5)
    gradient = Blocks(params, {**arrays, "lse": lse, "delta": jnp.sum(out * dout, -1), "dout": dout}).backward()
    for x, y in zip(gradient, back(dout), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5)


def test_queries_that_see_no_key():
    q, k = jnp.ones((1, 2, 1, 1, 3)), jnp.ones((1, 2, 1, 3))
    mask = jnp.asarray([[True, False], [False, False]])[None, None, None]
    out, lse = Blocks(AttentionParams(1.0, mask=True), {"q": q, "k": k, "v": k, "mask": mask}).forward()
    assert out[0, 1].max() == 0
    assert np.isneginf(lse[0, 1])
    none = jnp.zeros_like(out), jnp.full_like(lse, -jnp.inf)
    for pair in ((out, lse), none), (none, (out, lse)):
        for x, y in zip(merged(*pair), (out, lse), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-6)


def test_what_is_not_finite_reaches_the_queries_that_see_it():
    q, k = jnp.ones((1, 4, 1, 1, 3)), jnp.ones((1, 4, 1, 3))
    for bad in (jnp.inf, jnp.nan):
        out, _ = Blocks(AttentionParams(1.0), {"q": q, "k": k.at[0, 1].set(bad), "v": k}).forward()
        assert np.isnan(out).all()
