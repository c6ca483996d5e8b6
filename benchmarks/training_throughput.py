"""Claim: a partitioned training step is as fast as under XLA's own partitioner, and nearly as plain JAX on one device.

The step of ``gshard-m4 train`` (loss, gradients, guard, Adafactor) of an MoE Transformer runs three ways in this
process, in turns, on the same batches of 8 groups:

    one device     plain ``jax.jit``, no marks, one virtual device
    gshard         ``gshard.jit`` on 8 virtual devices
    XLA            ``jax.jit`` with the same marks as sharding constraints on 8 virtual devices, with the shardings of
                   arguments that gshard found

Virtual devices share the processor cores, so one device is the upper bound that 8 could reach. Printed are ratios of
medians of pairs that ran next to each other.

    python benchmarks/training_throughput.py [--steps 10] [--preset demo] [--tokens 2048]
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

DEVICES = 8
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + f" --xla_force_host_platform_device_count={DEVICES}"
    " --xla_cpu_collective_call_terminate_timeout_seconds=600"
    " --xla_cpu_collective_call_warn_stuck_timeout_seconds=300"
)

import jax
import numpy as np
from peer import xla_function

import gshard
from gshard.tracing.trace import trace
from gshard_m4.config import PRESETS, ModelChoice, TrainConfig
from gshard_m4.step import initial_state, make_step

VOCABULARY = 4000
LENGTH = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each")
    parser.add_argument("--preset", choices=[name for name in PRESETS if not name.startswith("paper")], default="demo")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a batch on each side")
    options = parser.parse_args()

    partitioned = ModelChoice(options.preset).transformer(VOCABULARY, VOCABULARY, DEVICES)
    # The same groups of tokens, so the same routing and the same work.
    plain = dataclasses.replace(partitioned, partitions=1, group_size=options.tokens // DEVICES)
    rng = np.random.default_rng(0)
    batch = {k: rng.integers(2, VOCABULARY, (options.tokens // LENGTH, LENGTH)) for k in ("source", "target")}
    batch = {k: v.astype(np.int32) for k, v in batch.items()}
    state = initial_state(plain, 0)

    step = make_step(partitioned, TrainConfig())
    ours = gshard.jit(step, mesh=DEVICES)
    program = trace(step, state, batch)
    flat = [*program.captured, *jax.tree.leaves((state, batch))]
    captured = len(program.captured)
    found = ours.lower(state, batch).argument_shardings
    peer = jax.jit(xla_function(program, gshard.Mesh.of(DEVICES)))
    placed = [*flat[:captured], *(jax.device_put(x, s) for x, s in zip(flat[captured:], found, strict=True))]
    spread = jax.tree.unflatten(jax.tree.structure((state, batch)), placed[captured:])
    single = jax.jit(make_step(plain, TrainConfig()))

    at = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(single(state, batch))]
    loss = at.index("[1]['loss']")
    sides: dict[str, Callable[[], Any]] = {
        "one device": lambda: single(state, batch),
        "gshard": lambda: ours(*spread),
        "XLA": lambda: peer(*placed),
    }
    losses = {name: float(jax.tree.leaves(jax.block_until_ready(run()))[loss]) for name, run in sides.items()}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(options.steps + 1):
        for name, run in sides.items():
            begin = time.perf_counter()
            jax.block_until_ready(run())
            if turn:  # the first one is still warming up
                seconds[name].append(time.perf_counter() - begin)

    print(f"{options.preset}, {options.tokens} tokens a side, {DEVICES} virtual devices, jax {jax.__version__}")
    print("losses of the step: " + ", ".join(f"{name} {value:.6f}" for name, value in losses.items()))
    spread_of_losses = max(losses.values()) - min(losses.values())
    assert spread_of_losses < 1e-3 * abs(losses["one device"]), "they do not compute the same"
    for name in ("one device", "XLA"):
        ratio = statistics.median(a / b for a, b in zip(seconds[name], seconds["gshard"], strict=True))
        print(f"throughput of gshard over {name:<12} {ratio:5.2f}   (median of {options.steps} pairs)")


if __name__ == "__main__":
    main()
