"""JAX's fused attention for TPU, interpreted, computes what JAX operators do: result, log-sum-exp and gradient."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pallas_tpu

from gshard.core.jax_adapter_kernels import tpu_attention, tpu_attention_gradient, tpu_refusal
from gshard.language.attention_primitive import Blocks, Mask


@pytest.mark.parametrize(("causal", "segmented"), [(True, False), pytest.param(False, True, marks=pytest.mark.slow)])
def test_kernels_compute_attention(causal: bool, segmented: bool, rng: np.random.Generator) -> None:
    shapes = {"q": (1, 128, 1, 2, 8), "k": (1, 256, 1, 8), "v": (1, 256, 1, 8), "dout": (1, 128, 1, 2, 8)}
    q, k, v, dout = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes.values())
    segments = None
    if segmented:  # some queries of segment 3 see no key
        segments = jnp.asarray(rng.integers(0, 4, (1, 128)), jnp.int32), jnp.asarray(rng.integers(0, 3, (1, 256)))
    mask = Mask(causal, q_segments=segments and segments[0], k_segments=segments and segments[1])
    out, lse = Blocks(0.3, mask).forward(q, k, v)
    delta = jnp.sum(out * dout, -1)
    gradient = Blocks(0.3, mask).backward(q, k, v, lse, delta, dout)
    with pallas_tpu.force_tpu_interpret_mode():
        made: list[Any] = list(tpu_attention(q, k, v, segments, causal, 0.3))
        made += tpu_attention_gradient(q, k, v, lse, delta, dout, segments, causal, 0.3)
    assert not segmented or np.isneginf(lse).any()
    for x, y in zip(made, (out, lse, *gradient), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5)


def test_shapes_that_the_kernels_refuse() -> None:
    def refusal(t: int, s: int, d: int, e: int, dtype: Any = "float32") -> str:
        shapes = (1, t, 2, 1, d), (1, s, 2, d), (1, s, 2, e)
        return tpu_refusal(*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes))

    assert refusal(128, 384, 64, 64) == refusal(256, 128, 256, 256, "bfloat16") == ""
    assert "features" in refusal(128, 128, 64, 32)
    assert "192 features" in refusal(128, 128, 192, 192)
    assert "multiples of 128" in refusal(1, 128, 64, 64)
    assert "float16" in refusal(128, 128, 64, 64, "float16")
