"""The primitives of ``gshard.attention``, and attention in JAX operators, block by block, without whole scores."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
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

NO_WINDOW = (None, None)


@dataclasses.dataclass(frozen=True)
class Mask:
    """What queries see."""

    causal: bool = False  # keys up to their own position
    window: tuple[int | None, int | None] = NO_WINDOW  # keys at most so many positions before and after their own
    # q_positions, k_positions: positions, ``int[*batch, T]`` and ``int[*batch, S]``; None for indices
    q_positions: Any = None
    k_positions: Any = None
    # q_segments, k_segments: segments of the same shapes; a query sees the keys of its own. None for one segment
    q_segments: Any = None
    k_segments: Any = None
    mask: Any = None  # ``bool[*batch, K, G, T, S]``; None for all

    @property
    def by_position(self) -> bool:
        """Whether positions decide what a query sees."""
        return self.causal or self.window != NO_WINDOW

    def seen(self, q_at: Any, k_at: Any, k_count: int) -> Any:
        """Which keys each query sees, for the queries and keys at some indices; ``k_count`` and above are padding."""
        flags = []
        if k_at.shape[0] and not _divides(k_at.shape[0], k_count):
            flags.append(k_at[None, :] < k_count)
        if self.by_position:
            q = _pick(self.q_positions, q_at, -1)[..., :, None] if self.q_positions is not None else q_at[:, None]
            k = _pick(self.k_positions, k_at, -1)[..., None, :] if self.k_positions is not None else k_at[None, :]
            before, after = self.window
            conditions = [k <= q] if self.causal else []
            conditions += [k >= q - before] if before is not None else []
            conditions += [k <= q + after] if after is not None else []
            of_positions = conditions[0]
            for condition in conditions[1:]:
                of_positions &= condition
            flags.append(_by_head(of_positions))
        if self.q_segments is not None:
            q, k = _pick(self.q_segments, q_at, -1), _pick(self.k_segments, k_at, -1)
            flags.append(_by_head(q[..., :, None] == k[..., None, :]))
        if self.mask is not None:
            flags.append(_pick(_pick(self.mask, q_at, -2), k_at, -1))
        seen = None
        for flag in flags:
            seen = flag if seen is None else seen & flag
        return seen

    def k_range(self, q_first: Any, q_last: Any, blocks: int, size: int) -> tuple[Any, Any]:
        """The first block of keys that queries at these indices may see, and the one behind the last."""
        low: Any = 0
        high: Any = blocks
        if self.q_positions is None:
            before, after = self.window
            if before is not None:
                low = jnp.clip((q_first - before) // size, 0, blocks)
            reach = 0 if self.causal else after
            if reach is not None:
                high = jnp.clip((q_last + reach) // size + 1, 0, blocks)
        return low, high

    def q_range(self, k_first: Any, k_last: Any, blocks: int, size: int) -> tuple[Any, Any]:
        """The first block of queries that may see keys at these indices, and the one behind the last."""
        low: Any = 0
        high: Any = blocks
        if self.q_positions is None:
            before, after = self.window
            reach = 0 if self.causal else after
            if reach is not None:
                low = jnp.clip((k_first - reach) // size, 0, blocks)
            if before is not None:
                high = jnp.clip((k_last + before) // size + 1, 0, blocks)
        return low, high


def _divides(block: int, count: int) -> bool:
    return block == count or count % block == 0


def _by_head(flags: Any) -> Any:
    """Flags [*batch, t, s], or [t, s], as [*batch, 1, 1, t, s]."""
    return flags if flags.ndim == 2 else jnp.expand_dims(flags, (-4, -3))


def _pick(x: Any, at: Any, axis: int) -> Any:
    """The elements of a block of indices; beyond the end, the last element again."""
    axis %= x.ndim
    if x.shape[axis] == at.shape[0]:
        return x
    return jnp.take(x, at, axis=axis, mode="clip")


def merged(one: tuple[Any, Any], other: tuple[Any, Any]) -> tuple[Any, Any]:
    """Two results of the same queries for different keys, as one: (result, log-sum-exp)."""
    (x, x_lse), (y, y_lse) = one, other
    most = jnp.maximum(x_lse, y_lse)
    most = jnp.where(most == -jnp.inf, 0, most)
    x_weight, y_weight = jnp.exp(x_lse - most), jnp.exp(y_lse - most)
    total = x_weight + y_weight
    weighted = x * x_weight[..., None] + y * y_weight[..., None]
    return weighted / jnp.where(total == 0, 1, total)[..., None], most + jnp.log(total)


def all_scores(q: Any, k: Any, v: Any, scale: float, mask: Mask, bias: Any = None) -> Any:
    """Attention with all scores at once, in operators that JAX differentiates."""
    count, keys, dtype = q.shape[-4], k.shape[-3], jnp.promote_types(q.dtype, jnp.float32)
    scores = jnp.einsum("...tkgd,...skd->...kgts", q, k, preferred_element_type=dtype) * scale
    if bias is not None:
        scores = scores + bias.astype(dtype)
    seen = mask.seen(jnp.arange(count), jnp.arange(keys), keys)
    if seen is not None:
        scores = jnp.where(seen, scores, -jnp.inf)
    most = lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf))
    weights = jnp.exp(scores - jnp.where(most == -jnp.inf, 0, most))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = (weights / jnp.where(total == 0, 1, total)).astype(v.dtype)
    return jnp.einsum("...kgts,...ske->...tkge", weights, v, preferred_element_type=dtype).astype(q.dtype)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Attention of arrays, block by block."""

    scale: float  # the factor of the scores
    mask: Mask  # what queries see

    def forward(self, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        """The result and the log-sum-exp, both in the dtype of the scores."""
        count, keys = q.shape[-4], k.shape[-3]
        if count * keys <= WHOLE or not q.size or not k.size:
            return self._of_keys(q, k, v, jnp.arange(count), jnp.arange(keys), keys)
        t, s = min(BLOCK, count), min(BLOCK, keys)
        k_blocks = -(-keys // s)

        def of_queries(first: Any) -> tuple[Any, Any]:
            q_at = first + jnp.arange(t)
            some = _pick(q, q_at, -4)

            def meet(j: Any, state: tuple[Any, Any]) -> tuple[Any, Any]:
                k_at = j * s + jnp.arange(s)
                return merged(state, self._of_keys(some, _pick(k, k_at, -3), _pick(v, k_at, -3), q_at, k_at, keys))

            low, high = self.mask.k_range(first, jnp.minimum(first + t, count) - 1, k_blocks, s)
            return lax.fori_loop(low, high, meet, self._nothing(some, v))

        out, lse = lax.map(of_queries, jnp.arange(-(-count // t)) * t)
        return _joined(out, -4, count), _joined(lse, -3, count)

    def _nothing(self, q: Any, v: Any) -> tuple[Any, Any]:
        dtype = jnp.promote_types(q.dtype, jnp.float32)
        return jnp.zeros((*q.shape[:-1], v.shape[-1]), dtype), jnp.full(q.shape[:-1], -jnp.inf, dtype)

    def _scores(self, q: Any, k: Any, q_at: Any, k_at: Any, keys: int) -> tuple[Any, Any]:
        """Scores [*batch, K, G, t, s], and which of them count (None: all)."""
        dtype = jnp.promote_types(q.dtype, jnp.float32)
        scores = jnp.einsum("...tkgd,...skd->...kgts", q, k, preferred_element_type=dtype) * self.scale
        return scores, self.mask.seen(q_at, k_at, keys)

    def _of_keys(self, q: Any, k: Any, v: Any, q_at: Any, k_at: Any, keys: int) -> tuple[Any, Any]:
        scores, seen = self._scores(q, k, q_at, k_at, keys)
        if seen is not None:
            scores = jnp.where(seen, scores, -jnp.inf)
        most = jnp.max(scores, axis=-1, initial=-jnp.inf)
        most = jnp.where(most == -jnp.inf, 0, most)
        weights = jnp.exp(scores - most[..., None])
        total = jnp.sum(weights, axis=-1)
        sums = jnp.einsum("...kgts,...ske->...kgte", weights.astype(v.dtype), v, preferred_element_type=scores.dtype)
        out = sums / jnp.where(total == 0, 1, total)[..., None]
        lse = most + jnp.log(total)
        return jnp.moveaxis(out, -2, -4), jnp.moveaxis(lse, -1, -3)

    def backward(self, q: Any, k: Any, v: Any, lse: Any, delta: Any, dout: Any) -> tuple[Any, Any, Any]:
        """The gradients of queries, keys and values, in the dtype of the scores."""
        count, keys = q.shape[-4], k.shape[-3]
        if count * keys <= WHOLE or not q.size or not k.size:
            return self._of_pairs(q, k, v, lse, delta, dout, jnp.arange(count), jnp.arange(keys), keys, count)
        t, s = min(BLOCK, count), min(BLOCK, keys)
        q_blocks, dtype = -(-count // t), jnp.promote_types(q.dtype, jnp.float32)

        def of_keys(dq: Any, first: Any) -> tuple[Any, tuple[Any, Any]]:
            k_at = first + jnp.arange(s)
            some_k, some_v = _pick(k, k_at, -3), _pick(v, k_at, -3)

            def meet(i: Any, state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
                dq, dk, dv = state
                q_at = i * t + jnp.arange(t)
                of_queries = [_pick(x, q_at, axis) for x, axis in ((q, -4), (lse, -3), (delta, -3), (dout, -4))]
                of_q, of_lse, of_delta, of_dout = of_queries
                more = self._of_pairs(of_q, some_k, some_v, of_lse, of_delta, of_dout, q_at, k_at, keys, count)
                axis = dq.ndim - 4
                old = lax.dynamic_slice_in_dim(dq, i * t, t, axis)
                return lax.dynamic_update_slice_in_dim(dq, old + more[0], i * t, axis), dk + more[1], dv + more[2]

            low, high = self.mask.q_range(first, jnp.minimum(first + s, keys) - 1, q_blocks, t)
            zeros = jnp.zeros(some_k.shape, dtype), jnp.zeros(some_v.shape, dtype)
            dq, dk, dv = lax.fori_loop(low, high, meet, (dq, *zeros))
            return dq, (dk, dv)

        padded = (*q.shape[:-4], q_blocks * t, *q.shape[-3:])
        dq, (dk, dv) = lax.scan(of_keys, jnp.zeros(padded, dtype), jnp.arange(-(-keys // s)) * s)
        return lax.slice_in_dim(dq, 0, count, axis=dq.ndim - 4), _joined(dk, -3, keys), _joined(dv, -3, keys)

    def _of_pairs(
        self, q: Any, k: Any, v: Any, lse: Any, delta: Any, dout: Any, q_at: Any, k_at: Any, keys: int, count: int
    ) -> tuple[Any, Any, Any]:
        scores, seen = self._scores(q, k, q_at, k_at, keys)
        by_head: Callable[[Any], Any] = lambda x: jnp.moveaxis(x, -3, -1)[..., None]  # noqa: E731
        weights = jnp.exp(scores - by_head(jnp.where(lse == -jnp.inf, 0, lse)))
        if not _divides(q_at.shape[0], count):
            inside = (q_at < count)[:, None]
            seen = inside if seen is None else seen & inside
        if seen is not None:
            weights = jnp.where(seen, weights, 0)
        products = jnp.einsum("...tkge,...ske->...kgts", dout, v, preferred_element_type=scores.dtype)
        dscores = weights * (products - by_head(delta)) * self.scale
        weights, dscores = weights.astype(dout.dtype), dscores.astype(k.dtype)
        dq = jnp.einsum("...kgts,...skd->...tkgd", dscores, k, preferred_element_type=scores.dtype)
        dk = jnp.einsum("...kgts,...tkgd->...skd", dscores, q, preferred_element_type=scores.dtype)
        dv = jnp.einsum("...kgts,...tkge->...ske", weights, dout, preferred_element_type=scores.dtype)
        return dq, dk, dv


def _joined(blocks: Any, axis: int, count: int) -> Any:
    """Blocks along a new first dimension, joined along ``axis`` and cut to ``count`` elements."""
    axis = axis % (blocks.ndim - 1)
    moved = jnp.moveaxis(blocks, 0, axis)
    whole = moved.reshape(*moved.shape[:axis], -1, *moved.shape[axis + 2 :])
    return lax.slice_in_dim(whole, 0, count, axis=axis)


POSITIONS, HEADS, GROUP, FEATURES = range(-4, 0)  # the last dimensions of queries; keys have no GROUP


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionParams:
    """What attention computes, apart from its arrays."""

    scale: float  # the factor of the scores
    causal: bool = False  # a query sees the keys up to its own position
    # the numbers of positions before and after its own that a query sees; None for no limit
    window: tuple[int | None, int | None] = (None, None)
    # whether arrays of positions follow the values, of queries and of keys. Otherwise the position of an element is its
    # index.
    positions: bool = False
    # whether arrays of segments follow, of queries and of keys. A query sees the keys of its own segment.
    segments: bool = False
    mask: bool = False  # whether a mask follows, ``bool[*batch, K, G, T, S]``; dimensions before ``T`` may be 1
    wide: bool = False  # whether the result has the dtype of the log-sum-exp, because it will be merged with others
    kernels: bool = True  # whether kernels of the platform may run

    @property
    def by_position(self) -> bool:
        """Whether positions decide what a query sees."""
        return self.mask_of({}).by_position

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

    def mask_of(self, arrays: dict[str, Any]) -> Mask:
        """What queries see, of arrays by their names."""
        pairs = (arrays.get(name) for name in ("q_positions", "k_positions", "q_segments", "k_segments", "mask"))
        return Mask(self.causal, self.window, *pairs)


def wide_dtype(dtype: Any) -> Any:
    """The dtype of scores and sums for arrays of a dtype."""
    return jnp.promote_types(dtype, jnp.float32)


attention_p = Primitive("gshard_attention")
attention_gradient_p = Primitive("gshard_attention_gradient")


def _forward(arrays: dict[str, Any], params: AttentionParams) -> list[Any]:
    q = arrays["q"]
    out, lse = Blocks(params.scale, params.mask_of(arrays)).forward(q, arrays["k"], arrays["v"])
    return [out if params.wide else out.astype(q.dtype), lse]


def _forward_on_tpu(arrays: dict[str, Any], params: AttentionParams) -> list[Any]:
    q = arrays["q"]
    segments = (arrays["q_segments"], arrays["k_segments"]) if params.segments else None
    out, lse = tpu_attention(q, arrays["k"], arrays["v"], segments, params.causal, params.scale)
    return [out.astype(lse.dtype) if params.wide else out, lse]


def _gradient(arrays: dict[str, Any], params: AttentionParams) -> list[Any]:
    blocks = Blocks(params.scale, params.mask_of(arrays))
    made = blocks.backward(*(arrays[name] for name in ("q", "k", "v", "lse", "delta", "dout")))
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


def _define(primitive: Primitive, names: str, blocks: _Implementation, on_tpu: _Implementation) -> None:
    """Registers an implementation in blocks and one for TPU."""
    primitive.multiple_results = True

    def by_name(operands: Sequence[Any], params: AttentionParams) -> dict[str, Any]:
        return dict(zip(getattr(params, names), operands, strict=True))

    def run(*operands: Any, params: AttentionParams) -> list[Any]:
        return blocks(by_name(operands, params), params)

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
