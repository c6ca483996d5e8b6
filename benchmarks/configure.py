"""Claim: the configuration that is found is no slower than what practitioners write, in the same model.

A step of Adam on 8 billion parameters (``tests/steps``, the structure of Llama 3 8B) with 512 sequences of 4,096
tokens, on 64 H100. By hand: fully sharded data parallelism over 64 devices, or over 8 with tensor parallelism over 8,
every layer recomputed, in one micro-batch or in eight. Those have their usual sharding constraints.
``gshard.configure`` gets the same step without constraints. All are priced as they would run; by hand with
``memory_limit``, so that gshard recomputes more where a step does not fit.

    python benchmarks/configure.py                          minutes
    python benchmarks/configure.py --budget-seconds 900     more time
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=64"
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import jax

import gshard
from gshard.device.cost import Cost, cost
from steps import FSDP, TENSOR, TRUE_SIZES, Step

MACHINE, BATCH, LENGTH = "h100:8x8", 512, 4096
CHOICES = {"micro_batches": [n for n in range(1, BATCH + 1) if BATCH % n == 0], "recompute": ["", "products", "full"]}
LLAMA = TRUE_SIZES["8B"].model
BY_HAND = {
    "FSDP 64": ({"fsdp": 64}, FSDP, (1, 8)),
    "FSDP 8, TP 8": ({"fsdp": 8, "tensor": 8}, TENSOR, (1, 8)),
}
NEAR = 1.001  # of the time by hand: more is slower


class Unconstrained:
    """A layout that constrains nothing."""

    def hold(self, x: Any, names: str) -> Any:
        return x


class Unmarked(Step):
    """A step without sharding constraints."""

    def layout(self, devices: Any = None) -> Any:
        return Unconstrained()


def build(micro_batches: int, recompute: str) -> Any:
    """The step without constraints, and its arguments without shardings."""
    model = dataclasses.replace(LLAMA, remat=recompute)
    marked = Step("8B", model, {"fsdp": 64}, FSDP, (BATCH, LENGTH), parts=micro_batches)
    free = Unmarked("8B", model, {"fsdp": 64}, FSDP, (BATCH, LENGTH), parts=micro_batches)
    arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), marked.arguments())
    return jax.jit(free.function(), donate_argnums=0), *arguments


def by_hand() -> Iterator[tuple[str, Cost | None]]:
    """The configurations of practitioners; None for one that does not fit."""
    machine = gshard.Machine.of(MACHINE)
    for name, (axes, rules, micro_batches) in BY_HAND.items():
        for parts in micro_batches:
            step = Step(name, LLAMA, axes, rules, (BATCH, LENGTH), parts=parts)
            jitted = gshard.jit(
                step.function(), mesh=step.mesh(), out_shardings=step.results(), donate_argnums=0, machine=machine,
                memory_limit=machine.memory,
            )  # fmt: skip
            lowered = jitted.lower(*step.arguments())
            try:
                yield f"{name}, {parts} micro-batches, all recomputed", cost(lowered.spmd, machine, lowered.donated)
            except gshard.stages.MemoryLimitError:
                yield f"{name}, {parts} micro-batches, all recomputed", None


def row(name: str, found: Cost | None) -> str:
    """A row of the table."""
    if found is None:
        return f"{name:<48}{'does not fit':>12}"
    return (
        f"{name:<48}{found.seconds:>12.3f}{BATCH * LENGTH / found.seconds / 1e3:>12.0f}{found.sent / 2**30:>10.1f}"
        f"{found.flops / 1e15:>10.3f}{found.peak / 2**30:>10.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget-seconds", type=float, help="of gshard.configure")
    options = parser.parse_args()
    head = ("s a step", "ktokens/s", "GiB sent", "PFLOP", "GiB peak")
    print(f"{'':<48}{head[0]:>12}{head[1]:>12}{head[2]:>10}{head[3]:>10}{head[4]:>10}", flush=True)
    hand = dict(by_hand())
    for name, found in hand.items():
        print(row(name, found), flush=True)
    wall, processor = time.perf_counter(), time.process_time()
    result = gshard.configure(
        build, mesh=64, machine=MACHINE, choices=CHOICES, budget_seconds=options.budget_seconds, progress=True
    )  # fmt: skip
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    print(row("gshard.configure", result.best.cost), flush=True)
    print(f"\n{result}\n\n{wall:.0f} s, {processor:.0f} s of processor time; jax {jax.__version__}")
    best_by_hand = min(found.seconds for found in hand.values() if found is not None)
    ratio = result.best.seconds / best_by_hand
    print(f"found / best by hand: {ratio:.3f}{', SLOWER' if ratio > NEAR else ''}")


if __name__ == "__main__":
    main()
