"""Claims: a search is never worse than a preset, computes the same, keeps marks, and ends alike in every process.

    presets        the programs of benchmarks/against_xla_programs.py with all marks left out, on 8 CPU devices: the
                   time of what is found over that of the best preset, of what was searched alone likewise, and the
                   model
                   over the price. With --run each plan runs on 8 virtual devices, and the results are compared
    pins           each step of benchmarks/search.py with one mark more, which contradicts the plan: whether it is kept,
                   and what it costs
    seeds          each step searched in processes of three hash seeds: the same plan, and the same text
    scale          MoE(2048E, 36L) without a mark on 2,048 devices: seconds and memory of the search

Each ends with status 1 if its claim does not hold.

    python benchmarks/search_claims.py presets [--run] [--only layers]
    python benchmarks/search_claims.py pins [--only megatron]
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import os
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import jax
import numpy as np
from against_xla_programs import NEAR as OFF
from against_xla_programs import ROUNDING, difference
from jax.sharding import PartitionSpec as P
from paper_models import configured, searched
from search_cases import cases, memory_of, step_of

import gshard
from families import CASES
from gshard.core.mark import Mark, words_of
from gshard.core.program import Block, Constant, Program, Value
from gshard.emit.compile import compile_spmd, named_sharding
from gshard.emit.partition import partition
from gshard.language.region import with_edges
from gshard.planning.added_marks import spec_of_cut, with_marks
from gshard.search.find import best_plan

LARGE = "24 layers"  # minutes of search; only where it is asked for by name
SECONDS = 1.000001  # of the other's time: more is slower
SEEDS = "0", "1", "2"
STATES, NEAR = 30, 0.02


def bare(block: Block) -> Block:
    """A block without its marks."""
    now: dict[Value, Value | Constant] = {}

    def left(x: Any) -> Any:
        return now.get(x, x) if isinstance(x, Value) else x

    equations = []
    for e in block.equations:
        reads, bodies = tuple(map(left, e.inputs)), tuple(map(bare, e.blocks))
        if e.mark is not None:
            now[e.outputs[0]] = reads[0]
            continue
        e = dataclasses.replace(e, inputs=reads, blocks=bodies)
        equations.append(with_edges(e) if bodies else e)
    return Block(block.inputs, tuple(equations), tuple(map(left, block.outputs)))


def unmarked(program: Program) -> Program:
    marks = (None,) * len(program.argument_marks)
    return dataclasses.replace(program, block=bare(program.block), argument_marks=marks)


def off_by(case: Any, program: Program, mesh: gshard.Mesh, plan: Any) -> tuple[float, float]:
    """How far the results of a plan on 8 devices are from the exact ones; and how far they may be."""
    executable = compile_spmd(partition(plan))
    shardings = executable.spmd.in_shardings[len(program.captured) :]
    leaves = jax.tree.leaves(case.arguments)
    placed = [jax.device_put(x, named_sharding(mesh, s)) for x, s in zip(leaves, shardings, strict=True)]
    results = [np.asarray(x) for x in executable(*placed)]
    expected = [np.asarray(x) for x in jax.tree.leaves(jax.jit(case.function)(*case.arguments))]
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: x.astype(np.float64) if x.dtype == np.float32 else x, case.arguments)
        exact = [np.asarray(x) for x in jax.tree.leaves(jax.jit(case.function)(*wide))]
    return difference(results, expected, exact), max(OFF, ROUNDING * difference(expected, expected, exact))


def presets(only: list[str], run: bool) -> int:
    machine = gshard.Machine.of("cpu:8")
    chosen, alone, model, worse, wrong = [], [], [], 0, 0
    for name, case in CASES.items():
        if only and not any(text in name for text in only):
            continue
        lowered = gshard.jit(case.function, mesh=case.jax_mesh).lower(*case.arguments)
        program = unmarked(lowered.program)
        best = best_plan(program, lowered.mesh, machine)
        usual = min(best.others, key=lambda option: option.rank(best.limit))
        base = max(usual.cost.seconds, 1e-12)
        chosen.append(max(best.chosen.cost.seconds, 1e-12) / base)
        alone.append(max(best.searched.cost.seconds, 1e-12) / base)
        model.append((best.solution.value or 1e-12) / max(best.searched.cost.seconds, 1e-12))
        slower = best.chosen.rank(best.limit) > usual.rank(best.limit) or chosen[-1] > SECONDS
        off, near = off_by(case, program, lowered.mesh, best.chosen.plan) if run else (0.0, OFF)
        worse, wrong = worse + slower, wrong + (off > near)
        print(
            f"{name:<44}{usual.cost.seconds * 1e6:>10.1f}{chosen[-1]:>8.3f}{alone[-1]:>8.3f}{model[-1]:>8.3f}"
            f"{off:>10.1e}  {usual.name}{', SLOWER' if slower else ''}{', WRONG' if off > near else ''}",
            flush=True,
        )
    print(
        f"\n{len(chosen)} programs: slower than a preset {worse}, wrong {wrong}; time over that of the best preset, in "
        f"geometric mean {statistics.geometric_mean(chosen):.3f}, of what was searched alone "
        f"{statistics.geometric_mean(alone):.3f} (above 1.01: {sum(a > 1.01 for a in alone)}); model over price: "
        f"median {statistics.median(model):.3f}, within 2 %: {sum(abs(m - 1) <= NEAR for m in model)}"
    )
    return worse + wrong


def steps(only: list[str]) -> Iterator[tuple[Any, Any, Any, Any]]:
    """The steps of benchmarks/search.py: case, mesh, step, limit of memory."""
    for case in cases():
        if any(text in case.name for text in only) or (not only and case.name != LARGE):
            mesh, machine = gshard.Mesh.abstract(**case.mesh), gshard.Machine.of(case.machine)
            yield case, mesh, step_of(case, mesh, machine), memory_of(case, mesh, machine)


def contradiction(found: Any) -> tuple[str, P] | None:
    """The name of the largest array of the state, and another sharding for it than that of the plan."""
    program, mesh = found.plan.program, found.mesh
    values = dict(zip(program.names, program.block.inputs, strict=True))
    free = [
        name for name, mark in zip(program.names[len(program.captured) :], program.argument_marks, strict=True)
        if mark is None and values[name].shape
    ]  # fmt: skip
    for name in sorted(free, key=lambda name: -values[name].bytes):
        if sum(name in other for other in program.names) > 1:
            continue
        v = values[name]
        now = spec_of_cut(found.plan.shardings[v], mesh)
        for d, n in enumerate(v.shape):
            other = P(*(tuple(mesh.atoms_of) if i == d else None for i in range(len(v.shape))))
            single = P(*(next(iter(mesh.atoms_of)) if i == d else None for i in range(len(v.shape))))
            if n % mesh.size == 0 and now not in (other, single):
                return name, other
    return None


def pins(only: list[str]) -> int:
    lost = 0
    for case, _, step, limit in steps(only):
        found = gshard.search(step, *case.arguments, memory_limit=limit)
        wanted = contradiction(found)
        if wanted is None:
            print(f"{case.name:<14} nothing to mark")
            continue
        name, spec = wanted
        mark = Mark(spec=words_of(spec)[0], axes=tuple(found.mesh.axes))
        marked = with_marks(found.plan.program, {inputs_of(found)[name]: mark})
        assert marked is not None, "it has no mark"
        insisted = dataclasses.replace(
            found, best=best_plan(marked, found.mesh, found.cost.machine, donated=found.donated, memory_limit=limit)
        )
        cut = insisted.plan.shardings[inputs_of(insisted)[name]]
        atoms = tuple(a for own in cut.dims for a in own)
        kept = [bool(own) for own in cut.dims] == [axes is not None for axes in spec]
        kept = kept and insisted.mesh.count(atoms) == insisted.mesh.size
        more = insisted.cost.seconds / found.cost.seconds - 1
        lost += not kept
        print(
            f"{case.name:<14}{found.cost.seconds * 1e3:>10.3f}{insisted.cost.seconds * 1e3:>10.3f}{more:>+9.1%}"
            f"  {name}: {found.plan.format(inputs_of(found)[name])} marked {spec}{'' if kept else ', LOST'}",
            flush=True,
        )
    print(f"\nmarks that were not kept: {lost}")
    return lost


def inputs_of(found: Any) -> dict[str, Value]:
    return dict(zip(found.plan.program.names, found.plan.program.block.inputs, strict=True))


def told(case_name: str) -> None:
    """Prints what is found for one step, without the seconds that it took."""
    ((case, _, step, limit),) = [made for made in steps([case_name]) if made[0].name == case_name]
    found = gshard.search(step, *case.arguments, memory_limit=limit)
    recorded = repr(gshard.SavedPlan.of(found.plan))
    print(hashlib.sha256(recorded.encode()).hexdigest(), found.bound)
    print(re.sub(r"[\d.]+ s\b", "", str(found)))


def seeds(only: list[str]) -> int:
    different = 0
    for case, *_ in steps(only):
        texts = set()
        for seed in SEEDS:
            command = [sys.executable, __file__, "told", "--only", case.name]
            done = subprocess.run(
                command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONHASHSEED": seed}
            )
            texts.add(done.stdout)
        different += len(texts) > 1
        print(f"{case.name:<14} {'the same' if len(texts) == 1 else f'{len(texts)} DIFFERENT answers'}", flush=True)
    print(f"\nsteps for which processes found different plans: {different}")
    return different


def scale() -> int:
    config, machine = configured("MoE(2048E, 36L)", "v3:32x32", None)
    begin = time.perf_counter()
    _, found = searched(config, gshard.Mesh.abstract(devices=machine.size), machine)
    spent, peak = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(found)
    equations = sum(1 for _ in found.plan.program.block.walk())
    print(f"\n{equations} equations, {machine.size} devices: {spent:.0f} s (aim 120), {peak:.1f} GiB (aim 4)")
    return int(not found.best.fits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("claim", nargs="?", default="pins",
                        choices=("presets", "pins", "seeds", "scale", "told"))  # fmt: skip
    parser.add_argument("--only", action="append", default=[], help="programs whose name contains this")
    parser.add_argument("--run", action="store_true", help="run the plans of presets")
    options = parser.parse_args()
    if options.claim == "told":
        told(options.only[0])
        return
    by_name = {"pins": pins, "seeds": seeds}
    if options.claim == "presets":
        failed = presets(options.only, options.run)
    elif options.claim == "scale":
        failed = scale()
    else:
        failed = by_name[options.claim](options.only)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
