"""Replaces a Fourier transform of several dimensions by one transform for each dimension.

A transform mixes all elements of its dimensions. A transform of several dimensions would gather the array on every
device, and each device would transform the whole array. With one dimension after the other, each dimension is whole
while another one is split, and an all-to-all exchanges the parts in between. Dimensions that are already whole come
first.

    fft2 of [rows@x, columns]        columns locally; all-to-all; rows, split along columns

A transform of a single dimension stays: gshard gathers the dimension, or splits another one.

The order of additions differs from the transform of all dimensions. Results differ by a few units in the last place of
the largest result, as between two libraries.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gshard.core.program import Equation, Value
from gshard.rewrite.driver import Split, where_split
from gshard.rewrite.equation_graph import Others, written


@where_split(lambda program: [e for e in program.block.walk() if e.name == "fft"])
def fft_by_dimension(e: Equation, split: Split) -> Iterator[Others]:
    """Replaces a transform of split dimensions by transforms of single dimensions."""
    kind, lengths = jax.lax.FftType(int(e.params["fft_type"])), e.params["fft_lengths"]
    first = len(e.inputs[0].shape) - len(lengths)
    parts = [
        {d: count for d in range(len(v.shape)) if (count := split.parts(v, d)) > 1}
        for v in (*e.inputs, *e.outputs)
        if isinstance(v, Value)
    ]
    if (
        len(lengths) == 1
        or not any(d >= first for cut in parts for d in cut)
        or 0 in (*e.inputs[0].shape, *e.outputs[0].shape)
    ):
        return
    yield {e: written(split.writer, lambda x: _each(x, kind, lengths, first, *parts), e.inputs, e.outputs, e)}


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
    for d in {_RFFT: [last, *others], _IRFFT: [*others, last]}.get(kind, others):
        kind_of_dim = kind if d == last else {_RFFT: _FFT, _IRFFT: _IFFT}.get(kind, kind)
        x = _along(x, kind_of_dim, lengths[d - first], d)
    return x


def _along(x: Any, kind: Any, n: int, d: int) -> Any:
    return jnp.moveaxis(lax.fft(jnp.moveaxis(x, d, -1), kind, (n,)), -1, d)
