"""Adapts gshard to JAX's fused attention for TPU (``jax.experimental.pallas.ops.tpu.flash_attention``).

Its public function returns the result only. Attention of a part of the keys also needs the log-sum-exp, and the
gradient needs that of all keys, so gshard calls the kernels themselves.

Arrays are as in ``language.attention_primitive``; the kernels have [batch, head, position, feature], with as many heads
of keys as of queries.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from typing import Any

import jax.numpy as jnp

_LANES = 128  # positions: blocks are multiples of it
_LARGEST = 512  # positions: the largest block whose arrays fit the vector memory beside each other


def _kernels() -> Any:
    """JAX's module, imported when a program for TPU is lowered: Pallas takes half a second to import."""
    return importlib.import_module("jax.experimental.pallas.ops.tpu.flash_attention")


def tpu_refusal(q: Any, k: Any, v: Any) -> str:
    """Why the kernels for TPU do not accept arrays of these shapes and dtypes; empty if they do."""
    features, out = q.shape[-1], v.shape[-1]
    if features != out:
        return f"{features} features of queries and {out} of values"
    if features > _LANES and features % _LANES:
        return f"{features} features"
    if any(n % _LANES or not n for n in (q.shape[-4], k.shape[-3])):
        return f"{q.shape[-4]} queries and {k.shape[-3]} keys: no multiples of {_LANES}"
    if any(x.dtype not in (jnp.bfloat16, jnp.float32) for x in (q, k, v)):
        return f"arrays of {q.dtype}, {k.dtype} and {v.dtype}"
    return ""


def tpu_attention(q: Any, k: Any, v: Any, segments: Any, causal: bool, scale: float) -> tuple[Any, Any]:
    """The result, in the dtype of the queries, and the log-sum-exp in float32."""
    q_block, k_block = _block(q.shape[-4]), _block(k.shape[-3])
    heads = _Heads(q.shape[:-4], *q.shape[-3:-1])
    kernels = _kernels()
    out, total, most = kernels._flash_attention_impl(
        heads.of_queries(q), heads.of_keys(k), heads.of_keys(v), None, heads.segment_ids(segments), True, causal, scale,
        1, q_block, k_block, k_block, False,
    )  # fmt: skip
    out, lse = heads.as_queries(out), heads.as_queries(most + jnp.log(total))
    if segments is not None:
        sees = lse > kernels.DEFAULT_MASK_VALUE / 2  # the score of a key that a query does not see is less
        out, lse = jnp.where(sees[..., None], out, 0), jnp.where(sees, lse, -jnp.inf)
    return out, lse


def tpu_attention_gradient(
    q: Any, k: Any, v: Any, lse: Any, delta: Any, dout: Any, segments: Any, causal: bool, scale: float
) -> tuple[Any, Any, Any]:
    """The gradients of queries, keys and values, in the dtypes of these."""
    q_block, k_block = _block(q.shape[-4]), _block(k.shape[-3])
    heads = _Heads(q.shape[:-4], *q.shape[-3:-1])
    kernels = _kernels()
    most = heads.of_queries(jnp.where(lse == -jnp.inf, 0, lse).astype(jnp.float32))
    operands = (
        heads.of_queries(q), heads.of_keys(k), heads.of_keys(v), None, heads.segment_ids(segments),
        jnp.ones_like(most), most, heads.of_queries(dout), heads.of_queries(delta.astype(jnp.float32)),
    )  # fmt: skip
    static: dict[str, Any] = {"sm_scale": scale, "causal": causal, "mask_value": kernels.DEFAULT_MASK_VALUE}
    dk, dv = kernels._flash_attention_bwd_dkv(
        *operands, block_q_major=q_block, block_q=q_block, block_k_major=k_block, block_k=k_block, **static
    )
    dq, _ = kernels._flash_attention_bwd_dq(
        *operands, block_q_major=q_block, block_k_major=k_block, block_k=k_block, debug=False, **static
    )
    return heads.as_queries(dq), heads.as_keys(dk), heads.as_keys(dv)


def _block(count: int) -> int:
    """The number of positions in a block: the largest power of two that divides the count."""
    return min(count & -count, _LARGEST)


@dataclasses.dataclass(frozen=True, slots=True)
class _Heads:
    """Moves arrays between the dimensions of gshard and those of the kernels."""

    batch: tuple[int, ...]  # the sizes of the batch dimensions
    keys: int  # the number of key heads
    group: int  # the number of query heads of each key head

    def of_queries(self, x: Any) -> Any:
        """[*batch, T, K, G, ...] as [batch, K * G, T, ...]."""
        first = len(self.batch)
        whole = x.reshape(math.prod(self.batch), x.shape[first], self.keys * self.group, *x.shape[first + 3 :])
        return jnp.swapaxes(whole, 1, 2)

    def as_queries(self, x: Any) -> Any:
        """The inverse of ``of_queries``."""
        x = jnp.swapaxes(x, 1, 2)
        return x.reshape(*self.batch, x.shape[1], self.keys, self.group, *x.shape[3:])

    def of_keys(self, x: Any) -> Any:
        """[*batch, S, K, D] as [batch, K * G, S, D]: a head for each query head."""
        whole = x.reshape(math.prod(self.batch), *x.shape[len(self.batch) :])
        return jnp.repeat(jnp.swapaxes(whole, 1, 2), self.group, axis=1)

    def as_keys(self, x: Any) -> Any:
        """The sums of [batch, K * G, S, D] over the query heads of each key head, as [*batch, S, K, D]."""
        grouped = x.reshape(x.shape[0], self.keys, self.group, *x.shape[2:])
        sums = jnp.sum(grouped, axis=2, dtype=jnp.float32).astype(x.dtype) if self.group > 1 else grouped[:, :, 0]
        return jnp.swapaxes(sums, 1, 2).reshape(*self.batch, x.shape[2], self.keys, x.shape[3])

    def segment_ids(self, segments: Any) -> Any:
        """Segments of queries and keys, [*batch or 1, position], as the kernels take them."""
        if segments is None:
            return None
        count = math.prod(self.batch)
        whole = (jnp.broadcast_to(x, (*self.batch, x.shape[-1])).reshape(count, -1) for x in segments)
        return _kernels().SegmentIds(*whole)
