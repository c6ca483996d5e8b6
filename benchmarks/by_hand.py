"""Claim: a program that gshard partitions sends and computes no more than one that was written for shards by hand.

Each program stands beside a ``shard_map`` program in which every collective was placed by hand. Arguments and results
lie alike on all sides: one dimension over 8 virtual CPU devices. Ours, the one by hand and that of XLA's own
partitioner are compiled, run, and compared with the unpartitioned program; bytes and messages are read from the
compiled programs (``hlo_collectives``), FLOPs are XLA's own count. Seconds are modelled: a microsecond for a
message, 100 GB/s between devices, 50 TFLOP/s, 450 GB/s of memory; they are the same formula for all sides, and only
their ratios mean anything.

    python benchmarks/by_hand.py [--only shift]          two minutes

Programs by cause: elements that are cut, padded and joined in a row; Fourier transforms; convolutions of what is
dilated; searches in sorted arrays; updates and look-ups at known places; tables that follow from the program.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import flops
import gshard
from gshard.analysis import hlo_collectives

PARTS = 8
MESH = jax.make_mesh((PARTS,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
RNG = np.random.default_rng(0)
FEW = 64  # bytes that count as none


@dataclasses.dataclass(frozen=True)
class Program:
    """A program, what it is by hand, its arguments, and how arguments and result lie."""

    name: str
    whole: Callable[..., Any]
    by_hand: Callable[..., Any]
    arguments: tuple[np.ndarray, ...]
    specs: tuple[P, ...]
    out: P
    tolerance: float = 0.0


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def from_left(x: Any, n: int = 1, *, around: bool = False) -> Any:
    """The last ``n`` rows of the device before; the first device gets zeros, or those of the last one."""
    pairs = [(i, (i + 1) % PARTS) for i in range(PARTS if around else PARTS - 1)]
    return lax.ppermute(x[x.shape[0] - n :], "x", pairs)


def from_right(x: Any, n: int = 1, *, around: bool = False) -> Any:
    """The first ``n`` rows of the device after."""
    pairs = [((i + 1) % PARTS, i) for i in range(PARTS if around else PARTS - 1)]
    return lax.ppermute(x[:n], "x", pairs)


def in_a_row() -> Iterator[Program]:
    tokens, rows = (normal(4096, 256),), P("x", None)

    def shift(x: Any) -> Any:
        return jnp.pad(x[:-1], ((1, 0), (0, 0))) * 2 + x

    def shift_by_hand(x: Any) -> Any:
        return jnp.concatenate([from_left(x), x[:-1]]) * 2 + x

    yield Program("shift", shift, shift_by_hand, tokens, (rows,), rows)

    def diffuse(x: Any) -> Any:
        u = jnp.pad(x, 1, mode="wrap")
        return u[2:, 1:-1] + u[:-2, 1:-1] + u[1:-1, 2:] + u[1:-1, :-2] - 4 * x

    def diffuse_by_hand(x: Any) -> Any:
        u = jnp.concatenate([from_left(x, around=True), x, from_right(x, around=True)])
        return u[2:] + u[:-2] + jnp.roll(x, -1, 1) + jnp.roll(x, 1, 1) - 4 * x

    yield Program("border that wraps", diffuse, diffuse_by_hand, tokens, (rows,), rows, 1e-5)

    def average(x: Any) -> Any:
        return lax.reduce_window(x, 0.0, lax.add, (2, 1), (2, 1), "VALID")

    def average_gradient(x: Any) -> Any:
        y, back = jax.vjp(average, x)
        return back(jnp.sin(y))[0]

    yield Program("gradient of an average", average_gradient, average_gradient, tokens, (rows,), rows)


def fft(x: Any, axis: int, *, inverse: bool = False) -> Any:
    """Row by row in memory, where XLA on CPU would have it otherwise and then fail."""
    f = jnp.fft.ifft if inverse else jnp.fft.fft
    y = f(with_layout_constraint(jnp.moveaxis(x, axis, -1), Layout(tuple(range(x.ndim)))))
    return jnp.moveaxis(with_layout_constraint(y, Layout(tuple(range(x.ndim)))), -1, axis)


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


def convolutions() -> Iterator[Program]:
    image, kernel, rows = normal(2, 64, 32, 16), normal(3, 3, 16, 16), P(None, "x")
    layout = ("NHWC", "HWIO", "NHWC")

    def border(x: Any, above: int, below: int) -> Any:
        x = jnp.moveaxis(x, 1, 0)
        parts = [*([from_left(x, above)] if above else []), x, *([from_right(x, below)] if below else [])]
        return jnp.moveaxis(jnp.concatenate(parts), 0, 1)

    def up(x: Any, w: Any) -> Any:
        return lax.conv_transpose(x, w, (2, 2), "SAME")

    def up_by_hand(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(
            border(x, 1, 0), w, (1, 1), [(0, 1), (2, 1)], lhs_dilation=(2, 2), dimension_numbers=layout
        )

    specs = rows, P()
    yield Program("transposed convolution", up, up_by_hand, (image, kernel), specs, rows, 1e-5)

    def down(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(x, w, (2, 2), [(1, 1), (1, 1)], dimension_numbers=layout)

    def down_gradient(y: Any, w: Any) -> Any:
        return jax.vjp(lambda x: down(x, w), jnp.zeros((2, 128, 64, 16)))[1](y)[0]

    def down_gradient_by_hand(y: Any, w: Any) -> Any:
        turned = jnp.flip(w, (0, 1)).swapaxes(2, 3)
        return lax.conv_general_dilated(
            border(y, 0, 1), turned, (1, 1), [(1, 0), (1, 2)], lhs_dilation=(2, 2), dimension_numbers=layout
        )

    yield Program("gradient of a strided one", down_gradient, down_gradient_by_hand, (image, kernel), specs, rows, 1e-5)

    def up_gradient(y: Any, w: Any) -> Any:
        return jax.vjp(lambda x: up(x, w), jnp.zeros((2, 32, 16, 16)))[1](y)[0]

    def up_gradient_by_hand(y: Any, w: Any) -> Any:
        turned = jnp.flip(w, (0, 1)).swapaxes(2, 3)
        return lax.conv_general_dilated(border(y, 0, 1), turned, (2, 2), [(0, 0), (0, 1)], dimension_numbers=layout)

    yield Program("gradient of a transposed one", up_gradient, up_gradient_by_hand, (image, kernel), specs, rows, 1e-5)


def searches() -> Iterator[Program]:
    places, numbers = np.sort(normal(1 << 16)), normal(512)
    steps = np.sort(RNG.integers(-(1 << 20), 1 << 20, 1 << 16).astype(np.int32))
    specs = P("x"), P()

    def place(a: Any, v: Any) -> Any:
        return jnp.searchsorted(a, v)

    def place_by_hand(a: Any, v: Any) -> Any:
        return lax.psum(place(a, v), "x")

    yield Program("places of numbers", place, place_by_hand, (places, numbers), specs, P())

    def between(a: Any, v: Any) -> Any:
        return jnp.searchsorted(a, v + 99, side="right") - jnp.searchsorted(a, v)

    def between_by_hand(a: Any, v: Any) -> Any:
        return lax.psum(between(a, v), "x")

    yield Program("how many lie between", between, between_by_hand, (steps, steps[::128].copy()), specs, P())

    def quantiles(a: Any, v: Any) -> Any:
        """How large a part of the sorted numbers is below each of others."""
        return jnp.digitize(v, a) / a.shape[0]

    def quantiles_by_hand(a: Any, v: Any) -> Any:
        return lax.psum(jnp.searchsorted(a, v, side="right"), "x") / (a.shape[0] * PARTS)

    yield Program("parts below", quantiles, quantiles_by_hand, (places, numbers), specs, P())


def own_rows(n: int) -> Any:
    """The numbers of a device's rows."""
    return lax.axis_index("x") * (n // PARTS) + jnp.arange(n // PARTS)


def known_places() -> Iterator[Program]:
    grid, rows = (normal(4096, 256),), P("x", None)

    def inside(x: Any) -> Any:
        return x.at[1:-1].set((x[2:] + x[:-2]) / 2)

    def inside_by_hand(x: Any) -> Any:
        u = jnp.concatenate([from_left(x), x, from_right(x)])
        i = own_rows(4096)[:, None]
        return jnp.where((i > 0) & (i < 4095), (u[2:] + u[:-2]) / 2, x)

    yield Program("inside of a grid", inside, inside_by_hand, grid, (rows,), rows, 1e-5)

    def every_second(x: Any) -> Any:
        return x.at[1::2].set(jnp.abs(x[1::2]))

    yield Program("every second row", every_second, every_second, grid, (rows,), rows)

    def of_labels(x: Any, labels: Any) -> Any:
        return x[jnp.arange(x.shape[0]), labels]

    labels = RNG.integers(0, 256, 4096).astype(np.int32)
    yield Program("of each row one", of_labels, of_labels, (*grid, labels), (rows, P("x")), P("x"))


def tables() -> Iterator[Program]:
    tokens, rows, columns = (normal(4096, 256),), P("x", None), P(None, "x")

    def places(x: Any) -> Any:
        a = jnp.arange(4096)[:, None] / 10000 ** (jnp.arange(128) / 128)
        return x + jnp.concatenate([jnp.sin(a), jnp.cos(a)], 1)

    def places_by_hand(x: Any) -> Any:
        j = own_rows(256)
        a = jnp.arange(4096)[:, None] / 10000 ** (j % 128 / 128)
        return x + jnp.where(j < 128, jnp.sin(a), jnp.cos(a))

    yield Program("sines and cosines", places, places_by_hand, tokens, (columns,), columns, 1e-4)

    def fade(x: Any) -> Any:
        return x * jnp.exp(-jnp.arange(4096) / 999)[::-1, None]

    def fade_by_hand(x: Any) -> Any:
        return x * jnp.exp(-(4095 - own_rows(4096)) / 999)[:, None]

    yield Program("numbers that fade", fade, fade_by_hand, tokens, (rows,), rows, 1e-5)

    def warm_up(x: Any) -> Any:
        return x * jnp.concatenate([jnp.linspace(0, 1, 100), jnp.ones(3996)])[:, None]

    def warm_up_by_hand(x: Any) -> Any:
        return x * jnp.minimum(own_rows(4096) / 99, 1)[:, None]

    yield Program("numbers that rise", warm_up, warm_up_by_hand, tokens, (rows,), rows, 1e-5)


def merged() -> Iterator[Program]:
    x, w, images = normal(8, 512, 64), normal(64, 128) / 8, normal(4, 128, 64, 8)
    tokens, rows = P(None, "x"), P(None, "x")

    def flat(x: Any, w: Any) -> Any:
        return jnp.tanh(x.reshape(-1, 64) @ w).reshape(8, 512, 128)

    def apart(x: Any, w: Any) -> Any:
        return jnp.tanh(jnp.einsum("bsd,df->bsf", x, w))

    yield Program("tokens, flattened", flat, apart, (x, w), (tokens, P()), tokens, 1e-5)

    def gradient(f: Callable[..., Any]) -> Callable[..., Any]:
        return jax.grad(lambda w, x: jnp.sum(f(x, w) ** 2))

    def sums(w: Any, x: Any) -> Any:
        return lax.psum(gradient(apart)(w, x), "x")

    yield Program("gradient of flattened tokens", gradient(flat), sums, (w, x), (P(), tokens), P(), 1e-4)

    def windows(x: Any) -> Any:
        b, n, _, c = x.shape
        y = x.reshape(b, n // 8, 8, 8, 8, c).swapaxes(2, 3).reshape(-1, 64, c)
        y = jnp.einsum("wqk,wkc->wqc", jax.nn.softmax(jnp.einsum("wqc,wkc->wqk", y, y)), y)
        return y.reshape(b, n // 8, 8, 8, 8, c).swapaxes(2, 3).reshape(x.shape)

    yield Program("attention in windows of an image", windows, windows, (images,), (rows,), rows, 1e-4)

    def larger(x: Any) -> Any:
        b, n, m, c = x.shape
        return jax.image.resize(x, (b, 2 * n, 2 * m, c), "nearest")

    yield Program("an image twice as large", larger, larger, (images,), (rows,), rows)


GROUPS = in_a_row, transforms, convolutions, searches, known_places, merged, tables


@dataclasses.dataclass(frozen=True)
class Side:
    """What one side of a program sends and computes on each device."""

    bytes: int
    messages: int
    flops: float
    seconds: float
    right: bool


def side(program: Program, compiled: Any) -> Side:
    arguments = [
        jax.device_put(x, NamedSharding(MESH, spec)) for x, spec in zip(program.arguments, program.specs, strict=True)
    ]
    expected = np.asarray(jax.jit(program.whole)(*program.arguments))
    try:
        found = np.asarray(compiled(*arguments))
    except jax.errors.JaxRuntimeError:  # XLA on CPU and transforms; what is compiled can be measured all the same
        found = np.full(expected.shape, np.nan)
    off = np.abs(found.astype(complex) - expected).max() / np.abs(expected).max()
    sent = hlo_collectives.collectives(compiled.as_text())
    total, messages = sum(c.total_bytes for c in sent), sum(c.executions for c in sent)
    work, read = flops.executed(compiled), float((compiled.cost_analysis() or {}).get("bytes accessed", 0.0))
    seconds = messages * 1e-6 + total / 1e11 + work / 5e13 + read / 4.5e11
    return Side(total, messages, work, seconds, found.shape == expected.shape and bool(off <= program.tolerance))


def sides(program: Program) -> tuple[Side, Side, Side]:
    """Ours, the one by hand, and XLA's."""
    lie = [NamedSharding(MESH, spec) for spec in program.specs], NamedSharding(MESH, program.out)
    options: dict[str, Any] = {"in_shardings": tuple(lie[0]), "out_shardings": lie[1]}
    ours = gshard.jit(program.whole, mesh=MESH, in_shardings=program.specs, out_shardings=program.out)
    hand = jax.shard_map(program.by_hand, mesh=MESH, in_specs=program.specs, out_specs=program.out, check_vma=False)
    lowered = (
        ours.lower(*program.arguments),
        jax.jit(hand, **options).lower(*program.arguments),
        jax.jit(program.whole, **options).lower(*program.arguments),
    )
    return tuple(side(program, one.compile()) for one in lowered)  # type: ignore[return-value]


def ratio(a: float, b: float, few: float = 0.0) -> float:
    """How many times as much; what is hardly anything counts as nothing, and nothing is as much as nothing."""
    if a <= max(few, b * 1e-9):
        return 1.0 if b <= few else 0.0
    return a / b if b > few else math.inf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="programs whose names contain this")
    options = parser.parse_args()
    print(f"jax {jax.__version__}, {PARTS} devices; ours and XLA's are ratios to the program by hand\n")
    print(f"{'':30}{'by hand':>33} |{'ours':>26} |{'XLA':>26}")
    print(
        f"{'':30}{'bytes':>11}{'messages':>9}{'MFLOPs':>9}{'':4} |" + f"{'bytes':>8}{'FLOPs':>8}{'seconds':>8}  |" * 2
    )
    slower: list[tuple[float, float]] = []
    more: list[tuple[float, float]] = []
    for program in (p for group in GROUPS for p in group() if options.only in p.name):
        ours, hand, xla = sides(program)
        columns = [f"{hand.bytes:>11,}{hand.messages:>9}{hand.flops / 1e6:>9.1f}{'' if hand.right else ' !':4} |"]
        for other in (ours, xla):
            found = ratio(other.bytes, hand.bytes, FEW), ratio(other.flops, hand.flops), other.seconds / hand.seconds
            columns.append("".join(f"{r:>8.2f}" for r in found) + (" " if other.right else "!") + " |")
        more.append((ratio(ours.bytes, hand.bytes, FEW), ratio(ours.flops, hand.flops)))
        slower.append((ours.seconds / hand.seconds, xla.seconds / hand.seconds))
        print(f"{program.name:30}" + "".join(columns), flush=True)
    means = [math.exp(sum(map(math.log, column)) / len(column)) for column in zip(*slower, strict=True)]
    print(f"\nseconds, geometric mean: ours {means[0]:.2f}, XLA {means[1]:.2f}; worst of ours {max(slower)[0]:.2f}")
    worst = [max(column) for column in zip(*more, strict=True)]
    print(f"worst of ours: bytes {worst[0]:.2f}, FLOPs {worst[1]:.2f}")
    print("'!' marks a wrong result")


if __name__ == "__main__":
    main()
