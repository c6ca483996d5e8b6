"""Claim: of what XLA's partitioner sends, at least 98 % is attributed to a line or a module of the user's.

The training steps of ``tests/steps`` are compiled by ``jax.jit`` with their shardings, and read by ``gshard.explain``.
For each: the bytes that each device sends, the share whose line or module is known, the share that is called after an
argument (a weight, its gradient), whether the rows add up to the bytes of the text, the temporaries as read from the
schedule over those that the compiler reports (on CPU: a TPU keeps those of so small programs on the chip), the number
of equations, and the seconds that compiling, explaining and writing the page take (processor time).

With --against, each step is also compiled for another machine, which need not exist: "sends" are its bytes over those
that gshard counts of the program for CPU, and "rows" the share of them in rows (kind and axes) that differ by 5 % at
most.

    python benchmarks/explained_by_xla.py                      compiled for 8 CPU devices
    python benchmarks/explained_by_xla.py --against h100:1x8   the counts, beside XLA:GPU's (pip install "jax[cuda13]")
    python benchmarks/explained_by_xla.py --topology v5e:2x4   by libtpu, without a TPU (pip install libtpu)
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import jax

import gshard
from gshard.core.jax_adapter import sub_jaxprs
from gshard.device.machine import Machine
from gshard.xla.described import described_mesh
from steps import STEPS, Step

WANTED = 0.98
NEAR = 0.05  # bytes that count as the same


def equations_in(jaxpr: Any) -> int:
    """How many equations a jaxpr has, those of bodies included."""
    bodies = (body for e in jaxpr.eqns for body in sub_jaxprs(e.params))
    return len(jaxpr.eqns) + sum(equations_in(getattr(body, "jaxpr", body)) for body in bodies)


def explained(step: Step, devices: Sequence[Any] | None, machine: str | None) -> dict[str, float]:
    """What is measured of one step."""
    f = step.function(devices)
    began = time.process_time()
    traced = jax.jit(f, out_shardings=step.results(devices), donate_argnums=0).trace(*step.arguments(devices))
    compiled = traced.lower().compile()
    compiling = time.process_time() - began
    began = time.process_time()
    found = gshard.explain(compiled, machine=machine)
    text = str(found)
    explaining = time.process_time() - began
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        found.html(Path(folder) / "page.html")
    paging = time.process_time() - began
    sent = sum(c.total_bytes for c in found.source.program.sent)
    rows = sum(row.bytes for row in found.collectives)
    program = found.source.program
    arguments = [a.short.text for a in program.arguments]
    moved = [one for row in found.collectives for one in row.moved]
    named = sum(one.bytes for one in moved if any(name in one.array.text for name in arguments))
    report = program.memory
    return {
        "sent": sent,
        "attributed": sum(r.bytes for r in found.collectives if r.line or r.module) / rows if rows else 1.0,
        "named": named / rows if rows else 1.0,
        "off": abs(rows - sent) / sent if sent else 0.0,
        "temporaries": program.held.temporaries / max(report.temporaries, 1) if report else 1.0,
        "instructions": program.instructions,
        "compiling": compiling,
        "explaining": explaining,
        "paging": paging,
        "equations": equations_in(traced.jaxpr.jaxpr),
        "lines": len(text.splitlines()),
    }


def against(step: Step, machine: str) -> tuple[float, float]:
    """The bytes of the program for a machine over those counted for CPU, and the share of them in rows that agree."""
    f = jax.jit(step.function(), out_shardings=step.results(), donate_argnums=0)
    here, there = (gshard.explain(f, *step.arguments(), machine=name) for name in (None, machine))
    assert there.source.program.platform != "cpu", there.lists["counted"]
    sent: list[Counter[tuple[str, str]]] = [Counter(), Counter()]
    for rows, found in zip(sent, (here, there), strict=True):
        for row in found.collectives:
            rows[row.kind, row.axes] += row.bytes
    agreed = sum(n for key, n in sent[1].items() if abs(sent[0][key] - n) <= NEAR * max(sent[0][key], n))
    return there.total_bytes / here.total_bytes, agreed / there.total_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--topology", help="of a TPU: v5e:2x4")
    parser.add_argument("--only", action="append", default=[], help="steps whose name contains this")
    parser.add_argument("--against", help="a machine whose compiler is installed: h100:1x8")
    options = parser.parse_args()
    devices = described_mesh(Machine.of(options.topology)).devices if options.topology else None
    names = [name for name in STEPS if not options.only or any(text in name for text in options.only)]
    if options.against:
        ratios = {}
        for name in names:
            ratios[name] = against(STEPS[name], options.against)
            print(f"{name:<28} sends {ratios[name][0]:.4f}  rows {ratios[name][1]:.1%}", flush=True)
        off = [abs(ratio - 1) for ratio, _ in ratios.values()]
        print(f"{len(off)} steps, jax {jax.__version__}, {options.against}: {sum(x <= NEAR for x in off)} within 5 %")
        return
    heads = (
        ("sent", 12),
        ("attributed", 10),
        ("named", 6),
        ("rows off", 9),
        ("temps", 6),
        ("instr", 7),
        ("equations", 9),
    )
    print(
        f"{'step':<28}",
        *(f"{text:>{wide}}" for text, wide in (*heads, ("compile s", 9), ("explain s", 9), ("page s", 6))),
    )
    found = []
    for name in names:
        row = explained(STEPS[name], devices, options.topology)
        found.append(row)
        print(
            f"{name:<28} {row['sent']:>12,.0f} {row['attributed']:>10.1%} {row['named']:>6.0%} {row['off']:>9.2%} "
            f"{row['temporaries']:>6.2f} {row['instructions']:>7,} {row['equations']:>9,} {row['compiling']:>9.2f} "
            f"{row['explaining']:>9.2f} {row['paging']:>6.2f}",
            flush=True,
        )
    least, off = min(row["attributed"] for row in found), max(row["off"] for row in found)
    held = statistics.geometric_mean(max(row["temporaries"], 1e-3) for row in found)
    slow = max(row["explaining"] for row in found)
    share = statistics.geometric_mean(row["explaining"] / row["compiling"] for row in found)
    said = f"at least {least:.1%} attributed; rows at most {off:.2%} off the text"
    print(f"{len(found)} steps, jax {jax.__version__}: {said}")
    if options.topology is None:
        print(f"temporaries {held:.2f} of the compiler's in geometric mean")
    slowest = max(row["explaining"] + row["paging"] for row in found)
    print(f"explaining takes {share:.2f} of compiling, at most {slow:.1f} s; with the page at most {slowest:.1f} s")
    assert least >= WANTED, "less is attributed than claimed"


if __name__ == "__main__":
    main()
