"""Claim: training steps as they are written today need no more memory than XLA gives them, and send fewer bytes.

The steps are those of ``tests/steps``: Adam on Transformers whose layers are scanned (stacked along dimension 0 or 1)
or written out, in float32 and bfloat16, recomputed or not, with fully sharded data parallelism, tensor, context, expert
and data parallelism, a pipeline, a split optimizer state, and accumulated gradients. Each goes through ``gshard.jit``
and through ``jax.jit`` with the same constraints, argument and result shardings and donated state.

Of both compiled programs: bytes that each device sends (``gshard.explain``), messages (``hlo_collectives``), FLOPs that
it executes (``tests/flops.py``), temporary memory (``memory_analysis``), and the CPU seconds that tracing, planning,
partitioning and compiling take. Small steps also run: the losses of two steps are compared. With --h100 nothing runs
and no FLOPs are counted; "alone" are the bytes beside which the schedule has no kernel.

    python benchmarks/training_steps.py                          small steps on 8 devices: some minutes on two cores
    python benchmarks/training_steps.py --true-size              8B and 70B parameters on 64 devices, compiled only
    python benchmarks/training_steps.py --h100 [--true-size]     compiled for H100 by XLA:GPU; no GPU is needed
    python benchmarks/training_steps.py --only scanned --only data [--json out.json]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

TRUE_SIZE, H100 = "--true-size" in sys.argv, "--h100" in sys.argv
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={64 if TRUE_SIZE else 8}"
sys.path[:0] = [str(Path(__file__).resolve().parents[1] / name) for name in ("tests", "scripts")]

import jax
from children import measured as measured_by_children
from gpu_schedule import schedule

import flops
import gshard
from gshard.device.machine import Machine
from gshard.xla import hlo_collectives
from gshard.xla.described import described_mesh
from steps import STEPS, TRUE_SIZES, Step

SIDES = "ours", "xla"
RATIOS = {"bytes": "bytes", "messages": "messages", "flops": "FLOPs", "temps": "temps", "seconds": "compile"}
if H100:
    del RATIOS["flops"]
    RATIOS["alone"] = "alone"  # bytes beside which no kernel runs
NEAR = 5e-3  # losses of bfloat16 differ by rounding


def side_of(name: str, step: Step) -> dict[str, Any]:
    """What one side makes of a step."""
    on = described_devices() if H100 else None
    function, results = step.function(on), step.results(on)
    options: dict[str, Any] = {"out_shardings": results, "donate_argnums": 0}
    jitted = gshard.jit(function, mesh=step.mesh(on), **options) if name == "ours" else jax.jit(function, **options)
    begun = time.process_time()
    lowered = jitted.lower(*step.arguments(on))
    if name == "ours":
        lowered.spmd  # noqa: B018  planned and partitioned
    made = time.process_time()
    compiled = lowered.compile()
    done = time.process_time()
    text = compiled.as_text()
    kinds = hlo_collectives.summary(hlo_collectives.collectives(text))
    found = {
        "bytes": gshard.explain(compiled, partitioner="xla").total_bytes,
        "bytes on CPU": sum(n for _, n in kinds.values()),
        "messages": sum(n for n, _ in kinds.values()),
        "temps": compiled.memory_analysis().temp_size_in_bytes,
        "seconds": done - begun,
        "before": made - begun,
    }
    if H100:
        read = schedule(text)  # FLOPs are not in it: products are calls of libraries
        return {
            **found,
            "bytes": read["bytes"],
            "messages": read["times"],
            "alone": read["bytes"] - read["hidden_bytes"],
        }
    found["flops"] = flops.executed(compiled)
    if not TRUE_SIZE:
        state, batch = step.numbers()
        for _ in range(2):
            state, value = jitted(state, batch)
        found["loss"] = float(value)
    return found


def described_devices() -> list[Any]:
    """As many H100 as the steps need, that no machine has: XLA compiles for them, with JAX's CUDA plugin."""
    return list(described_mesh(Machine.of("h100:8x8" if TRUE_SIZE else "h100:1x8")).devices or ())


def child(names: Sequence[str], steps: dict[str, Step]) -> None:
    for name in names:
        for side in SIDES:
            try:
                result = side_of(side, steps[name])
            except Exception as error:
                result = {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
            print(json.dumps({"name": name, "side": side, **result}), flush=True)
        print(json.dumps({"name": name, "side": "end"}), flush=True)


def ratio(sides: dict[str, Any], what: str) -> float | None:
    """Ours over XLA's; None where one side has no number."""
    ours, theirs = (sides.get(side, {}).get(what) for side in SIDES)
    return None if ours is None or not theirs else ours / theirs


def row(name: str, sides: dict[str, Any]) -> str:
    """A row of the table."""
    errors = [f"{side}: {sides[side]['error']}" for side in SIDES if "error" in sides.get(side, {})]
    cells = "".join(f"{'-' if (r := ratio(sides, what)) is None else f'{r:.2f}':>10}" for what in RATIOS)
    ours = sides.get("ours", {})
    size = f"{ours['temps'] / 2**30:>9.2f}" if TRUE_SIZE and "temps" in ours else ""
    off = "" if is_near(sides) else f"  WRONG: losses {[sides[s].get('loss') for s in SIDES]}"
    return f"{name:<32}{cells}{size}{off}{'  ' + '; '.join(errors)[:150] if errors else ''}"


def is_near(sides: dict[str, Any]) -> bool:
    """Whether both sides have equal losses; steps that do not run have none."""
    losses = [sides[s]["loss"] for s in SIDES if "loss" in sides.get(s, {})]
    return len(losses) < len(SIDES) or abs(losses[0] - losses[1]) <= NEAR * abs(losses[1])


def summary(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    for what, title in RATIOS.items():
        numbers = {name: r for name, sides in found.items() if (r := ratio(sides, what)) is not None}
        if numbers:
            mean = math.exp(sum(math.log(max(r, 1e-3)) for r in numbers.values()) / len(numbers))
            most = max(numbers, key=lambda name: numbers[name])
            yield f"{title:<10} geometric mean {mean:.2f}, most {numbers[most]:.2f} ({most})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--true-size", action="store_true", help="8B and 70B parameters on 64 devices, compiled only")
    parser.add_argument(
        "--h100", action="store_true", help="compiled by XLA:GPU for H100 that are described to it; needs jax[cuda13]"
    )
    parser.add_argument("--only", action="append", default=[], help="steps whose name contains this")
    parser.add_argument("--json", type=Path, help="write all that was measured")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    steps = TRUE_SIZES if TRUE_SIZE else STEPS
    if options.child:
        child(options.child, steps)
        return
    names = [name for name in steps if not options.only or any(text in name for text in options.only)]
    print(f"{'step: ours / XLA':<32}{''.join(f'{t:>10}' for t in RATIOS.values())}{'  GiB' if TRUE_SIZE else ''}")
    if H100 and importlib.util.find_spec("jax_plugins") is None:
        parser.error('--h100 needs JAX\'s CUDA plugin: pip install "jax[cuda13]"')
    given = [flag for flag, on in (("--true-size", TRUE_SIZE), ("--h100", H100)) if on]
    command = [sys.executable, __file__, *given, "--child"]
    found = measured_by_children(names, command, SIDES, lambda name, sides: print(row(name, sides), flush=True))
    print(f"\n{len(found)} steps, jax {jax.__version__}", *summary(found), sep="\n")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
