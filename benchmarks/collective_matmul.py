"""Claim: collective matmuls send the bytes of the gathers and scatters they replace; memory falls in geometric mean.

Each program goes through ``gshard.jit`` twice, without and with ``collective_matmul=True`` (figure 4c of the GShard
paper), on 8 virtual CPU devices. Bytes and temporary memory are read from the compiled programs; results must be equal.
Times of calls in turns are given as a ratio: devices that share two cores have nothing to hide behind arithmetic, so it
says what the steps themselves cost.

    python benchmarks/collective_matmul.py [--scale 1.0] [--calls 10]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import gshard
from gshard import shard, split
from gshard.xla import hlo_collectives


def gathered(x: Any, w: Any) -> Any:
    """A product whose result is wide: rows come by."""
    return split(split(x, 0, 8) @ split(w, 1, 8), 1, 8)


def stored_split(x: Any, w: Any) -> Any:
    """Weights that are split where they are stored (ZeRO, FSDP): what is summed over comes by."""
    return split(split(x, 0, 8) @ split(w, 0, 8), 0, 8)


def scattered(x: Any, w: Any) -> Any:
    """The second product of a feed-forward layer with a split sequence: sums rotate."""
    return split(split(x, 1, 8) @ split(w, 0, 8), 0, 8)


def layer(x: Any, w: Any, v: Any) -> Any:
    """A feed-forward layer with a split sequence, which is gathered before and scattered after (Megatron-LM)."""
    h = jax.nn.relu(split(x, 0, 8) @ split(w, 1, 8))
    return split(split(h, 1, 8) @ split(v, 0, 8), 0, 8)


def layer_gradient(x: Any, w: Any, v: Any) -> Any:
    """Its gradient; what is gathered is needed again backward, so only sums rotate."""
    return jax.grad(lambda *a: jnp.sum(layer(*a) ** 2) / 2e6, (0, 1, 2))(x, w, v)


def scores(q: Any, k: Any) -> Any:
    """Attention over a split sequence: keys come by."""
    return split(jnp.einsum("bqd,bkd->bqk", split(q, 1, 8), split(k, 1, 8)), 1, 8).max(-1)


def grid(a: Any, b: Any) -> Any:
    """Three matrices cut both ways (SUMMA)."""
    cut = P("rows", "columns")
    return shard(shard(a, cut) @ shard(b, cut), cut)


Program = tuple[Callable[..., Any], tuple[int, ...], list[tuple[int, ...]]]
PROGRAMS: dict[str, Program] = {
    "gathered operand": (gathered, (8,), [(2048, 1024), (1024, 4096)]),
    "weights stored split": (stored_split, (8,), [(2048, 1024), (1024, 1024)]),
    "scattered sum": (scattered, (8,), [(1024, 4096), (4096, 1024)]),
    "layer": (layer, (8,), [(1024, 512), (512, 4096), (4096, 512)]),
    "layer, gradient": (layer_gradient, (8,), [(1024, 512), (512, 4096), (4096, 512)]),
    "attention": (scores, (8,), [(2, 1024, 256), (2, 1024, 256)]),
    "SUMMA, one operand": (grid, (2, 4), [(2048, 2048), (2048, 2048)]),
}


def mesh_of(shape: tuple[int, ...]) -> Any:
    names = ("rows", "columns")[: len(shape)]
    return jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(shape))


def seconds(step: Any, arguments: list[Any]) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(step(*arguments))
    return time.perf_counter() - begin


def measured(name: str, scale: float, calls: int) -> tuple[float, float, float, int]:
    """Bytes, memory and time of collective matmuls over those at once, and the bytes at once."""
    f, shape, shapes = PROGRAMS[name]
    rng = np.random.default_rng(0)
    sizes = [(*s[:-2], *(max(64, int(n * scale)) for n in s[-2:])) for s in shapes]
    arguments: list[Any] = [rng.integers(-4, 5, s).astype(np.float32) for s in sizes]
    steps = [gshard.jit(f, mesh=mesh_of(shape), collective_matmul=w) for w in (False, True)]
    sent, memory, results = [], [], []
    for step in steps:
        compiled = step.lower(*arguments).executable.compiled
        sent.append(
            sum(n for _, n in hlo_collectives.summary(hlo_collectives.collectives(compiled.as_text())).values())
        )
        memory.append(compiled.memory_analysis().temp_size_in_bytes)
        results.append(jax.tree.leaves(step(*arguments)))
    for ours, theirs in zip(*results, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5 * float(jnp.abs(theirs).max()))
    placed = [
        jax.device_put(x, s) for x, s in zip(arguments, steps[0].lower(*arguments).argument_shardings, strict=True)
    ]
    ratios = [1 / (seconds(steps[0], placed) / seconds(steps[1], placed)) for _ in range(calls)]
    return sent[1] / sent[0], memory[1] / memory[0], statistics.median(ratios), sent[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="of all sizes")
    parser.add_argument("--calls", type=int, default=10, help="of each, in turns")
    given = parser.parse_args()
    print(f"{'program':<24}{'bytes at once':>16}{'bytes':>8}{'memory':>8}{'time':>8}   (collective matmul / at once)")
    same = []
    for name in PROGRAMS:
        sent, memory, took, at_once = measured(name, given.scale, given.calls)
        print(f"{name:<24}{at_once:>16,}{sent:>8.2f}{memory:>8.2f}{took:>8.2f}", flush=True)
        same.append((sent, memory))
    mean = statistics.geometric_mean(memory for _, memory in same)
    print(f"bytes the same: {all(sent == 1.0 for sent, _ in same)}; memory, geometric mean: {mean:.2f}")


if __name__ == "__main__":
    main()
