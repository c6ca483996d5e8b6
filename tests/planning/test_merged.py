"""Batch and length joined, and masks: what is planned where a dimension that is split becomes a part of another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import gshard


def flattened(x: Any, w: Any, v: Any) -> Any:
    return (x.reshape(64, 64) @ w) @ v


def experts(x: Any, up: Any, down: Any, gate: Any) -> Any:
    t = x.reshape(64, 64)
    p = jax.nn.softmax(t @ gate)
    h = jax.nn.relu(jnp.einsum("tm,emh->eth", t, up))
    return jnp.einsum("eth,ehm,te->tm", h, down, p).reshape(4, 16, 64)


def patches(x: Any, w: Any, v: Any) -> Any:
    h = x.reshape(4, 32, 64)
    for _ in range(3):
        centred = h - h.mean(-1, keepdims=True)
        h = h + jax.nn.gelu(centred * lax.rsqrt(h.var(-1, keepdims=True) + 1e-5) @ w) @ v
    return h


def attention(x: Any, ok: Any, wq: Any, wk: Any, wv: Any) -> Any:
    q, k, v = (x @ wq).reshape(4, 16, 4, 16), x @ wk, x @ wv
    s = jnp.where(ok[:, None, None, :], jnp.einsum("bshd,btd->bhst", q, k), -1e9)
    return x + jnp.einsum("bhst,btd->bshd", jax.nn.softmax(s), v).reshape(4, 16, 64)


LENGTH, ROWS = P(None, "x"), P(None, None, "x")
CASES: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...], tuple[P | None, ...], int]] = {
    # what one all-to-all of an eighth of x sends, or gathers of keys, values and mask
    "flattened": (flattened, ((4, 16, 64), (64, 128), (128, 64)), (LENGTH, None, None), 4 * 16 * 64 * 4 // 8),
    "experts": (
        experts, ((4, 16, 64), (4, 64, 128), (4, 128, 64), (64, 4)), (LENGTH, None, None, None), 4 * 16 * 64 * 4 // 8
    ),
    "patches": (patches, ((4, 4, 8, 64), (64, 256), (256, 64)), (ROWS, None, None), 4 * 32 * 64 * 4 // 8),
    "attention": (
        attention, ((4, 16, 64), (4, 16), (64, 64), (64, 16), (64, 16)), (LENGTH, LENGTH, None, None, None),
        2 * 4 * 16 * 16 * 4 + 64,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.one_in(2)
def test_no_more_is_sent_than_by_hand(name: str) -> None:
    """Rows of the joined dimension go where they belong once; no product is computed by all devices."""
    f, shapes, specs, most = CASES[name]
    rng = np.random.default_rng(0)
    arguments = [(rng.standard_normal(s) / 8).astype(np.float32) for s in shapes]
    if name == "attention":
        arguments[1] = arguments[1] > -0.1
    run = gshard.jit(f, mesh={"x": 8}, in_shardings=specs)
    assert sum(gshard.explain(run, *arguments).bytes_by_kind.values()) <= most
    np.testing.assert_allclose(run(*arguments), jax.jit(f)(*arguments), rtol=1e-4, atol=1e-4)
    plan = run.lower(*arguments).plan
    for e in plan.program.block.equations:
        if e.name == "dot_general":
            assert any(plan.splits[e].values())


def test_a_mask_that_is_all_there_is_is_followed() -> None:
    def f(scores: Any, ok: Any) -> Any:
        return jnp.where(gshard.split(ok, 1, 8)[:, None, :], scores, 0.0)

    plan = gshard.jit(f, mesh=8).lower(np.ones((2, 3, 16), np.float32), np.ones((2, 16), bool)).plan
    assert plan.format(plan.program.block.outputs[0]) == "f32[2,3,16@devices]"
