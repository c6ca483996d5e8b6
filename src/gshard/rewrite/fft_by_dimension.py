"""Replaces a Fourier transform of several dimensions by one of each, so that no device needs all of them at once.

A transform mixes all elements of the dimensions that it transforms: whole, they are gathered on every device, which
then transforms all of it. One dimension after the other, each is whole while another one is cut, and between them the
parts change places (an all-to-all). Those that are whole already come first.

    fft2 of [rows@x, columns]        columns here; all-to-all; rows, cut along columns

A single long dimension is two, ``n = a * b`` (Bailey's method: FFTs in external or hierarchical memory, 1990). Element
``i * b + j`` of the array goes into ``k + a * m`` of the result with the weight ``w**((i*b + j) * (k + a*m))``, where
``w`` is the ``n``-th root of one. As ``w**(a*b)`` is one, that is a transform of ``i`` to ``k``, a factor ``w**(j*k)``,
and a transform of ``j`` to ``m``.

Sums are added up in another order than by the transform of all dimensions: results differ as two libraries' do, by some
units in the last place of the largest of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gshard.core.program import Equation, Program, Value
from gshard.rewrite.driver import Split, where_split
from gshard.rewrite.equation_graph import Others, written

_LEAST = 4096  # elements of a single dimension that is taken apart


def _transforms(program: Program) -> list[Equation]:
    return [e for e in program.block.walk() if e.name == "fft"]


@where_split(_transforms)
def fft_by_dimension(e: Equation, split: Split) -> Iterator[Others]:
    """A transform of split dimensions becomes transforms of one dimension each."""
    cuts = ({d: n for d in range(len(v.shape)) if (n := split.parts(v, d)) > 1} for v in (*e.inputs, *e.outputs)
            if isinstance(v, Value))  # fmt: skip
    if (function := _one_by_one(e, [*cuts])) is not None:
        yield {e: written(split.writer, function, e.inputs, e.outputs, e)}


def _one_by_one(e: Equation, parts: Sequence[Mapping[int, int]]) -> Callable[[Any], Any] | None:
    """A transform as transforms of one dimension each; None if it stays.

    Args:
        e: a transform.
        parts: for its operand and its result, for each dimension that is split, in how many parts.
    """
    (x,), (y,) = e.inputs, e.outputs
    kind, lengths = jax.lax.FftType(int(e.params["fft_type"])), e.params["fft_lengths"]
    first = len(x.shape) - len(lengths)
    if not any(d >= first for cut in parts for d in cut) or 0 in x.shape or 0 in y.shape:
        return None
    if len(lengths) > 1:
        return lambda x: _each(x, kind, lengths, first, *parts)
    count, n = max(cut.get(first, 1) for cut in parts), lengths[0]
    others = [m for cut in parts if first in cut for d, m in enumerate(x.shape[:first]) if d not in cut]
    a = _two(n, count)
    if kind not in _COMPLEX or n < _LEAST or a is None or any(m % count == 0 for m in others):
        return None  # short, or a dimension beside it can be cut instead
    return lambda x: _long(x, kind, a, n // a)


_FFT, _IFFT, _RFFT, _IRFFT = (jax.lax.FftType[name] for name in ("FFT", "IFFT", "RFFT", "IRFFT"))
_COMPLEX = (_FFT, _IFFT)


def _each(
    x: Any, kind: Any, lengths: tuple[int, ...], first: int, before: Mapping[int, int], after: Mapping[int, int]
) -> Any:
    """The transforms of one dimension each: of real numbers the last dimension comes first, to real numbers last."""
    last = x.ndim - 1
    others = list(range(first, last if kind not in _COMPLEX else last + 1))
    others.sort(key=lambda d: (before.get(d, 1), -after.get(d, 1)))  # what is whole first, what will not be before it
    order = [last, *others] if kind == _RFFT else [*others, last] if kind == _IRFFT else others
    for d in order:
        of_one = kind if d == last else {_RFFT: _FFT, _IRFFT: _IFFT}.get(kind, kind)
        x = _along(x, of_one, lengths[d - first], d)
    return x


def _along(x: Any, kind: Any, n: int, d: int) -> Any:
    return jnp.moveaxis(lax.fft(jnp.moveaxis(x, d, -1), kind, (n,)), -1, d)


def _long(x: Any, kind: Any, a: int, b: int) -> Any:
    """A transform of the last dimension, of ``a * b`` elements."""
    x = _along(x.reshape(*x.shape[:-1], a, b), kind, a, x.ndim - 1)
    k, j = (lax.broadcasted_iota(jnp.int32, (a, b), d) for d in (0, 1))
    turn = k * j  # of n; as an angle it is most exact near 0
    turn = jnp.where(turn > a * b // 2, turn - a * b, turn)
    real = jnp.finfo(x.dtype).dtype
    angle = turn.astype(real) * (2 * math.pi / (a * b) * (-1 if kind == _FFT else 1))
    x = lax.fft(x * lax.complex(jnp.cos(angle), jnp.sin(angle)), kind, (b,))
    return jnp.swapaxes(x, -1, -2).reshape(*x.shape[:-2], a * b)


def _two(n: int, parts: int) -> int | None:
    """The size of the first of two dimensions that make ``n``, near each other, both in even parts; None if none do."""
    sizes = [a for a in range(parts, n // parts + 1, parts) if n % a == 0 and n // a % parts == 0]
    return min(sizes, key=lambda a: abs(math.log(a * a / n)), default=None)
