"""Claim: XLA, given the exported plan of a training step, sends at most 5 % more than the plan, or the lines are named.

A plan is searched for each training step of ``tests/steps``, exported for ``jax.jit`` and compiled. For each: the bytes
of the plan, those that XLA sends with the advised constraints, and where it sends more the line with the largest
difference.

    python benchmarks/exported_plans.py --only scanned --seconds 20
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import jax

import gshard
from steps import STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", default=[], help="steps whose name contains this")
    parser.add_argument("--machine", default="h100:1x8", help="what plans are searched for")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each search")
    options = parser.parse_args()
    names = [name for name in STEPS if not options.only or any(text in name for text in options.only)]
    print(f"{'step':<28} {'plan':>12} {'XLA':>12} {'ratio':>6}  with; where XLA sends more")
    near = explained = 0
    for name in names:
        step = STEPS[name]
        f = jax.jit(step.function(), out_shardings=step.results(), donate_argnums=0)
        found = gshard.search(
            f, *step.arguments(), mesh=step.mesh(), machine=options.machine, budget_seconds=options.seconds,
            progress=False,
        )  # fmt: skip
        exported = gshard.stages.export_plan(found)
        way = f"{0 if exported.advice is None else len(exported.advice.changes)} lines"
        worse = ""
        if exported.ratio > 1.05 and exported.worse:
            worse = f"; {exported.worse[0].more:,} more at {exported.worse[0].place}"
        near += exported.ratio <= 1.05
        explained += exported.ratio <= 1.05 or bool(exported.worse)
        print(
            f"{name:<28} {exported.planned:>12,} {exported.sent:>12,} {exported.ratio:>6.2f}  {way}{worse}",
            flush=True,
        )
    print(f"{near} of {len(names)} send at most 5 % more than the plan; {explained} do, or have a line that tells why")
    assert explained == len(names), "a difference has no line"


if __name__ == "__main__":
    main()
