"""Runs gshard on a GPU, in slices of under ten minutes, and writes a page of what it finds into the folder of --output.

    python scripts/gpu.py                  # on a machine with a GPU, again until it ends with 0
    python scripts/gpu.py --dry-run        # on CPU, tiny: to see that the script works
    python scripts/gpu.py --described      # no GPU, but JAX's CUDA plugin: compiles for H100 that are described to XLA

Its parts are: a training run of the MoE Transformer with the numbers of CPU beside it; the step under ``gshard.jit``
and ``jax.jit`` for each way to dispatch tokens; a layer (``benchmarks/routing.py``); programs for 8 and 32 GPUs,
compiled for a mocked topology and read; operators whose times are compared with the modelled ones; kernels that a CPU
does not have; state in the memory of the host; a sample of the tests' programs and of the rules of operators; the
examples.

Each part is a process of its own. What is finished is in ``state.json`` in the folder of --output, and is not run
again; a part that fails is on the page. The exit code is 75 while there is more to do, and 2 where there is no GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from gpu_page import page, put
from resumable import AGAIN, FAILED, ROOT, Part, State, run

EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
DISPATCHES = ("gather", "einsum", "blocks")
PROGRAMS = ("fsdp", "tensor", "steps", "moe")
LONG = 480  # seconds of a part that does as much as it can
EIGHT = "--xla_force_host_platform_device_count=8"
# What is compiled in a dry run runs once, so XLA need not try hard.
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
FRUGAL = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "2"}
# Processes that do not exist would be waited for: each is to tune its share of the kernels.
ALONE = "--xla_gpu_shard_autotuning=false"


def environment(mode: str, *, cpu_first: bool = False, flags: str = "") -> dict[str, str]:
    """Of a part: platforms and flags of XLA."""
    platforms = ("cpu,cuda" if cpu_first else "cuda,cpu") if mode == "gpu" else "cpu"
    given = [os.environ.get("XLA_FLAGS", ""), flags, QUICK if mode == "dry-run" else ""]
    return {**FRUGAL, "JAX_PLATFORMS": platforms, "XLA_FLAGS": " ".join(filter(None, given))}


def schedules(mode: str, source: str) -> Iterator[Part]:
    """Programs for several devices."""
    for count in (8,) if mode == "dry-run" else (8, 32):
        for name in PROGRAMS:
            flags = {"virtual": EIGHT, "mocked": ALONE}.get(source, "")
            # What is mocked is one host with one GPU, so many times.
            own = {
                "JAX_PLATFORMS": "cuda",
                "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0],
            }
            yield Part(
                f"{source} {count} {name}", ("scripts/gpu_schedule.py", "topology", source, str(count), name), 400,
                environment(mode, flags=flags) | (own if source == "mocked" else {"JAX_PLATFORMS": "cpu"}),
            )  # fmt: skip


def parts_of(mode: str) -> list[Part]:
    """All that is to be done, what tells most first."""
    machine = Part("machine", ("scripts/gpu_checks.py", "machine"), 120, environment(mode))
    if mode == "described":
        return [machine, *schedules(mode, "described")]

    def part(name: str, script: str, *arguments: str, seconds: float = 400) -> Part:
        return Part(name, (f"scripts/{script}.py", *arguments), seconds, environment(mode))

    dense = part("step dense-12l-wide", "gpu_step", "step", "dense-12l-wide")
    steps = [part(f"step moe-8e-12l {d}", "gpu_step", "step", "moe-8e-12l", d) for d in DISPATCHES]
    names = EXAMPLES[:1] if mode == "dry-run" else EXAMPLES
    cpu_first = environment(mode, cpu_first=True, flags=EIGHT)
    found = [
        machine, part("train", "gpu_step", "train"), dense, *steps, part("routing", "gpu_step", "routing"),
        *(part(name, "gpu_operators", name) for name in ("operators", "kernels", "memory")),
        *schedules(mode, "virtual" if mode == "dry-run" else "mocked"),
        part("programs", "gpu_checks", "programs", seconds=LONG), part("laws", "gpu_checks", "laws", seconds=LONG),
        *(Part(f"example {n}", ("scripts/gpu_checks.py", "example", n), 240, cpu_first) for n in names),
    ]  # fmt: skip
    if mode == "dry-run":
        return [Part(p.name, (*p.command, "--tiny"), p.seconds, p.environment) for p in found]
    return found


def missing(mode: str) -> str:
    """What this machine lacks for a mode; empty if nothing."""
    if mode == "described":
        there = any(importlib.util.find_spec(f"jax_plugins.xla_cuda{v}") for v in (12, 13) if _has_plugins())
        return "" if there else 'JAX\'s CUDA plugin is not installed: pip install "jax[cuda13]"'
    if mode == "dry-run":
        return ""
    line = [sys.executable, "-c", "import jax; jax.devices('gpu')"]
    tried = subprocess.run(line, env={**os.environ, **environment(mode)}, capture_output=True, text=True)
    last = (tried.stderr.strip().splitlines() or [""])[-1][:300]
    return f"JAX finds no GPU here ({last})" if tried.returncode else ""


def _has_plugins() -> bool:
    return importlib.util.find_spec("jax_plugins") is not None


def main() -> int:
    """Runs a slice, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9, help="of a slice")
    parser.add_argument("--output", type=Path, help="folder of the state; runs/gpu, runs/gpu-dry-run by default")
    parser.add_argument("--page", type=Path, help="gpu.md in the folder of --output by default")
    parser.add_argument(
        "--beside", action="append", default=[], type=Path, help="state.json of another machine, shown on the page too"
    )
    parser.add_argument("--only", action="append", default=[], help="parts whose names begin so; again for more")
    parser.add_argument("--retry", action="store_true", help="run what has failed again")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--dry-run", action="store_const", dest="mode", const="dry-run", default="gpu")
    kind.add_argument("--described", action="store_const", dest="mode", const="described")
    given = parser.parse_args()

    mode = given.mode
    output = given.output or Path("runs") / ("gpu" if mode == "gpu" else f"gpu-{mode}")
    where = given.page or output / "gpu.md"
    state = State(output / "state.json", {"mode": mode, "jax": metadata.version("jax")})
    if state.found("machine") is None and (lacks := missing(mode)):
        print(f"{lacks}. --dry-run shows on CPU that the script works.", file=sys.stderr)
        return 2
    others = [State(path, state.settings) for path in given.beside]
    every = parts_of(mode)
    chosen = [p for p in every if not given.only or any(p.name.startswith(only) for only in given.only)]
    again = shlex.join(["python", "scripts/gpu.py", *([f"--{mode}"] if mode != "gpu" else [])])

    def write() -> None:
        put(where, page(state, every, mode, again, others))

    over = run(chosen, state, given.minutes, retry=given.retry, after=write)
    write()
    failed = sum(entry["state"] == FAILED for entry in state.parts.values())
    print(f"{len(state.parts)} of {len(every)} parts have ended, {failed} failed; written: {where}")
    return 0 if over else AGAIN


if __name__ == "__main__":
    sys.exit(main())
