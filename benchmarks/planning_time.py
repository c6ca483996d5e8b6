"""Claim: planning takes seconds, however a program is marked: an axis in parts, three axes, with a machine or without.

Programs that once took minutes: a window-attention vision Transformer with its weights split over one axis of 8 while
it has 2 and 4 heads, a spectral atmosphere model on three axes, a padding whose every way to be split has to be priced,
a Transformer on four axes. Each is traced, planned and priced for devices that need not exist. Counts do not depend on
this computer: equations that are traced alone to be priced, and searches for the paths of reshards.

    python benchmarks/planning_time.py [--programs windows padding] [--machines h100]
    python benchmarks/planning_time.py --programs --slowest 10     the slowest of tests/families: some minutes
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import growth
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import families
import gshard
from gshard.comm import reshard as axis_steps
from gshard.device.machine import Machine
from gshard.emit.partition import partition
from gshard.lowering import seconds as emitted
from gshard.lowering.seconds import on_machine
from gshard.search.pricing import plans_of
from gshard.tracing.trace import trace

FLOATS = jnp.float32
WINDOW = 4


def normalised(x: Any, scale: Any) -> Any:
    """Layer normalisation."""
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * scale


def attention(x: Any, p: dict[str, Any], heads: int) -> Any:
    """Attention within windows of an image [examples, height, width, channels]."""
    b, h, w, c = x.shape
    x = x.reshape(b, h // WINDOW, WINDOW, w // WINDOW, WINDOW, c).swapaxes(2, 3).reshape(-1, WINDOW**2, c)
    projected = x @ gshard.split(p["qkv"], 1, "model")
    q, k, v = jnp.moveaxis(projected.reshape(-1, WINDOW**2, heads, 3, c // heads).swapaxes(1, 2), 3, 0)
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(c // heads) + p["bias"]
    mixed = jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores, -1), v).swapaxes(1, 2).reshape(-1, WINDOW**2, c)
    mixed = (mixed @ p["out"]).reshape(b, h // WINDOW, w // WINDOW, WINDOW, WINDOW, c)
    return mixed.swapaxes(2, 3).reshape(b, h, w, c)


def windows(depth: int = 2) -> tuple[Callable[..., Any], tuple[Any, ...], gshard.Mesh]:
    """A training step of a vision Transformer of two stages, of 2 and 4 heads."""

    def model(stages: Any, image: Any, head: Any) -> Any:
        x = image
        for stage in stages:
            for i, p in enumerate(stage["layers"]):
                moved = jnp.roll(normalised(x, p["scale"]), (-WINDOW // 2 * (i % 2),) * 2, (1, 2))
                x = x + jnp.roll(attention(moved, p, stage["bias"].shape[0]), (WINDOW // 2 * (i % 2),) * 2, (1, 2))
                x = x + jax.nn.gelu(x @ p["up"]) @ p["down"]
            b, h, w, c = x.shape
            x = x.reshape(b, h // 2, 2, w // 2, 2, c).swapaxes(2, 3).reshape(b, h // 2, w // 2, 4 * c) @ stage["merge"]
        return x.mean((1, 2)) @ head

    def loss(stages: Any, head: Any, image: Any, labels: Any) -> Any:
        found = jax.nn.log_softmax(model(stages, image, head))
        return -jnp.mean(jnp.take_along_axis(found, labels[:, None], 1))

    def step(stages: Any, head: Any, image: Any, labels: Any) -> Any:
        gradients = jax.grad(loss, (0, 1))(stages, head, image, labels)
        return jax.tree.map(lambda p, g: p - 0.1 * g, (stages, head), gradients)

    stages = []
    for channels, heads in ((64, 2), (128, 4)):
        bias = (heads, WINDOW**2, WINDOW**2)
        shapes = {
            "qkv": (channels, 3 * channels), "out": (channels, channels), "bias": bias, "scale": (channels,),
            "up": (channels, 4 * channels), "down": (4 * channels, channels),
        }  # fmt: skip
        layer = {name: jax.ShapeDtypeStruct(shape, FLOATS) for name, shape in shapes.items()}
        merge = jax.ShapeDtypeStruct((4 * channels, 2 * channels), FLOATS)
        stages.append({"layers": [layer] * depth, "merge": merge, "bias": layer["bias"]})
    image, head = jax.ShapeDtypeStruct((4, 32, 32, 64), FLOATS), jax.ShapeDtypeStruct((256, 10), FLOATS)
    return step, (stages, head, image, jax.ShapeDtypeStruct((4,), jnp.int32)), gshard.Mesh.abstract(model=8)


def spectral(steps: int = 2) -> tuple[Callable[..., Any], tuple[Any, ...], gshard.Mesh]:
    """Vorticity on a sphere: Fourier transforms along longitudes, products with Legendre functions along latitudes."""
    levels, latitudes, longitudes, waves = 4, 32, 64, 22

    def grid(field: Any, legendre: Any) -> Any:
        found = jnp.einsum("lmn,jmn->ljm", field, legendre)
        return jnp.fft.irfft(jnp.pad(found, ((0, 0), (0, 0), (0, longitudes // 2 + 1 - waves))), longitudes)

    def spectrum(field: Any, legendre: Any, weights: Any) -> Any:
        return jnp.einsum("ljm,jmn,j->lmn", jnp.fft.rfft(field)[..., :waves], legendre, weights)

    def step(state: Any, legendre: Any, weights: Any) -> Any:
        legendre = gshard.split(legendre, 0, "a")
        turned = 1j * jnp.arange(waves)[None, :, None]
        for _ in range(steps):
            u, v, w = grid(turned * state, legendre), grid(state, legendre), grid(state * state.conj(), legendre)
            above = jnp.concatenate([w[:1], w[:-1]])
            flux = spectrum(u * w + above, legendre, weights) * turned + spectrum(
                v * jnp.cumsum(w, 0), legendre, weights
            )
            state = state - 0.1 * flux
        return state

    state = jax.ShapeDtypeStruct((levels, waves, waves + 1), jnp.complex64)
    table = jax.ShapeDtypeStruct((latitudes, waves, waves + 1), FLOATS)
    mesh = gshard.Mesh.abstract(a=2, b=2, c=2)
    return step, (state, table, jax.ShapeDtypeStruct((latitudes,), FLOATS)), mesh


def padding() -> tuple[Callable[..., Any], tuple[Any, ...], gshard.Mesh]:
    """One padding of three dimensions on three axes."""

    def padded(v: Any, w: Any) -> Any:
        return jnp.pad(v, [(0, 2), (1, 0), (3, 2)], mode="symmetric"), 2 * gshard.split(w, 0, ("b", "c"))

    shapes = jax.ShapeDtypeStruct((19, 9, 12), jnp.uint32), jax.ShapeDtypeStruct((16, 4), FLOATS)
    return padded, shapes, gshard.Mesh.abstract(a=2, b=2, c=2)


def layers(depth: int = 10) -> tuple[Callable[..., Any], tuple[Any, ...], gshard.Mesh]:
    """The gradient of a Transformer without loops, on a mesh of four axes. Marks name three of them."""

    def loss(layers: list[dict[str, Any]], x: Any) -> Any:
        x = gshard.split(x, 0, ("data", "fsdp"))
        marks = {"o": P("model", None, "fsdp"), "wi": P("fsdp", "model"), "wo": P("model", "fsdp")}
        projections = dict.fromkeys("qkv", P("fsdp", "model", None))
        for p in layers:
            x = growth.layer(x, {name: gshard.shard(p[name], spec) for name, spec in (marks | projections).items()})
        return jnp.mean(x * x)

    return jax.grad(loss), growth.arguments(depth), gshard.Mesh.abstract(pod=2, data=2, fsdp=2, model=2)


PROGRAMS = {"windows": windows, "spectral": spectral, "padding": padding, "layers": layers}


@contextlib.contextmanager
def counting(module: Any, name: str, counts: dict[str, int]) -> Iterator[None]:
    """Counts the calls of a function of a module."""
    original = getattr(module, name)

    def counted(*args: Any, **options: Any) -> Any:
        counts[name] = counts.get(name, 0) + 1
        return original(*args, **options)

    setattr(module, name, counted)
    try:
        yield
    finally:
        setattr(module, name, original)


class Row(NamedTuple):
    """One program on one machine: seconds of CPU time, and counts."""

    name: str
    machine: str
    equations: int
    traced: float
    planned: float
    alone: int
    steps: int
    sent: int

    def __str__(self) -> str:
        return (
            f"{self.name:36} {self.machine:8} {self.equations:9,} {self.traced:6.2f}s {self.planned:6.2f}s "
            f"{self.alone:7,} {self.steps:6,} {self.sent:10,} B"
        )


def measured(name: str, program: tuple[Callable[..., Any], tuple[Any, ...], gshard.Mesh], called: str) -> Row:
    """Traces and plans a program, by bytes (``none``) or by seconds on a kind of device."""
    (f, args, mesh), counts = program, dict[str, int]()
    machine = None if called == "none" else Machine.of(called, mesh.size)
    with counting(axis_steps, "shortest", counts), counting(emitted, "emitted_alone", counts):
        start = time.process_time()
        traced = trace(f, *args)
        middle = time.process_time()
        found = plans_of(traced, mesh if machine is None else on_machine(mesh, machine), machine)[0]
        end = time.process_time()
    spmd = found.spmd or partition(found.plan)
    return Row(
        name, called, sum(1 for _ in traced.block.walk()), middle - start, end - middle,
        counts.get("emitted_alone", 0), counts.get("shortest", 0), sum(c.total_bytes for c in spmd.collectives),
    )  # fmt: skip


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", nargs="*", default=list(PROGRAMS), choices=PROGRAMS)
    parser.add_argument("--machines", nargs="+", default=["none", "h100"], help="kinds of devices; none: by bytes")
    parser.add_argument("--slowest", type=int, default=0, help="also so many of tests/families, of each machine")
    options = parser.parse_args()
    print(f"seconds of CPU time, jax {jax.__version__}")
    print(f"{'program':36} {'machine':8} equations   trace    plan  traced  steps         sent")
    for name in options.programs:
        for called in options.machines:
            print(measured(name, PROGRAMS[name](), called))
    for called in options.machines if options.slowest else ():
        cases = {**families.CASES, **families.SMALL}.values()
        rows = [measured(c.name, (c.function, c.arguments, gshard.Mesh.abstract(**c.mesh)), called) for c in cases]
        rows.sort(key=lambda row: -row.planned)
        print(*rows[: options.slowest], sep="\n")


if __name__ == "__main__":
    main()
