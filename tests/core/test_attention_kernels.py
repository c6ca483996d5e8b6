"""JAX's fused attention for TPU, interpreted, computes what JAX operators do: result, log-sum-exp and gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pallas_tpu

from gshard.core.jax_adapter_kernels import tpu_attention, tpu_attention_gradient, tpu_refusal
from gshard.language.attention_primitive import AttentionParams, Blocks


@pytest.mark.parametrize(("causal", "segmented"), [(True, False), pytest.param(False, True, marks=pytest.mark.slow)])
def test_kernels_compute_attention(causal, segmented, rng):
    shapes = {"q": (1, 128, 1, 2, 8), "k": (1, 256, 1, 8), "v": (1, 256, 1, 8), "dout": (1, 128, 1, 2, 8)}
    q, k, v, dout = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes.values())
    segments = None
    if segmented:  # some queries of segment 3 see no key
        segments = jnp.asarray(rng.integers(0, 4, (1, 128)), jnp.int32), jnp.asarray(rng.integers(0, 3, (1, 256)))
    arrays = {"q": q, "k": k, "v": v, **dict(zip(("q_segments", "k_segments"), segments or ()))}
    params = AttentionParams(0.3, causal, segments=segmented)
    out, lse = Blocks(params, arrays).forward()
    delta = jnp.sum(out * dout, -1)
    gradient = Blocks(params, {**arrays, "lse": lse, "delta": delta, "dout": dout}).backward()
    with pallas_tpu.force_tpu_interpret_mode():
        made = list(tpu_attention(q, k, v, segments, causal, 0.3))
        made += tpu_attention_gradient(q, k, v, lse, delta, dout, segments, causal, 0.3)
    assert not segmented or np.isneginf(lse).any()
    for x, y in zip(made, (out, lse, *gradient), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5)


def test_shapes_that_the_kernels_refuse():
    def refusal(t, s, d, e, dtype="float32"):
        shapes = (1, t, 2, 1, d), (1, s, 2, d), (1, s, 2, e)
        return tpu_refusal(*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes))

    assert refusal(128, 384, 64, 64) == refusal(256, 128, 256, 256, "bfloat16") == ""
    assert "features" in refusal(128, 128, 64, 32)
    assert "192 features" in refusal(128, 128, 192, 192)
    assert "multiples of 128" in refusal(1, 128, 64, 64)
    assert "float16" in refusal(128, 128, 64, 64, "float16")
