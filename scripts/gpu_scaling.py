"""On one GPU: how fast dense and MoE models train, and whether more experts translate better, in slices that resume.

    gshard-m4 prepare --tier base --output data/base
    python scripts/gpu_scaling.py --data data/base --machine "one H200"     # again until it ends with 0
    python scripts/gpu_scaling.py --dry-run                                 # on CPU, tiny; pages stay in --output

First the throughput table, gpu_throughput.md in the folder of --output: tokens a second of a training step of dense
and MoE models (``gpu_step``), with ``einsum``, ``gather`` and the dispatches that drop nothing, under ``gshard.jit``
and ``jax.jit``. Then ``scripts/scaling.py`` with the size ``gpu``, which trains each model on at least 100 million
target tokens and writes packages/m4/docs/results.md. Both resume; the exit code is 75 while there is more to do, and 2
where there is no GPU.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from gpu import DISPATCHES, environment, missing
from gpu_page import failed, machine_of, of_kind, put, steps
from resumable import AGAIN, ROOT, SOURCES, Part, State, run

SHORTEST = 5.0  # minutes that a slice of scaling.py needs

HEAD = """# Throughput on a GPU

<!-- Written by scripts/gpu_scaling.py from what it measured: change that, not this. -->

{what} Models are presets of `gshard-m4 train`, in bfloat16, with vocabularies of 32,000 words; tokens are random ids.
"""


def parts_of(mode: str) -> list[Part]:
    """The rows of the throughput table."""
    of_experts = [("moe-8e-12l", dispatch) for dispatch in DISPATCHES]
    rows = [("dense-12l-wide",), *of_experts, ("moe-32e-12l", "gather"), ("moe-128e-12l", "gather")]
    tiny = ("--tiny",) if mode == "dry-run" else ()
    machine = Part("machine", ("scripts/gpu_checks.py", "machine"), 120, environment(mode))
    steps = [
        Part(f"step {' '.join(row)}", ("scripts/gpu_step.py", "step", *row, *tiny), 400, environment(mode))
        for row in rows
    ]
    return [machine, *steps]


def page(state: State, again: str, mode: str) -> str:
    """The text of the throughput page."""
    what = "One device trains." if mode == "gpu" else "**A dry run on CPU with tiny sizes: no figure means anything.**"
    found = list(of_kind(state, "step").values())
    sections = [HEAD.format(what=what), machine_of(state), "## Tokens a second\n\n" + steps(found) if found else ""]
    sections += [failed(state), f"## Doing it again\n\n```bash\n{again}\n```\n"]
    return "\n".join(filter(None, sections))


def scaling(data: Path, output: Path, mode: str, machine: str, minutes: float) -> list[str]:
    """The command line that continues the comparison of models."""
    size = "gpu" if mode == "gpu" else "smallest"
    line = [sys.executable, str(ROOT / "scripts" / "scaling.py"), "--data", str(data), "--size", size]
    line += ["--runs", str(output / f"scaling-{size}"), "--machine", machine, "--minutes", f"{minutes:.2f}"]
    line += [] if mode == "gpu" else ["--page", str(output / "results.md")]
    return line


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a slice, and writes the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, help="folder that gshard-m4 prepare made; without it only the throughput table"
    )
    parser.add_argument("--minutes", type=float, default=9, help="of a slice")
    parser.add_argument("--output", type=Path, help="of state and models; runs/gpu-scaling, with -dry-run, by default")
    parser.add_argument("--machine", default="one GPU", help="in words, for the page of results")
    parser.add_argument("--retry", action="store_true", help="measure what has failed again")
    parser.add_argument("--dry-run", action="store_const", dest="mode", const="dry-run", default="gpu")
    given = parser.parse_args(arguments)
    if given.data is not None and given.minutes <= SHORTEST:
        parser.error(f"scaling.py needs slices of more than {SHORTEST:g} minutes")

    begin, mode = time.monotonic(), given.mode
    output = given.output or Path("runs") / ("gpu-scaling" if mode == "gpu" else "gpu-scaling-dry-run")
    where = output / "gpu_throughput.md"
    state = State(output / "state.json", {"mode": mode, "jax": metadata.version("jax")})
    if state.found("machine") is None and (lacks := missing(mode)):
        print(f"{lacks}. --dry-run shows on CPU that the script works.", file=sys.stderr)
        return 2
    data = [] if given.data is None else ["--data", given.data.name if given.data.is_absolute() else str(given.data)]
    again = shlex.join(["python", "scripts/gpu_scaling.py", *data, *(["--dry-run"] if mode == "dry-run" else [])])

    def write() -> None:
        put(where, page(state, again, mode))

    over = run(parts_of(mode), state, given.minutes, retry=given.retry, after=write)
    write()
    print(f"written: {where}", flush=True)
    left = given.minutes - (time.monotonic() - begin) / 60
    if not over:
        return AGAIN
    if given.data is None:
        return 0
    if left < SHORTEST:
        return AGAIN
    line = scaling(given.data, output, mode, given.machine, left)
    return subprocess.run(line, env=_of_scaling(mode)).returncode


def _of_scaling(mode: str) -> dict[str, str]:
    """The environment of scaling.py, whose models train on the first device that there is."""
    path = os.pathsep.join(filter(None, [*map(str, SOURCES), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, **environment(mode), "PYTHONPATH": path}


if __name__ == "__main__":
    sys.exit(main())
