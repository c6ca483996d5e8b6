"""Defines marks and names as primitives: identities. Some round what devices send (``send=``)."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import jet
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from gshard.core.jax_adapter import without_axes_of_dim
from gshard.core.layout import Names
from gshard.core.mark import Mark

mark_p = Primitive("gshard_mark")
name_p = Primitive("gshard_name")  # tracing.trace converts it to a mark by a layout


def bind_mark(x: Any, mark: Mark) -> Any:
    """Puts a mark on one array."""
    return mark_p.bind(jax.numpy.asarray(x), mark=mark)


def bind_names(x: Any, names: Names) -> Any:
    """Names the dimensions of one array."""
    return name_p.bind(jax.numpy.asarray(x), mark=names)


def _define_identity(primitive: Primitive) -> None:
    """Defines an identity with a parameter ``mark``: on one device, in derivatives, also on cotangents, under vmap."""

    def impl(x: Any, *, mark: Mark | Names) -> Any:
        return x

    def typed(x: Any, *, mark: Mark | Names) -> Any:
        """A stack of layers has no sharding of its layers in its type, since JAX refuses loops over such stacks."""
        return without_axes_of_dim(x, 0) if isinstance(mark, Mark) and mark.schedule is not None else x

    def transposed(ct: Any, x: Any, *, mark: Mark | Names) -> list[Any]:
        if not isinstance(mark, Mark):
            return [primitive.bind(ct, mark=mark)]
        cotangent = primitive.bind(ct, mark=mark.transposed)
        if mark.schedule is None or without_axes_of_dim(x.aval, 0) is x.aval:
            return [cotangent]
        return [jax.sharding.reshard(cotangent, x.aval.sharding)]

    def batched(args: Sequence[Any], dims: Sequence[int], *, mark: Mark | Names) -> tuple[Any, int]:
        """The mark leaves the dimension that vmap adds open."""
        mark = dataclasses.replace(mark, batch_dims=(*mark.batch_dims, dims[0]))
        return primitive.bind(args[0], mark=mark), dims[0]

    primitive.def_impl(impl)
    primitive.def_abstract_eval(typed)
    mlir.register_lowering(primitive, lambda ctx, x, *, mark: [x])
    ad.deflinear2(primitive, transposed)
    batching.primitive_batchers[primitive] = batched
    jet.deflinear(primitive)


_define_identity(mark_p)
_define_identity(name_p)


# Rounds marked arrays to the precision in which devices send them (``send=`` of the marks).

SENT = ("bfloat16", "int8")
"""The names of the dtypes in which arrays can be sent."""

_STEPS = 127.0  # int8 holds -127 ... 127; -128 is not used, so that the steps are symmetric
# The largest scale is less than the largest number / 127, so that no finite element becomes infinite. The difference
# exceeds the roundings of the scale and of the product, which are 2**-24 each in float32.
_BELOW = 1 - 2.0**-20


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def rounded(x: Any, mark: Mark) -> Any:
    """Rounds an array to ``mark.send``, and puts the mark on the narrow array."""
    if mark.send == "bfloat16":
        kind = jnp.finfo(jnp.bfloat16)
        # XLA may drop two conversions that follow each other; it keeps reduce_precision.
        narrow = lax.reduce_precision(x, kind.nexp, kind.nmant).astype(jnp.bfloat16)
        return bind_mark(narrow, mark).astype(x.dtype)
    if not x.size:
        return bind_mark(x, mark)
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    number = wide.dtype.type
    largest = jnp.max(jnp.abs(wide), axis=tuple(range(x.ndim))[-1:], keepdims=True)
    limits = jnp.finfo(wide.dtype)
    scale = lax.clamp(limits.tiny, largest * number(1 / _STEPS), number(float(limits.max) * _BELOW / _STEPS))
    scale = jnp.where(largest < np.inf, scale, number(np.nan))  # NaN also where the largest is NaN
    steps = lax.round(wide * (1 / scale), lax.RoundingMethod.TO_NEAREST_EVEN)
    steps = lax.clamp(number(-_STEPS), steps, number(_STEPS))
    narrow = bind_mark(steps.astype(jnp.int8), mark)
    mark_of_scale = _mark_of_rows(mark, x.ndim)
    if mark_of_scale is not None:  # without it a split scale would split the result of replicate
        scale = bind_mark(scale, _in_full(mark_of_scale))
    return (narrow.astype(wide.dtype) * scale).astype(x.dtype)


def _mark_of_rows(mark: Mark, ndim: int) -> Mark | None:
    """The mark of an array with one element for each row along the last dimension; None if there is none."""
    if mark.ids is not None:
        return mark if mark.ids_shape[-1:] == (1,) else None
    return dataclasses.replace(mark, spec=mark.spec[: ndim - 1])


def _in_full(mark: Mark) -> Mark:
    return dataclasses.replace(mark, send="", wide="")


@rounded.defjvp
def _straight_through(mark: Mark, primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    return rounded(primals[0], mark), bind_mark(tangents[0], _in_full(mark))


def steps_of_rounding(mark: Mark) -> int:
    """The number of equations between an array and the narrow array that carries its mark, for their names."""
    if mark.send == "bfloat16":
        return 2  # reduce_precision, conversion
    return 4 + (mark.wide not in ("float32", "float64"))  # product, round, clamp, conversion; conversion to float32


def error_bound(dtype: Any, send: str) -> float:
    """The largest error of a rounded element: relative to the element (bfloat16) or to the row's largest (int8).

    >>> error_bound(jnp.float32, "bfloat16") == 2.0**-8
    True
    >>> round(1 / error_bound(jnp.float32, "int8"))
    254
    """
    if send == "bfloat16":
        return float(jnp.finfo(jnp.bfloat16).eps) / 2
    computed = float(jnp.finfo(jnp.promote_types(dtype, jnp.float32)).eps)
    again = 0.0 if jnp.finfo(dtype).bits >= 32 else float(jnp.finfo(dtype).eps) / 2
    # Half a step, what the largest scale is less, roundings of the scale, the quotient, the product, and the result.
    return 0.5 / _STEPS + (1 - _BELOW) + 4 * computed + again


def bound_text(dtype: Any, send: str) -> str:
    """The error bound in words.

    >>> bound_text(jnp.float32, "int8")
    '0.40 % of the largest absolute value of its row'
    """
    percent = math.ceil(error_bound(dtype, send) * 10000) / 100
    of = "its absolute value" if send == "bfloat16" else "the largest absolute value of its row"
    return f"{percent:.2f} % of {of}"
