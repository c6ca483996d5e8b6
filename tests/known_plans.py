"""Known plans: what gshard plans for every small program of the tests, in one table that a test compares.

A row has a program, what its plan minimises (bytes, or seconds on an H100 machine), the figures of its plan, and a
digest of the plan and of the emitted collectives. A change of the planner that is meant to change plans rewrites the
table in a commit of its own; the printed comparison says which figures became worse.

    python tests/known_plans.py [--write] [--only layers/]       four minutes of processor time
"""

import argparse
import dataclasses
import hashlib
import json
import math
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import numpy as np
from twins import GROUPS

import gshard
import small_programs
from families import CASES
from families import SMALL as FEW_ROWS
from steps import STEPS

TABLE = Path(__file__).parent / "golden" / "known_plans.txt"
TWINS = {f"twins/{twin.name.replace(' ', '-')}": twin for group in GROUPS for twin in group()}
SMALL = {f"small/{name}": small for name, small in small_programs.PROGRAMS.items()}
MORE = {f"training/{name}": step for name, step in STEPS.items()}
NAMES = (*CASES, *FEW_ROWS, *SMALL, *MORE, *TWINS)
OBJECTIVES = "bytes", "seconds"
WORSE = 1.05


@dataclasses.dataclass(frozen=True)
class Row:
    """The figures of one plan on each device: bytes and messages sent, FLOPs, bytes at the peak, modelled seconds."""

    bytes: int
    messages: int
    flops: int
    peak: int
    seconds: float
    plan: str
    collectives: str

    def __str__(self):
        return " ".join(str(value) for value in dataclasses.astuple(self))

    @staticmethod
    def read(text):
        sent, messages, flops, peak, seconds, *digests = text.split()
        return Row(int(sent), int(messages), int(flops), int(peak), float(seconds), *digests)

    def worse_than(self, other):
        """The figures that exceed those of another row by 5 %, each with the ratio."""
        figures = ((name, getattr(self, name), getattr(other, name)) for name in FIGURES)
        return {name: own / max(known, 1e-30) for name, own, known in figures if own > WORSE * known}


FIGURES = [field.name for field in dataclasses.fields(Row)][:5]


def explained(name, objective):
    """The row of a program."""
    options = {}
    if name in CASES or name in FEW_ROWS:
        case = CASES.get(name) or FEW_ROWS[name]
        function, arguments, mesh = case.function, case.arguments, case.jax_mesh
    elif name in SMALL:
        small_programs.register(0)
        function, mesh = SMALL[name].function, gshard.Mesh.of(8).jax_mesh
        arguments = SMALL[name].arguments(small_programs.numbers((64, 48), 0), small_programs.numbers((64, 48), 1))
    elif name in MORE:
        step = MORE[name]
        function, arguments, mesh = step.function(), step.arguments(), step.mesh()
    else:
        twin = TWINS[name]
        function, arguments, mesh = twin.whole, twin.arguments, twin.mesh
        options = {"in_shardings": twin.specs, "out_shardings": twin.out, "finite": twin.finite}
    machine = f"h100:1x{mesh.size}"
    chosen = machine if objective == "seconds" else None
    found = gshard.explain(gshard.jit(function, mesh=mesh, machine=chosen, **options), *arguments)
    assert not found.is_compiled
    cost = found.cost(machine)
    sent = [(row.kind, row.axes, row.bytes, row.times) for row in found.collectives]
    plan = dataclasses.asdict(gshard.SavedPlan.of(found.plan))
    return Row(
        found.total_bytes,
        sum(row.times for row in found.collectives),
        round(cost.flops),
        round(cost.peak),
        float(f"{cost.seconds:.6g}"),
        _digest(plan),
        _digest(sent),
    )


def _digest(data):
    return hashlib.sha256(json.dumps(data, default=str).encode()).hexdigest()[:10]


def known_rows():
    """The rows of the table, by program and objective."""
    lines = (line.split(": ") for line in TABLE.read_text().splitlines()) if TABLE.exists() else ()
    return {name: Row.read(text) for name, text in lines}


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the table")
    parser.add_argument("--only", default="", help="programs whose names begin so")
    options = parser.parse_args(None if arguments is None else [*arguments])
    known = known_rows()
    found = {
        f"{name} {objective}": explained(name, objective)
        for name in NAMES
        if name.startswith(options.only)
        for objective in OBJECTIVES
    }
    print("\n".join(_differences(found, known)))
    if options.write:
        rows = found if not options.only else known | found
        TABLE.write_text("".join(f"{name}: {row}\n" for name, row in rows.items()))


def _differences(found, known):
    """Lines: the rows that differ, and for each figure the geometric mean of all ratios."""
    both = {name: (row, known[name]) for name, row in found.items() if name in known}
    for name, (row, before) in both.items():
        if row != before:
            worse = row.worse_than(before)
            yield f"{name}: {before} -> {row}" + (f"  WORSE {worse}" if worse else "")
    for figure in FIGURES:
        ratios = [
            getattr(row, figure) / getattr(before, figure)
            for row, before in both.values()
            if getattr(before, figure) and getattr(row, figure)
        ]
        yield f"{figure}: {math.exp(np.log(ratios).mean() if ratios else 0.0):.4f} of the table's"


if __name__ == "__main__":
    main()
