"""The primitives of ``gshard.attention``, and attention in JAX operators, block by block, without whole scores."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from gshard.core.errors import ArgumentError
from gshard.core.jax_adapter import user_line
from gshard.core.jax_adapter_kernels import tpu_attention, tpu_attention_gradient, tpu_refusal

# Attention in JAX operators, block by block, so that it never holds all scores.

BLOCK = 512  # positions: of a larger block the scores of one head take more than 1 MiB in float32
WHOLE = 4 * BLOCK * BLOCK  # pairs of a query and a key up to which all scores are held at once

POSITIONS, HEADS, GROUP, FEATURES = range(-4, 0)  # the last dimensions of queries; keys have no GROUP


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionParams:
    """What attention computes, apart from its arrays."""

    scale: float  # the factor of the scores
    causal: bool = False  # a query sees the keys up to its own position
    # the numbers of positions before and after its own that a query sees; None for no limit
    window: tuple[int | None, int | None] = (None, None)
    # whether arrays of positions follow the values, of queries ``int[*batch, T]`` and of keys ``int[*batch, S]``.
    # Otherwise the position of an element is its index.
    positions: bool = False
    # whether arrays of segments of the same shapes follow. A query sees the keys of its own segment.
    segments: bool = False
    mask: bool = False  # whether a mask follows, ``bool[*batch, K, G, T, S]``; dimensions before ``T`` may be 1
    wide: bool = False  # whether the result has the dtype of the log-sum-exp, because it will be merged with others
    kernels: bool = True  # whether kernels of the platform may run

    @property
    def by_position(self) -> bool:
        """Whether positions decide what a query sees."""
        return self.causal or self.window != (None, None)

    @property
    def reach(self) -> tuple[int | None, int | None]:
        """The numbers of elements before and after its own that a query may see; None for no limit."""
        before, after = self.window
        return (None, None) if self.positions else (before, 0 if self.causal else after)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the operands of attention, in order."""
        return (
            "q", "k", "v",
            *(("q_positions", "k_positions") if self.positions else ()),
            *(("q_segments", "k_segments") if self.segments else ()),
            *(("mask",) if self.mask else ()),
        )  # fmt: skip

    @property
    def gradient_names(self) -> tuple[str, ...]:
        """The names of the operands of the gradient: also the log-sum-exp, ``sum(result * dresult)``, ``dresult``."""
        return (*self.names, "lse", "delta", "dout")


# The dimensions of queries and of keys in the operands, by name.
_OF_QUERIES = {"q": -4, "q_positions": -1, "q_segments": -1, "mask": -2, "lse": -3, "delta": -3, "dout": -4}
_OF_KEYS = {"k": -3, "v": -3, "k_positions": -1, "k_segments": -1, "mask": -1}


def _by_head(flags: Any) -> Any:
    """Flags [*batch, t, s], or [t, s], as [*batch, 1, 1, t, s]."""
    return flags if flags.ndim == 2 else jnp.expand_dims(flags, (-4, -3))


def merged(one: tuple[Any, Any], other: tuple[Any, Any]) -> tuple[Any, Any]:
    """Two results of the same queries for different keys, as one: (result, log-sum-exp)."""
    (x, x_lse), (y, y_lse) = one, other
    most = jnp.maximum(x_lse, y_lse)
    most = jnp.where(most == -jnp.inf, 0, most)
    x_weight, y_weight = jnp.exp(x_lse - most), jnp.exp(y_lse - most)
    total = x_weight + y_weight
    weighted = x * x_weight[..., None] + y * y_weight[..., None]
    return weighted / jnp.where(total == 0, 1, total)[..., None], most + jnp.log(total)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Attention of arrays, block by block."""

    params: AttentionParams
    arrays: Mapping[str, Any]  # the operands by name

    @property
    def _counts(self) -> tuple[int, int]:
        """The numbers of queries and keys."""
        return self.arrays["q"].shape[POSITIONS], self.arrays["k"].shape[-3]

    @property
    def _is_one(self) -> bool:
        """Whether all scores are held at once."""
        count, keys = self._counts
        return count * keys <= WHOLE or not self.arrays["q"].size or not self.arrays["k"].size

    def _block(self, axes: Mapping[str, int], at: Any) -> Blocks:
        """The arrays of the queries or keys at some indices; beyond the end, the last one again."""

        def part(x: Any, axis: int) -> Any:
            return x if x.shape[axis] == at.shape[0] else jnp.take(x, at, axis=axis % x.ndim, mode="clip")

        parts = {name: part(x, axes[name]) if name in axes else x for name, x in self.arrays.items()}
        return dataclasses.replace(self, arrays=parts)

    def _seen(self, q_at: Any, k_at: Any, counts: tuple[int, int]) -> Any:
        """Which of the keys at some indices each of the queries at some indices sees; None for all.

        Indices from ``counts`` on are padding.
        """
        x, flags = self.arrays, []
        for at, count in ((q_at[:, None], counts[0]), (k_at[None, :], counts[1])):
            if at.size and at.size != count and count % at.size:
                flags.append(at < count)
        if self.params.by_position:
            q = x["q_positions"][..., :, None] if self.params.positions else q_at[:, None]
            k = x["k_positions"][..., None, :] if self.params.positions else k_at[None, :]
            before, after = self.params.window
            conditions = [k <= q] if self.params.causal else []
            conditions += [k >= q - before] if before is not None else []
            conditions += [k <= q + after] if after is not None else []
            flags.append(_by_head(functools.reduce(operator.and_, conditions)))
        if self.params.segments:
            flags.append(_by_head(x["q_segments"][..., :, None] == x["k_segments"][..., None, :]))
        if self.params.mask:
            flags.append(x["mask"])
        return functools.reduce(operator.and_, flags) if flags else None

    def _scores(self, q_at: Any, k_at: Any, counts: tuple[int, int], bias: Any = None) -> Any:
        """Scores [*batch, K, G, t, s] of these queries and keys; -inf for keys that a query does not see."""
        q, k = self.arrays["q"], self.arrays["k"]
        dtype = wide_dtype(q.dtype)
        scores = jnp.einsum("...tkgd,...skd->...kgts", q, k, preferred_element_type=dtype) * self.params.scale
        if bias is not None:
            scores = scores + bias.astype(dtype)
        seen = self._seen(q_at, k_at, counts)
        return scores if seen is None else jnp.where(seen, scores, -jnp.inf)

    def plain(self, bias: Any = None) -> Any:
        """The result with all scores at once, in operators that JAX differentiates."""
        (count, keys), v, dtype = self._counts, self.arrays["v"], self.arrays["q"].dtype
        scores = self._scores(jnp.arange(count), jnp.arange(keys), self._counts, bias)
        most = lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf))
        weights = jnp.exp(scores - jnp.where(most == -jnp.inf, 0, most))
        total = jnp.sum(weights, axis=-1, keepdims=True)
        weights = (weights / jnp.where(total == 0, 1, total)).astype(v.dtype)
        return jnp.einsum("...kgts,...ske->...tkge", weights, v, preferred_element_type=scores.dtype).astype(dtype)

    def forward(self) -> tuple[Any, Any]:
        """The result and the log-sum-exp, both in the dtype of the scores."""
        counts = count, keys = self._counts
        if self._is_one:
            return self._of_keys(jnp.arange(count), jnp.arange(keys), counts)
        t, s = min(BLOCK, count), min(BLOCK, keys)

        def of_queries(first: Any) -> tuple[Any, Any]:
            q_at = first + jnp.arange(t)
            some = self._block(_OF_QUERIES, q_at)
            q, dtype = some.arrays["q"], wide_dtype(self.arrays["q"].dtype)

            def meet(j: Any, state: tuple[Any, Any]) -> tuple[Any, Any]:
                k_at = j * s + jnp.arange(s)
                return merged(state, some._block(_OF_KEYS, k_at)._of_keys(q_at, k_at, counts))

            low, high = _blocks_of(first, jnp.minimum(first + t, count) - 1, self.params.reach, -(-keys // s), s)
            out = jnp.zeros((*q.shape[:FEATURES], self.arrays["v"].shape[FEATURES]), dtype)
            return lax.fori_loop(low, high, meet, (out, jnp.full(q.shape[:FEATURES], -jnp.inf, dtype)))

        out, lse = lax.map(of_queries, jnp.arange(-(-count // t)) * t)
        return _joined(out, -4, count), _joined(lse, -3, count)

    def _of_keys(self, q_at: Any, k_at: Any, counts: tuple[int, int]) -> tuple[Any, Any]:
        """The result and the log-sum-exp of these queries for these keys."""
        scores, v = self._scores(q_at, k_at, counts), self.arrays["v"]
        most = jnp.max(scores, axis=-1, initial=-jnp.inf)
        most = jnp.where(most == -jnp.inf, 0, most)
        weights = jnp.exp(scores - most[..., None])
        total = jnp.sum(weights, axis=-1)
        sums = jnp.einsum("...kgts,...ske->...kgte", weights.astype(v.dtype), v, preferred_element_type=scores.dtype)
        out = sums / jnp.where(total == 0, 1, total)[..., None]
        lse = most + jnp.log(total)
        return jnp.moveaxis(out, -2, -4), jnp.moveaxis(lse, -1, -3)

    def backward(self) -> tuple[Any, Any, Any]:
        """The gradients of queries, keys and values, in the dtype of the scores."""
        counts = count, keys = self._counts
        if self._is_one:
            return self._of_pairs(jnp.arange(count), jnp.arange(keys), counts)
        t, s = min(BLOCK, count), min(BLOCK, keys)
        q, dtype = self.arrays["q"], wide_dtype(self.arrays["q"].dtype)
        q_blocks, axis = -(-count // t), q.ndim + POSITIONS

        def of_keys(dq: Any, first: Any) -> tuple[Any, tuple[Any, Any]]:
            k_at = first + jnp.arange(s)
            some = self._block(_OF_KEYS, k_at)

            def meet(i: Any, state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
                dq, dk, dv = state
                q_at = i * t + jnp.arange(t)
                more = some._block(_OF_QUERIES, q_at)._of_pairs(q_at, k_at, counts)
                old = lax.dynamic_slice_in_dim(dq, i * t, t, axis)
                return lax.dynamic_update_slice_in_dim(dq, old + more[0], i * t, axis), dk + more[1], dv + more[2]

            low, high = _blocks_of(first, jnp.minimum(first + s, keys) - 1, self.params.reach[::-1], q_blocks, t)
            zeros = (jnp.zeros(some.arrays[name].shape, dtype) for name in "kv")
            dq, dk, dv = lax.fori_loop(low, high, meet, (dq, *zeros))
            return dq, (dk, dv)

        padded = (*q.shape[:POSITIONS], q_blocks * t, *q.shape[HEADS:])
        dq, (dk, dv) = lax.scan(of_keys, jnp.zeros(padded, dtype), jnp.arange(-(-keys // s)) * s)
        return lax.slice_in_dim(dq, 0, count, axis=axis), _joined(dk, -3, keys), _joined(dv, -3, keys)

    def _of_pairs(self, q_at: Any, k_at: Any, counts: tuple[int, int]) -> tuple[Any, Any, Any]:
        """The gradients of the scores of these queries and keys."""
        q, k, v, lse, delta, dout = (self.arrays[name] for name in ("q", "k", "v", "lse", "delta", "dout"))

        def by_head(x: Any) -> Any:
            return jnp.moveaxis(x, -3, -1)[..., None]

        scores = self._scores(q_at, k_at, counts)
        weights = jnp.exp(scores - by_head(jnp.where(lse == -jnp.inf, 0, lse)))
        products = jnp.einsum("...tkge,...ske->...kgts", dout, v, preferred_element_type=scores.dtype)
        dscores = weights * (products - by_head(delta)) * self.params.scale
        weights, dscores = weights.astype(dout.dtype), dscores.astype(k.dtype)
        dq = jnp.einsum("...kgts,...skd->...tkgd", dscores, k, preferred_element_type=scores.dtype)
        dk = jnp.einsum("...kgts,...tkgd->...skd", dscores, q, preferred_element_type=scores.dtype)
        dv = jnp.einsum("...kgts,...tkge->...ske", weights, dout, preferred_element_type=scores.dtype)
        return dq, dk, dv


def _blocks_of(first: Any, last: Any, reach: tuple[int | None, int | None], blocks: int, size: int) -> tuple[Any, Any]:
    """The first block that elements at these indices reach, and the one behind the last."""
    before, after = reach
    low = 0 if before is None else jnp.clip((first - before) // size, 0, blocks)
    high = blocks if after is None else jnp.clip((last + after) // size + 1, 0, blocks)
    return low, high


def _joined(blocks: Any, axis: int, count: int) -> Any:
    """Blocks along a new first dimension, joined along ``axis`` and cut to ``count`` elements."""
    axis = axis % (blocks.ndim - 1)
    moved = jnp.moveaxis(blocks, 0, axis)
    whole = moved.reshape(*moved.shape[:axis], -1, *moved.shape[axis + 2 :])
    return lax.slice_in_dim(whole, 0, count, axis=axis)


def wide_dtype(dtype: Any) -> Any:
    """The dtype of scores and sums for arrays of a dtype."""
    return jnp.promote_types(dtype, jnp.float32)


attention_p = Primitive("gshard_attention")
attention_gradient_p = Primitive("gshard_attention_gradient")


def _forward(arrays: dict[str, Any], params: AttentionParams) -> list[Any]:
    out, lse = Blocks(params, arrays).forward()
    return [out if params.wide else out.astype(arrays["q"].dtype), lse]


def _forward_on_tpu(arrays: dict[str, Any], params: AttentionParams) -> list[Any]:
    q = arrays["q"]
    segments = (arrays["q_segments"], arrays["k_segments"]) if params.segments else None
    out, lse = tpu_attention(q, arrays["k"], arrays["v"], segments, params.causal, params.scale)
    return [out.astype(lse.dtype) if params.wide else out, lse]


def _gradient(arrays: dict[str, Any], params: AttentionParams) -> list[Any]:
    made = Blocks(params, arrays).backward()
    return [x if params.wide else x.astype(arrays[name].dtype) for name, x in zip("qkv", made, strict=True)]


def _gradient_on_tpu(arrays: dict[str, Any], params: AttentionParams) -> list[Any]:
    segments = (arrays["q_segments"], arrays["k_segments"]) if params.segments else None
    q, k, v, lse, delta, dout = (arrays[name] for name in ("q", "k", "v", "lse", "delta", "dout"))
    made = tpu_attention_gradient(q, k, v, lse, delta, dout, segments, params.causal, params.scale)
    return [x.astype(wide_dtype(x.dtype)) if params.wide else x for x in made]


def _accepted_on_tpu(arrays: dict[str, Any], params: AttentionParams) -> bool:
    """Whether the kernels for TPU compute attention of these arrays.

    They read indices as positions, and take segments, but no mask and no window.
    """
    if not params.kernels or params.positions or params.mask or params.window != (None, None):
        return False
    return not tpu_refusal(arrays["q"], arrays["k"], arrays["v"])


_Implementation = Callable[[dict[str, Any], AttentionParams], list[Any]]


# For each primitive its implementation in JAX operators, ``run(*operands, params=...) -> results``.
IN_BLOCKS: dict[str, Callable[..., list[Any]]] = {}


def _define(primitive: Primitive, names: str, blocks: _Implementation, on_tpu: _Implementation) -> None:
    """Registers an implementation in blocks and one for TPU."""
    primitive.multiple_results = True

    def by_name(operands: Sequence[Any], params: AttentionParams) -> dict[str, Any]:
        return dict(zip(getattr(params, names), operands, strict=True))

    def run(*operands: Any, params: AttentionParams) -> list[Any]:
        return blocks(by_name(operands, params), params)

    IN_BLOCKS[primitive.name] = run
    jitted = jax.jit(lambda *operands, params: primitive.bind(*operands, params=params), static_argnames="params")

    @primitive.def_impl
    def called(*operands: Any, params: AttentionParams) -> Any:
        return jitted(*operands, params=params)

    @primitive.def_abstract_eval
    def abstract(*operands: Any, params: AttentionParams) -> list[Any]:
        return [jax.core.ShapedArray(*x) for x in _result_types(primitive, by_name(operands, params), params)]

    def lowered(ctx: Any, *operands: Any, params: AttentionParams) -> Any:
        function = blocks
        if set(ctx.module_context.platforms) == {"tpu"} and _accepted_on_tpu(by_name(ctx.avals_in, params), params):
            function = on_tpu
        return mlir.lower_fun(lambda *arrays: function(by_name(arrays, params), params), multiple_results=True)(
            ctx, *operands
        )

    mlir.register_lowering(primitive, lowered)
    batching.primitive_batchers[primitive] = functools.partial(_mapped_over, primitive, names)
    ad.primitive_jvps[primitive] = _no_derivative


def _result_types(primitive: Primitive, arrays: dict[str, Any], params: AttentionParams) -> Iterator[tuple[Any, Any]]:
    q, v = arrays["q"], arrays["v"]
    wide = wide_dtype(q.dtype)
    if primitive is attention_p:
        yield (*q.shape[:FEATURES], v.shape[FEATURES]), wide if params.wide else q.dtype
        yield q.shape[:FEATURES], wide
    else:
        for name in "qkv":
            yield arrays[name].shape, wide if params.wide else arrays[name].dtype


def _mapped_over(
    primitive: Primitive, names: str, operands: Sequence[Any], dims: Sequence[int | None], *, params: AttentionParams
) -> Any:
    """A dimension that ``jax.vmap`` adds is one more batch dimension. Positions, segments and masks may repeat."""
    (size,) = {x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None}
    arrays = []
    for name, x, d in zip(getattr(params, names), operands, dims, strict=True):
        if d is not None:
            arrays.append(jnp.moveaxis(x, d, 0))
        else:
            repeats = 1 if name in ("q_positions", "k_positions", "q_segments", "k_segments", "mask") else size
            arrays.append(jnp.broadcast_to(x, (repeats, *x.shape)))
    results = primitive.bind(*arrays, params=params)
    return results, [0] * len(results)


def _no_derivative(primals: Any, tangents: Any, **params: Any) -> Any:
    raise ArgumentError(
        "gshard.attention has a gradient, but no forward-mode or second derivative.",
        user_line(),
        hint='Use gshard.attention(..., implementation="plain"), which consists of JAX operators.',
    )


_define(attention_p, "names", _forward, _forward_on_tpu)
_define(attention_gradient_p, "gradient_names", _gradient, _gradient_on_tpu)
