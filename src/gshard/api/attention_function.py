"""attention: dot-product attention that is split by batch, by heads or by sequence."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from gshard.core.errors import ArgumentError, known_names
from gshard.core.jax_adapter import user_line
from gshard.core.jax_adapter_tracebacks import without_our_frames
from gshard.language.attention_primitive import (
    AttentionParams,
    Blocks,
    attention_gradient_p,
    attention_p,
    wide_dtype,
)

Implementation = Literal["auto", "blocks", "plain"]
IMPLEMENTATIONS = ("auto", "blocks", "plain")


@without_our_frames
def attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    query_positions: Any = None,
    key_positions: Any = None,
    query_segments: Any = None,
    key_segments: Any = None,
    implementation: Implementation = "auto",
) -> jax.Array:
    """Scaled dot-product attention, with the arguments of ``jax.nn.dot_product_attention``.

    ``softmax(scale * query @ key.T + bias) @ value`` for each head, over the keys that a query sees. Without ``bias``,
    it holds the scores of at most 2**20 pairs of a query and a key for each head at once. Inside ``gshard.jit``, gshard
    splits it by marks on the arrays: the batch and the heads without communication; the sequence by ring attention,
    where keys and values rotate among the devices, or by all-to-alls that split the heads instead, whichever is
    cheaper; keys of a cache by merging the devices' results.

    The product and the softmax are computed in float32 at least. A query that sees no key has the result 0. An infinity
    or NaN in a key or value reaches all queries that see it, and may reach others.

    Args:
        query: ``[..., T, N, H]``: batch dimensions, ``T`` queries, ``N`` heads, ``H`` features.
        key: ``[..., S, K, H]``: ``S`` keys. ``N`` is a multiple of ``K``; consecutive query heads share a key head.
        value: ``[..., S, K, E]``; ``E`` may differ from ``H``.
        bias: what to add to the scores, broadcast to ``[..., N, T, S]``. Implies ``implementation="plain"``.
        mask: booleans, broadcast to ``[..., N, T, S]``: which keys each query sees.
        scale: the factor of the scores, by default ``1 / sqrt(H)``.
        is_causal: whether a query sees the keys up to its own position only.
        query_seq_lengths, key_value_seq_lengths: integers ``[...]``: the number of queries and keys of each sequence
            that are not padding. Padding gets the result 0.
        local_window_size: the number of positions before and after its own that a query sees, as one number or two;
            None for no limit.
        query_positions, key_positions: integers ``[..., T]`` and ``[..., S]``, also without batch dimensions: the
            positions that ``is_causal`` and ``local_window_size`` compare, by default the indices. For packed or
            reordered sequences, and for queries that continue a cache.
        query_segments, key_segments: integers of the same shapes, larger than ``-2**31 + 2``. A query sees the keys of
            its own segment only.
        implementation: ``"auto"``: the fastest that accepts the arrays: JAX's Pallas kernels on TPU (features of keys
            and values equal, positions a multiple of 128; no mask, window or positions), otherwise ``"blocks"``.
            ``"blocks"``: JAX operators, block by block. ``"plain"``: JAX operators with all scores at once, which
            gshard partitions like other operators; it has derivatives of any order and in forward mode.

    Returns:
        ``[..., T, N, E]`` in the dtype of ``query``.

    Raises:
        ArgumentError: shapes or dtypes do not match, or the implementation is unknown.

    Source: Vaswani et al., "Attention is all you need", section 3.2; Dao et al., "FlashAttention"; Liu et al., "Ring
    attention with blockwise transformers"; Jacobs et al., "DeepSpeed-Ulysses".

    >>> import gshard
    >>> def f(q, k, v):
    ...     return attention(gshard.split(q, 1, "context"), k, v, is_causal=True)
    >>> q, k = jnp.ones((2, 64, 6, 8)), jnp.ones((2, 64, 1, 8))
    >>> explanation = gshard.explain(f, q, k, k, mesh=gshard.Mesh.abstract(context=4))
    >>> sorted(explanation.bytes_by_kind)
    ['collective_permute']
    """
    query, key, value = (_array(x, name) for x, name in ((query, "query"), (key, "key"), (value, "value")))
    _check(query, key, value, implementation)
    *batch, queries, heads, features = query.shape
    keys, key_heads = key.shape[-3:-1]
    group = heads // key_heads
    scale = float(scale) if scale is not None else features**-0.5
    segments = _Segments(tuple(batch), queries, keys)
    positions = {
        "q_positions": segments.of(query_positions, "query_positions", queries),
        "k_positions": segments.of(key_positions, "key_positions", keys),
    }
    by_position = is_causal or local_window_size is not None
    given = any(x is not None for x in positions.values())
    if given and not by_position:
        raise ArgumentError(
            "positions are given, and nothing compares them.", user_line(),
            hint="Give is_causal=True or local_window_size too.",
        )  # fmt: skip
    if given:
        lead = (1,) * len(batch)
        for name, count in (("q_positions", queries), ("k_positions", keys)):
            if positions[name] is None:
                positions[name] = jnp.arange(count, dtype=jnp.int32).reshape(*lead, count)
    q_segments, k_segments = segments.both(query_segments, key_segments, query_seq_lengths, key_value_seq_lengths)
    params = AttentionParams(
        scale, bool(is_causal), _window(local_window_size), given, q_segments is not None, mask is not None,
        kernels=implementation == "auto",
    )  # fmt: skip
    arrays = {
        "q": query.reshape(*batch, queries, key_heads, group, features), "k": key, "v": value, **positions,
        "q_segments": q_segments, "k_segments": k_segments,
        "mask": None if mask is None else _of_heads(mask, "mask", batch, key_heads, group, queries, keys),
    }  # fmt: skip
    with jax.named_scope("attention"):
        if implementation == "plain" or bias is not None:
            more = None if bias is None else _of_heads(bias, "bias", batch, key_heads, group, queries, keys)
            out = Blocks(params, arrays).plain(more)
        else:
            out = _attention(tuple(arrays[name] for name in params.names), params)
        return out.reshape(*batch, queries, heads, value.shape[-1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _attention(operands: tuple[Any, ...], params: AttentionParams) -> Any:
    out, _ = attention_p.bind(*operands, params=params)
    return out


def _forward(operands: tuple[Any, ...], params: AttentionParams) -> Any:
    out, lse = attention_p.bind(*operands, params=params)
    return out, (operands, out, lse)


def _backward(params: AttentionParams, saved: Any, cotangent: Any) -> Any:
    operands, out, lse = saved
    wide = wide_dtype(out.dtype)
    delta = jnp.sum(out.astype(wide) * cotangent.astype(wide), axis=-1)
    made = attention_gradient_p.bind(*operands, lse, delta, cotangent, params=params)
    return ((*made, *(None for _ in operands[3:])),)


_attention.defvjp(_forward, _backward)


def _array(x: Any, name: str) -> Any:
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ArgumentError(f"{name} has no floating-point dtype.", user_line(), f"{x.dtype}{list(x.shape)}")
    if x.ndim < 3:
        hint = "Attention takes [..., position, head, feature]."
        raise ArgumentError(f"{name} has fewer than three dimensions.", user_line(), f"{x.dtype}{list(x.shape)}", hint)
    return x


def _check(query: Any, key: Any, value: Any, implementation: str) -> None:
    given = ", ".join(
        f"{name} {x.dtype}{list(x.shape)}" for name, x in (("query", query), ("key", key), ("value", value))
    )

    def refuse(problem: str, hint: str | None = None) -> None:
        raise ArgumentError(problem, user_line(), given, hint)

    if implementation not in IMPLEMENTATIONS:
        hint = known_names(str(implementation), IMPLEMENTATIONS, "The implementations are")
        if implementation in ("cudnn", "xla"):
            hint = 'Wrap jax.nn.dot_product_attention by gshard.kernel to run that, or write implementation="auto".'
        raise ArgumentError(f"there is no implementation {implementation!r}.", user_line(), hint=hint)
    if not query.dtype == key.dtype == value.dtype:
        refuse("query, key and value have different dtypes.", "Cast them to one dtype.")
    if query.shape[:-3] != key.shape[:-3] or key.shape[:-1] != value.shape[:-1]:
        refuse("query, key and value have different batch dimensions, keys or key heads.")
    if query.shape[-1] != key.shape[-1]:
        refuse("query and key have different numbers of features.")
    if not key.shape[-2] or query.shape[-2] % key.shape[-2]:
        refuse(f"{query.shape[-2]} query heads cannot share {key.shape[-2]} key heads equally.")


def _window(size: Any) -> tuple[int | None, int | None]:
    before, after = size if isinstance(size, Sequence) else (size, size)
    for n in (before, after):
        if n is not None and (not isinstance(n, int) or n < 0):
            raise ArgumentError(
                f"local_window_size has {n!r}.", user_line(), hint="Give the numbers of positions before and after."
            )
    return before, after


def _of_heads(x: Any, name: str, batch: Sequence[int], heads: int, group: int, queries: int, keys: int) -> Any:
    """A mask or bias, broadcast to [..., N, T, S], as [..., K, G, T, S]; sizes of 1 before T stay."""
    x, whole = jnp.asarray(x), (*batch, heads * group, queries, keys)
    if not _fits(x, whole):
        raise ArgumentError(f"{name} does not broadcast to {list(whole)}.", user_line(), f"{x.dtype}{list(x.shape)}")
    if name == "mask" and x.dtype != jnp.bool_:
        raise ArgumentError("mask has no booleans.", user_line(), f"{x.dtype}{list(x.shape)}", "Pass scores as bias.")
    x = x.reshape(*(1,) * (len(whole) - x.ndim), *x.shape)
    *lead, n, t, s = x.shape
    x = jnp.broadcast_to(x, (*lead, n, queries, keys))
    return x.reshape(*lead, *((heads, group) if n > 1 or heads * group == 1 else (1, 1)), queries, keys)


def _fits(x: Any, whole: tuple[int, ...]) -> bool:
    """Whether an array broadcasts to a shape."""
    try:
        return jnp.broadcast_shapes(x.shape, whole) == whole
    except ValueError:
        return False


class _Segments:
    """Checks and completes positions and segments, and makes segments of lengths."""

    def __init__(self, batch: tuple[int, ...], queries: int, keys: int) -> None:
        self._batch, self._queries, self._keys = batch, queries, keys

    def of(self, x: Any, name: str, count: int) -> Any:
        """Signed integers [..., count] of 32 bits at least, with all dimensions; those of the batch may be 1."""
        if x is None:
            return None
        x, whole = jnp.asarray(x), (*self._batch, count)
        fits = _fits(x, whole) and x.ndim and x.shape[-1] == count
        if not fits or not jnp.issubdtype(x.dtype, jnp.integer):
            raise ArgumentError(f"{name} are not integers {list(whole)}.", user_line(), f"{x.dtype}{list(x.shape)}")
        x = x.astype(jax.dtypes.canonicalize_dtype(jnp.promote_types(x.dtype, jnp.int32)))
        return x.reshape(*(1,) * (len(whole) - x.ndim), *x.shape)

    def both(self, q_segments: Any, k_segments: Any, q_lengths: Any, k_lengths: Any) -> tuple[Any, Any]:
        """Segments of queries and keys; None if there are no limits. Padding has segments that nothing else has."""
        if (q_segments is None) != (k_segments is None):
            one, other = ("query", "key") if k_segments is None else ("key", "query")
            raise ArgumentError(f"{one}_segments are given without {other}_segments.", user_line())
        q = self.of(q_segments, "query_segments", self._queries)
        k = self.of(k_segments, "key_segments", self._keys)
        if q_lengths is None and k_lengths is None:
            return q, k
        lead = (1,) * len(self._batch)
        q = jnp.zeros((*lead, self._queries), jnp.int32) if q is None else q
        k = jnp.zeros((*lead, self._keys), jnp.int32) if k is None else k
        least = jnp.iinfo(jnp.int32).min  # is the segment of the padding of uneven parts
        q = self._within(q, q_lengths, "query_seq_lengths", least + 1)
        return q, self._within(k, k_lengths, "key_value_seq_lengths", least + 2)

    def _within(self, x: Any, lengths: Any, name: str, padding: int) -> Any:
        if lengths is None:
            return x
        lengths = jnp.asarray(lengths)
        if lengths.shape != self._batch or not jnp.issubdtype(lengths.dtype, jnp.integer):
            raise ArgumentError(
                f"{name} are not integers {list(self._batch)}.", user_line(), f"{lengths.dtype}{list(lengths.shape)}"
            )
        return jnp.where(jnp.arange(x.shape[-1]) < lengths[..., None], x, padding)
