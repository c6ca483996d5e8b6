"""Claim: a program that gshard partitions sends and computes no more than one that was written for shards by hand.

Each program (``twins/``) stands beside a ``shard_map`` program in which every collective was placed by hand. Arguments
and results lie alike on all sides, on 8 virtual CPU devices. Ours, the one by hand and that of XLA's own partitioner
are compiled, run, and compared with the unpartitioned program; bytes and messages are read from the compiled programs
(``hlo_collectives``), FLOPs are XLA's own count, further rounds of loops added, temporaries are XLA's number. Memory is
read and written kernel by kernel (``priced_hlo``): what a fusion reads in two places comes from memory once, where
XLA's own ``bytes accessed`` counts it twice. Seconds are modelled: a microsecond for a message, 100 GB/s between
devices, 50 TFLOP/s, 450 GB/s of memory; they are the same formula for all sides, and only their ratios mean anything.

    python benchmarks/by_hand.py [--only shift]          a minute

The same for a TPU, compiled ahead of time by libtpu and read, not run (``by_hand_on_tpu.py`` says how):

    pip install libtpu    # the version that belongs to jaxlib
    python benchmarks/by_hand.py --topology v5e:2x4 [--planned] [--only shift] [--json out.json] [--hlo folder]

Programs by cause: sums that are finished late; loops; elements that are cut, padded and joined in a row; windows and
convolutions; transforms and reshards; searches, sorts and running combinations; places that are known, tables that
follow from them, and places of the data; dimensions that are merged.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import by_hand_on_tpu
import jax
import numpy as np
from children import measured as measured_by_children
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from priced_hlo import FREE, bytes_moved, kernels
from twins import GROUPS
from twins.program import PARTS, Program

import flops
import gshard
from gshard.xla import hlo_collectives
from gshard.xla.hlo_parser import read_module

FEW = 64  # bytes sent that count as none
PAGE = 4096  # less temporary memory counts as much as this


@dataclasses.dataclass(frozen=True)
class Side:
    """What one side of a program sends, computes and holds on each device."""

    bytes: int
    messages: int
    flops: float
    temporaries: int
    seconds: float
    right: bool


def is_right(program: Program, found: Sequence[Any]) -> bool:
    expected = [np.asarray(x) for x in jax.tree.leaves(jax.jit(program.whole)(*program.arguments))]
    for x, y in zip(found, expected, strict=True):
        if x.shape != y.shape or x.dtype != y.dtype:
            return False
        off = np.abs(x.astype(complex) - y).max() / np.abs(y).max()
        if not off <= program.tolerance:
            return False
    return True


def side(program: Program, compiled: Any) -> Side:
    arguments = [
        jax.device_put(x, NamedSharding(program.mesh, spec))
        for x, spec in zip(program.arguments, program.specs, strict=True)
    ]
    try:
        right = is_right(program, [np.asarray(x) for x in jax.tree.leaves(compiled(*arguments))])
    except jax.errors.JaxRuntimeError:  # XLA on CPU and transforms; what is compiled can be measured all the same
        right = False
    text = compiled.as_text()
    sent = hlo_collectives.collectives(text)
    total, messages = sum(c.total_bytes for c in sent), sum(c.executions for c in sent)
    work, read = flops.executed(compiled), memory_bytes(text)
    seconds = messages * 1e-6 + total / 1e11 + work / 5e13 + read / 4.5e11
    return Side(total, messages, work, compiled.memory_analysis().temp_size_in_bytes, seconds, right)


def memory_bytes(text: str) -> int:
    """What all kernels read and write, in every round of a loop."""
    module = read_module(text)
    every = kernels(module, module.computations[module.entry], 1)
    return sum(times * bytes_moved(module, where, made) for where, made, times in every if made.opcode not in FREE)


def sides(program: Program) -> tuple[Side, Side, Side]:
    """Ours, the one by hand, and XLA's."""
    lie = jax.tree.map(
        lambda spec: NamedSharding(program.mesh, spec),
        (program.specs, program.out),
        is_leaf=lambda x: isinstance(x, P),
    )
    options: dict[str, Any] = {"in_shardings": lie[0], "out_shardings": lie[1]}
    specs: dict[str, Any] = {"in_specs": program.specs, "out_specs": program.out}
    lying: dict[str, Any] = {"in_shardings": program.specs, "out_shardings": program.out}
    ours = gshard.jit(program.whole, mesh=program.mesh, finite=program.finite, **lying)
    hand = jax.shard_map(program.by_hand, mesh=program.mesh, **specs, check_vma=False)
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


def mean(ratios: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / max(1, len(ratios)))


def ahead_of_time(programs: Sequence[Program], options: argparse.Namespace) -> None:
    """Prints the table for a TPU."""
    if options.child:
        chosen = {p.name: p for p in programs}
        by_hand_on_tpu.child([chosen[n] for n in options.child], options.topology, options.planned, options.hlo)
        return
    found: dict[str, dict[str, Any]] = {}

    def show(name: str, sides: dict[str, Any]) -> None:
        found[name] = sides
        print(by_hand_on_tpu.row(name, sides), flush=True)

    given = ["--topology", options.topology, *(["--planned"] if options.planned else [])]
    if options.hlo:
        options.hlo.mkdir(parents=True, exist_ok=True)
        given += ["--hlo", str(options.hlo)]
    print(f"jax {jax.__version__}, {options.topology}, compiled ahead of time\n\n{by_hand_on_tpu.HEADER}")
    command = [sys.executable, __file__, *given, "--child"]
    measured_by_children([p.name for p in programs], command, by_hand_on_tpu.SIDES, show)
    print(by_hand_on_tpu.totals(found))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="programs whose names contain this")
    parser.add_argument("--topology", help="of a TPU that libtpu compiles for ahead of time: v5e:2x4")
    parser.add_argument("--planned", action="store_true", help="ours is planned for that machine, in seconds")
    parser.add_argument("--json", type=Path, help="with --topology: write all that was read")
    parser.add_argument("--hlo", type=Path, help="with --topology: a folder for the compiled programs")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    every = [program for group in GROUPS for program in group()]
    programs = [p for p in every if not options.only or any(text in p.name for text in options.only)]
    if options.topology:
        ahead_of_time(programs, options)
        return
    print(f"jax {jax.__version__}, {PARTS} devices; ours and XLA's are ratios to the program by hand\n")
    print(f"{'':34}{'by hand':>40} |{'ours':>34} |{'XLA':>34}")
    print(
        f"{'':34}{'bytes':>11}{'messages':>9}{'MFLOPs':>9}{'KiB':>7}{'':4} |"
        + f"{'bytes':>8}{'FLOPs':>8}{'temps':>8}{'seconds':>8}   |" * 2
    )
    rows: list[list[tuple[float, ...]]] = []
    for program in programs:
        ours, hand, xla = sides(program)
        columns = [
            f"{hand.bytes:>11,}{hand.messages:>9}{hand.flops / 1e6:>9.1f}{hand.temporaries / 1024:>7.0f}"
            f"{'' if hand.right else ' !':4} |"
        ]
        rows.append([])
        for other in (ours, xla):
            found = (
                ratio(other.bytes, hand.bytes, FEW),
                ratio(other.flops, hand.flops),
                max(PAGE, other.temporaries) / max(PAGE, hand.temporaries),
                other.seconds / hand.seconds,
            )
            rows[-1].append(found)
            columns.append("".join(f"{r:>8.2f}" for r in found) + ("  " if other.right else " !") + " |")
        print(f"{program.name:34}" + "".join(columns), flush=True)
    for name, column in ("ours", [r[0] for r in rows]), ("XLA", [r[1] for r in rows]):
        sent, work, held, seconds = zip(*column, strict=True)
        print(f"\n{name:5} seconds, geometric mean {mean(seconds):.3f}, worst {max(seconds):.2f}, ", end="")
        print(f"above 1.2 in {sum(r > 1.2 for r in seconds)} of {len(column)} programs")
        print(f"      temporaries, geometric mean {mean(held):.3f}, above 1.1 in {sum(r > 1.1 for r in held)}")
        print(f"      bytes above 1.05 in {sum(r > 1.05 for r in sent)}, FLOPs in {sum(r > 1.05 for r in work)}")
    print("\n'!' marks a wrong result")


if __name__ == "__main__":
    main()
