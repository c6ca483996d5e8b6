"""Claim: the paper's models take no more memory, bytes and estimated time than under XLA's own partitioner.

A training step of a model of Table 1, with the marks of section 3.2 and no others, is compiled by libtpu for a real
TPU v3 topology (no TPU is needed): partitioned by gshard, and by XLA with the same marks as sharding constraints. XLA
gets three chances: its own choice for the arguments, the shardings that gshard found for the arguments, and (the
expert) the shardings that gshard found for every value, as constraints. Memory is the compiler's, bytes are read off
the compiled programs, time is the compiler's own estimate of cycles at 940 MHz.

    pip install libtpu    # the version that belongs to jaxlib
    python benchmarks/paper_against_xla.py [--side ours --side arguments] ["MoE(128E, 12L)" v3:8x8 ...]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from typing import Any

import jax

from gshard.ahead_of_time import CYCLES_A_SECOND, topology_mesh
from gshard.analysis import hlo_collectives
from gshard.analysis.cycles import estimated_cycles
from gshard.analysis.peer import xla_function
from gshard.passes.compile import named_sharding
from gshard.planning import configured, lower

MODELS = ("MoE(128E, 12L)", "v3:8x8", "MoE(2048E, 12L)", "v3:32x32", "MoE(2048E, 36L)", "v3:32x32")
SIDES = {
    "ours": "gshard",
    "own": "XLA, its own arguments",
    "arguments": "XLA, our arguments",
    "expert": "XLA, every value as ours",
}


def compiled(name: str, topology: str, side: str, remat: bool | None) -> Any:
    """The compiled program; raises what the compiler raises."""
    config, machine = configured(name, topology, remat)
    mesh = topology_mesh(machine)
    lowered, _ = lower(config, mesh)
    if side == "ours":
        return lowered.executable.compiled
    program, captured = lowered.program, len(lowered.program.captured)
    f = xla_function(program, mesh, lowered.plan if side == "expert" else None)
    given = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in program.block.inputs]
    # Its own choice needs to be told no more than which devices there are, which the marks do.
    found = [named_sharding(mesh, s) for s in lowered.spmd.in_shardings]
    where: dict[str, Any] = {} if side == "own" else {"in_shardings": found}
    donated = tuple(captured + i for i in lowered.donated)
    return jax.jit(f, donate_argnums=donated, keep_unused=True, **where).lower(*given).compile()


def measure(name: str, topology: str, side: str, remat: bool | None) -> None:
    """Prints one row: GiB of memory, GiB sent, milliseconds, then kinds; or why there is none."""
    start = time.perf_counter()
    try:
        found = compiled(name, topology, side, remat)
    except jax.errors.JaxRuntimeError as error:
        print(f"FAILED\t{str(error).splitlines()[0][:200]}\t{time.perf_counter() - start:.0f}")
        return
    memory, text = found.memory_analysis(), found.as_text()
    peak = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    kinds = hlo_collectives.summary(hlo_collectives.collectives(text))
    seconds = estimated_cycles(text) / CYCLES_A_SECOND[topology.partition(":")[0]]
    row = (peak - memory.alias_size_in_bytes, sum(n for _, n in kinds.values()))
    shown = ", ".join(f"{kind} x{n} {size / 2**30:.2f}" for kind, (n, size) in kinds.items())
    print("\t".join(["MEASURED", *(f"{n / 2**30:.3f}" for n in row), f"{1e3 * seconds:.1f}", shown,
                     f"{time.perf_counter() - start:.0f}"]))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS), help="name and topology, in turns")
    parser.add_argument("--side", choices=SIDES, action="append", help="all by default")
    parser.add_argument(
        "--remat", action=argparse.BooleanOptionalAction, default=None, help="recompute pairs of layers"
    )
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sides = options.side or list(SIDES)
    if options.one:
        measure(options.models[0], options.models[1], sides[0], options.remat)
        return
    remat = [] if options.remat is None else ["--remat" if options.remat else "--no-remat"]
    for name, topology in zip(options.models[::2], options.models[1::2], strict=True):
        print(f"\n{name} on {topology}; jax {jax.__version__}", flush=True)
        print(f"  {'':26}{'memory, GiB':>12}{'sent, GiB':>12}{'step, ms':>10}   collectives, GiB", flush=True)
        ours: list[float] | None = None
        for side in sides:
            # A process for each: a compiler that gives up takes what it held with it.
            command = [sys.executable, __file__, "--one", "--side", side, *remat, "--", name, topology]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            rows = [line.split("\t") for line in done.stdout.splitlines() if line.startswith(("MEASURED", "FAILED"))]
            if not rows:
                raise SystemExit(f"{name}, {SIDES[side]}: {done.stderr[-2000:]}")
            kind, *cells = rows[-1]
            if kind == "FAILED":
                print(f"  {SIDES[side]:26}{cells[0]} ({cells[1]} s)", flush=True)
                continue
            found = [float(x) for x in cells[:3]]
            print(f"  {SIDES[side]:26}{found[0]:>12.2f}{found[1]:>12.2f}{found[2]:>10.0f}   {cells[3]} ({cells[4]} s)",
                  flush=True)  # fmt: skip
            if side == "ours":
                ours = found
            elif ours is not None:
                ratios = [a / b if b else float("nan") for a, b in zip(ours, found, strict=True)]
                print(f"  {'  ours by it':26}{ratios[0]:>12.2f}{ratios[1]:>12.2f}{ratios[2]:>10.2f}", flush=True)


if __name__ == "__main__":
    main()
