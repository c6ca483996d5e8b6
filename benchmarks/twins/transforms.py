"""Fourier transforms of one dimension after the other, and what moves from one dimension to another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec as P

from twins.program import GRID, PARTS, Program, normal


def fft(x: Any, axis: int, *, inverse: bool = False) -> Any:
    """On CPU row by row in memory, where XLA would have it otherwise and then fail."""
    f = jnp.fft.ifft if inverse else jnp.fft.fft

    def in_rows(x: Any) -> Any:
        rows = Layout(tuple(range(x.ndim)))
        return with_layout_constraint(f(with_layout_constraint(x, rows)), rows)

    return jnp.moveaxis(lax.platform_dependent(jnp.moveaxis(x, axis, -1), cpu=in_rows, default=f), -1, axis)


def transforms() -> Iterator[Program]:
    def change(x: Any) -> Any:
        return lax.all_to_all(x, "x", split_axis=1, concat_axis=0, tiled=True)

    def back(x: Any) -> Any:
        return lax.all_to_all(x, "x", split_axis=0, concat_axis=1, tiled=True)

    image = ((normal(512, 512) + 1j * normal(512, 512)).astype(np.complex64),)

    def columns(x: Any) -> Any:
        return fft(change(fft(x, 1)), 0)

    yield Program("spectrum of an image", jnp.fft.fft2, columns, image, (P("x", None),), P(None, "x"), 1e-5)

    def smooth(x: Any, w: Any) -> Any:
        return jnp.fft.ifft2(jnp.fft.fft2(x) * w)

    def smooth_by_hand(x: Any, w: Any) -> Any:
        return fft(back(fft(columns(x) * w, 0, inverse=True)), 1, inverse=True)

    both = (*image, np.abs(normal(512, 512)))
    yield Program("filter", smooth, smooth_by_hand, both, (P("x", None), P(None, "x")), P("x", None), 1e-5)

    n = 256

    def long(x: Any) -> Any:
        """Of ``n * n`` elements: rows, a twist, columns, each where it is whole."""
        x = fft(change(x.reshape(n // PARTS, n)), 0)
        k, j = jnp.arange(n)[:, None], lax.axis_index("x") * (n // PARTS) + jnp.arange(n // PARTS)[None]
        x = back(x * jnp.exp(-2j * np.pi * (k * j % (n * n)) / (n * n)).astype(x.dtype))
        return lax.all_to_all(fft(x, 1).T, "x", split_axis=0, concat_axis=1, tiled=True).reshape(-1)

    signal = ((normal(n * n) + 1j * normal(n * n)).astype(np.complex64),)
    yield Program("long transform", jnp.fft.fft, long, signal, (P("x"),), P("x"), 1e-5)


def reshards() -> Iterator[Program]:
    """Tiles that go from one cut to another."""

    def tiles(x: Any) -> Any:
        """Rows over x, columns over y become rows over y, columns over x: two halves of a part, each sent once."""
        columns = x.shape[1] // 2
        i = lax.axis_index("x")
        found = jnp.zeros((2 * x.shape[0], columns), x.dtype)
        for k in range(2):
            half = lax.dynamic_slice_in_dim(x, (i + k) % 2 * columns, columns, 1)
            pairs = [(2 * a + b, 2 * (2 * b + (a + k) % 2) + a // 2) for a in range(4) for b in range(2)]
            half = lax.ppermute(half, ("x", "y"), pairs)
            found = lax.dynamic_update_slice_in_dim(found, half, (i - k) % 2 * x.shape[0], 0)
        return found

    square, before, after = (normal(1024, 1024),), P("x", "y"), P("y", "x")

    def moved(x: Any) -> Any:
        return x * 2

    def moved_by_hand(x: Any) -> Any:
        return tiles(x) * 2

    yield Program("two dimensions change places", moved, moved_by_hand, square, (before,), after, 0.0, GRID)

    def turned(x: Any) -> Any:
        return x.T + 1

    def turned_by_hand(x: Any) -> Any:
        return tiles(x).T + 1

    yield Program("a transposition that stays", turned, turned_by_hand, square, (before,), before, 0.0, GRID)

    cube = (normal(128, 128, 64),)

    def rotated_by_hand(x: Any) -> Any:
        x = lax.all_to_all(x, "y", split_axis=1, concat_axis=2, tiled=True)
        return lax.all_to_all(x, "x", split_axis=2, concat_axis=0, tiled=True) * 2

    yield Program(
        "three dimensions change places",
        moved,
        rotated_by_hand,
        cube,
        (P("x", None, "y"),),
        P(None, "y", "x"),
        0.0,
        GRID,
    )

    def spectrum_by_hand(x: Any) -> Any:
        x = lax.all_to_all(fft(x, 2), "y", split_axis=2, concat_axis=1, tiled=True)
        x = lax.all_to_all(fft(x, 1), "x", split_axis=1, concat_axis=0, tiled=True)
        return fft(x, 0)

    volume = ((normal(64, 64, 64) + 1j * normal(64, 64, 64)).astype(np.complex64),)
    yield Program(
        "spectrum of a volume", jnp.fft.fftn, spectrum_by_hand, volume, (P("x", "y"),), P(None, "x", "y"), 1e-5, GRID
    )
