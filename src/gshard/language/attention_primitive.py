"""The primitives of ``gshard.attention``: attention with the log-sum-exp of its scores, and its gradient.

Arrays have any leading batch dimensions, then positions, key heads, query heads of each key head, features:

    queries [*batch, T, K, G, D]     keys [*batch, S, K, D]     values [*batch, S, K, E]
    result  [*batch, T, K, G, E]     log-sum-exp [*batch, T, K, G], float32 at least

Parts of the keys can be attended to one after the other, and results merged by their log-sum-exps. So the two equations
on parts of the keys are equations of the same primitives (``comm.attention_ring``).

On each platform the fastest implementation runs that accepts the shapes: JAX's Pallas kernels on TPU, otherwise blocks
of JAX operators (``language.attention_blocks``).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from gshard.core.errors import ArgumentError
from gshard.core.jax_adapter import user_line
from gshard.core.jax_adapter_attention import tpu_attention, tpu_attention_gradient, tpu_refusal
from gshard.language.attention_blocks import Blocks, Mask

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
