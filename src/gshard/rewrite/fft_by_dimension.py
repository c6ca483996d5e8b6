"""Replaces a Fourier transform of several dimensions by one transform for each dimension.

A transform mixes all elements of its dimensions. A transform of several dimensions would gather the array on every
device, and each device would transform the whole array. With one dimension after the other, each dimension is whole
while another one is split, and an all-to-all exchanges the parts in between. Dimensions that are already whole come
first.

    fft2 of [rows@x, columns]        columns locally; all-to-all; rows, split along columns

A long single dimension is treated as two, ``n = a * b`` (D. H. Bailey, FFTs in External or Hierarchical Memory, 1990).
Element ``i * b + j`` of the array contributes to element ``k + a * m`` of the result with the weight
``w**((i*b + j) * (k + a*m))``, where ``w`` is the ``n``-th root of unity. Since ``w**(a*b)`` is one, this is a
transform from ``i`` to ``k``, a factor ``w**(j*k)``, and a transform from ``j`` to ``m``.

The order of additions differs from the transform of all dimensions. Results differ by a few units in the last place of
the largest result, as between two libraries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gshard.core.program import Equation, Value
from gshard.rewrite.driver import Split, where_split
from gshard.rewrite.equation_graph import Others, written

_LEAST = 4096  # smallest size of a single dimension that is treated as two


@where_split(lambda program: [e for e in program.block.walk() if e.name == "fft"])
def fft_by_dimension(e: Equation, split: Split) -> Iterator[Others]:
    """Replaces a transform of split dimensions by transforms of single dimensions."""
    parts = [
        {d: count for d in range(len(v.shape)) if (count := split.parts(v, d)) > 1}
        for v in (*e.inputs, *e.outputs)
        if isinstance(v, Value)
    ]
    function = _one_by_one(e, parts)
    if function is not None:
        yield {e: written(split.writer, function, e.inputs, e.outputs, e)}


def _one_by_one(e: Equation, parts: Sequence[Mapping[int, int]]) -> Callable[[Any], Any] | None:
    """A function that transforms one dimension after the other; None if the transform stays."""
    (x,), (y,) = e.inputs, e.outputs
    kind, lengths = jax.lax.FftType(int(e.params["fft_type"])), e.params["fft_lengths"]
    first = len(x.shape) - len(lengths)
    if not any(d >= first for cut in parts for d in cut) or 0 in x.shape or 0 in y.shape:
        return None
    if len(lengths) > 1:
        return lambda x: _each(x, kind, lengths, first, *parts)
    count, n = max(cut.get(first, 1) for cut in parts), lengths[0]
    others = [m for cut in parts if first in cut for d, m in enumerate(x.shape[:first]) if d not in cut]
    # The factor of n next to its root that is divisible, as n / a is, by the number of parts.
    sizes = [a for a in range(count, n // count + 1, count) if n % a == 0 and n // a % count == 0]
    a = min(sizes, key=lambda a: abs(math.log(a * a / n)), default=None)
    if kind not in _COMPLEX or n < _LEAST or a is None or any(m % count == 0 for m in others):
        return None  # the dimension is short, or another dimension can be split instead
    return lambda x: _long(x, kind, a, n // a)


_FFT, _IFFT, _RFFT, _IRFFT = (jax.lax.FftType[name] for name in ("FFT", "IFFT", "RFFT", "IRFFT"))
_COMPLEX = (_FFT, _IFFT)


def _each(
    x: Any, kind: Any, lengths: tuple[int, ...], first: int, before: Mapping[int, int], after: Mapping[int, int]
) -> Any:
    """Transforms one dimension after the other.

    The last dimension is first in a transform of real numbers, and last in a transform to real numbers. Otherwise
    dimensions that are whole before the transform come first; among them, dimensions that are split afterwards.
    """
    last = x.ndim - 1
    others = list(range(first, last if kind not in _COMPLEX else last + 1))
    others.sort(key=lambda d: (before.get(d, 1), -after.get(d, 1)))
    if kind == _RFFT:
        order = [last, *others]
    elif kind == _IRFFT:
        order = [*others, last]
    else:
        order = others
    for d in order:
        kind_of_dim = kind if d == last else {_RFFT: _FFT, _IRFFT: _IFFT}.get(kind, kind)
        x = _along(x, kind_of_dim, lengths[d - first], d)
    return x


def _along(x: Any, kind: Any, n: int, d: int) -> Any:
    return jnp.moveaxis(lax.fft(jnp.moveaxis(x, d, -1), kind, (n,)), -1, d)


def _long(x: Any, kind: Any, a: int, b: int) -> Any:
    """Transforms the last dimension, of ``a * b`` elements, by Bailey's method."""
    x = _along(x.reshape(*x.shape[:-1], a, b), kind, a, x.ndim - 1)
    k, j = (lax.broadcasted_iota(jnp.int32, (a, b), d) for d in (0, 1))
    turn = k * j  # in units of 1 / n turn; the angle is most exact near 0
    turn = jnp.where(turn > a * b // 2, turn - a * b, turn)
    real = jnp.finfo(x.dtype).dtype
    angle = turn.astype(real) * (2 * math.pi / (a * b) * (-1 if kind == _FFT else 1))
    x = lax.fft(x * lax.complex(jnp.cos(angle), jnp.sin(angle)), kind, (b,))
    return jnp.swapaxes(x, -1, -2).reshape(*x.shape[:-2], a * b)
