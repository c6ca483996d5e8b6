"""Claim: XLA:GPU makes as many kernels as the cost model has, moves as many bytes, and copies as many slices of stacks.

    python benchmarks/fusions.py              # needs JAX's CUDA plugin (pip install "jax[cuda13]"), and no GPU

Each program is compiled for an H100 that is described to XLA; its kernels and their operands and results are counted,
those of ``gshard.device`` beside them. Buffers of less than a hundredth of the largest operand are left out. Of loops
over stacks, the slices that an iteration copies and the stacks that are filled with zeros are counted on both sides.
"""

from __future__ import annotations

import importlib.util
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path[:0] = [str(Path(__file__).resolve().parents[1] / name) for name in ("scripts", "tests")]

import jax
import jax.numpy as jnp
import numpy as np
from gpu_schedule import H100
from jax.experimental import topologies
from priced_hlo import FREE

import gshard
from gshard.core.program import Value
from gshard.device.cost import cost
from gshard.device.fusion_model import as_compiled, kernels_of
from gshard.device.machine import Machine
from gshard.tracing.trace import trace
from gshard.xla.hlo_parser import Module, read_module, type_bytes
from loop_slices import LOOPS, copies_and_fills

SMALL = 0.01
Case = tuple[Callable[..., Any], tuple[Any, ...]]


def array(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """An argument."""
    return jax.ShapeDtypeStruct(sizes, dtype)


def layer_norm(x: Any) -> Any:
    """Of rows, in float32."""
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    return (centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)


def rms_norm(x: Any, gain: Any) -> Any:
    """Of rows, in float32."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * gain).astype(x.dtype)


def cross_entropy(logits: Any, ids: Any) -> Any:
    """The mean loss of rows of logits."""
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), ids[:, None], 1).mean()


def adam(w: Any, m: Any, v: Any, g: Any) -> Any:
    """A step."""
    m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
    return w - 1e-3 * m / (jnp.sqrt(v) + 1e-8), m, v


def cases() -> Iterator[tuple[str, Case]]:
    """Programs with their names."""
    bf16, x = jnp.bfloat16, array(16_384, 4096)
    for row in (64, 1024, 16_384, 32_768):
        yield f"softmax of {row:,}", (jax.nn.softmax, (array(2**26 // row, row),))
    yield "softmax, masked", (lambda x: jax.nn.softmax(jnp.where(x > 0, x, -1e9)), (array(64, 256, 4096),))
    yield "softmax of columns", (lambda x: jax.nn.softmax(x, axis=0), (array(4096, 4096),))
    yield "softmax of two dimensions", (lambda x: jax.nn.softmax(x, axis=(1, 2)), (array(1024, 64, 64),))
    yield "softmax, backward", (lambda y, g: (g - (g * y).sum(-1, keepdims=True)) * y, (x, x))
    yield "log softmax", (jax.nn.log_softmax, (x,))
    yield "layer norm", (layer_norm, (array(16_384, 4096, dtype=bf16),))
    yield (
        "layer norm, gradient",
        (
            jax.grad(lambda x: (layer_norm(x).astype(jnp.float32) ** 2).sum()),
            (array(16_384, 4096, dtype=bf16),),
        ),
    )
    yield "RMS norm", (rms_norm, (array(16_384, 4096, dtype=bf16), array(4096)))
    yield "x + y and its RMS norm", (lambda x, y, g: (x + y, rms_norm(x + y, g)), (x, x, array(4096)))
    yield "a row over its sum", (lambda x: x / x.sum(-1, keepdims=True), (x,))
    yield "a row over another one's sum", (lambda x, y: y / x.sum(-1, keepdims=True), (x, x))
    yield "maximum and sum", (lambda x: (x.max(-1), x.sum(-1)), (x,))
    yield "sum of exponentials", (lambda x: jnp.exp(x).sum(-1), (x,))
    for words in (4096, 32_768):
        yield f"cross entropy of {words:,}", (cross_entropy, (array(8192, words), array(8192, dtype=jnp.int32)))
    yield "Adam", (adam, (array(8192, 8192),) * 4)
    yield "a gate", (lambda x, y: jax.nn.silu(x) * y, (x, x))
    yield "three results of one array", (lambda x: (jnp.sin(x), jnp.cos(x), jnp.sin(x) + jnp.cos(x)), (x,))


def by_xla(function: Callable[..., Any], arguments: tuple[Any, ...], device: Any) -> str:
    """The text of the program that XLA compiles for a device that is described to it."""
    mesh = jax.sharding.Mesh(np.array([device], dtype=object), ("x",))
    there = jax.NamedSharding(mesh, jax.P())
    placed = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=there) for a in arguments]
    return str(jax.jit(function).lower(*placed).compile().as_text())


def counted(module: Module, least: float) -> tuple[int, int]:
    """Kernels that read or write a buffer of ``least`` bytes or more, and the bytes of these buffers."""
    entry = module.computations[module.entry]
    kernels = moved = 0
    for made in entry.instructions.values():
        if made.opcode in FREE:
            continue
        operands = [type_bytes(entry.instructions[name].type) for name in made.operands if name in entry.instructions]
        large = [n for n in (*operands, *_results(made.type)) if n >= least]
        kernels, moved = kernels + bool(large), moved + sum(large)
    return kernels, moved


def _results(written: str) -> list[int]:
    """Bytes of each result of an instruction, that of a tuple's parts."""
    inner = written.strip()
    parts = inner[1:-1].split("}, ") if inner.startswith("(") else [inner]
    return [type_bytes(part + ("}" if "{" in part and not part.endswith("}") else "")) for part in parts]


def modelled(function: Callable[..., Any], arguments: tuple[Any, ...], least: float) -> tuple[int, int]:
    """The same of the cost model."""
    lowered = gshard.jit(function, mesh=gshard.Mesh.abstract(x=1)).lower(*arguments)
    kernels = moved = 0
    for kernel, times in cost(lowered.spmd, Machine.of("h100:1x1")).program.walk():
        buffers: list[Value] = [v for v in (*kernel.reads, *kernel.writes) if v not in kernel.spared]
        large = [n for v in (*buffers, *kernel.carried) if (n := v.bytes) >= least]
        if large and kernel.moved >= least:
            kernels, moved = kernels + times, moved + times * sum(large)
    return kernels, moved


def main() -> int:
    """Prints the table."""
    if importlib.util.find_spec("jax_plugins") is None:
        print('JAX\'s CUDA plugin is not installed: pip install "jax[cuda13]"', file=sys.stderr)
        return 2
    (device,) = topologies.get_topology_desc(platform="cuda", target_config=H100, topology="1x1x1").devices[:1]
    print(f"jax {jax.__version__}, compiled for {device.device_kind}\n")
    print("| program | kernels of XLA | of gshard's model | MiB moved by XLA | by the model | ratio |")
    print("|---|---|---|---|---|---|")
    ratios = []
    for name, (function, arguments) in cases():
        least = SMALL * max(math.prod(a.shape) * a.dtype.itemsize for a in arguments)
        (theirs, moved), (ours, model) = (
            counted(read_module(by_xla(function, arguments, device)), least), modelled(function, arguments, least)
        )  # fmt: skip
        ratios.append(model / moved)
        print(f"| {name} | {theirs} | {ours} | {moved / 2**20:,.0f} | {model / 2**20:,.0f} | {ratios[-1]:.2f} |")
    print(f"\ngeometric mean of the ratios {math.exp(sum(map(math.log, ratios)) / len(ratios)):.2f}")
    print("\n| loop | copies, fills by XLA | by the model |")
    print("|---|---|---|")
    squares = array(2048, 2048), array(4, 2048, 2048)
    for loop in LOOPS:
        kernels = as_compiled(kernels_of(trace(loop, *squares).block), Machine.of("h100:1x1").compiler)
        slices = [piece for kernel, _ in kernels.walk() for piece in kernel.slices]
        modelled_counts = sum(x.copied for x in slices), sum(x.filled for x in slices)
        print(f"| {loop.__name__} | {copies_and_fills(by_xla(loop, squares, device))} | {modelled_counts} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
