"""Claim: faster than XLA's own partitioner on these programs on every machine, with fewer bytes and no more FLOPs.

The programs are those of ``tests/families``: layers with data, tensor and sequence parallelism, training steps,
mixtures of experts, split vocabularies, contractions, moves, windows, indexing, loops; forward and gradient, in
small, on 8 virtual CPU devices. With ``--serving`` they are those of ``tests/serving_programs``: sampling, caches,
attention and weights of a step of inference. Each goes through ``gshard.jit`` and through ``jax.jit`` with the same
marks as sharding constraints, and both results are compared with those of the unpartitioned program in float64;
integers, such as tokens, must be equal. XLA is given the better of two chances: its own choice for the arguments, or
the shardings that gshard found for them; results lie as each wants.

Seconds are modelled, on three machines: both compiled programs are read and priced alike, kernel by kernel
(``priced_hlo.py``). Our side is planned for each of them (``gshard.jit(machine=...)``); XLA knows nothing of machines.

Bytes that each device sends are read from both compiled programs, rounds of loops included (``hlo_collectives``).
FLOPs that each device executes are XLA's own count of both compiled programs (``compiled.cost_analysis()``), to which
the further rounds of loops are added, for XLA counts a body once (``tests/flops.py``). Temporaries are XLA's number too
(``memory_analysis``). Each is compared with the chance of XLA's that needs less of it; a few thousand count as none.

    python benchmarks/against_xla_programs.py                      all programs, about twenty minutes on two cores
    python benchmarks/against_xla_programs.py --only layers --only moves/roll [--jobs 2] [--json out.json]
    python benchmarks/against_xla_programs.py --small              batches, heads and channels smaller than the mesh
    python benchmarks/against_xla_programs.py --serving            sampling, caches, attention, weights

Programs run in child processes, so that one that makes XLA abort or hang loses nothing but itself: XLA then 'fails',
and the program has no ratio. Where neither sends anything the ratio is 1. Where only XLA sends it counts as 1/100, for
a zero would make the whole mean zero; a second mean leaves those programs out. On GPU and TPU, a later pass of XLA's
turns an all-reduce of which every device reads only its slice into a reduce-scatter, which XLA on CPU lacks: a third
mean, and a second count of the programs above 1, give XLA those bytes back.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import math
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8"
    " --xla_cpu_collective_call_terminate_timeout_seconds=120"
    " --xla_cpu_collective_timeout_seconds=120"
)
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import jax
import numpy as np
from children import measured as measured_by_children
from peer import xla_function
from priced_hlo import seconds

import flops
import gshard
import serving_programs
from families import CASES, SMALL, Case
from gshard.device.machine import Machine
from gshard.emit.compile import named_sharding
from gshard.xla import hlo_collectives, hlo_parser

MACHINES = "cpu:8", "v5e:2x4", "h100:1x8"
DEVICES, ONES = 8, {"cpu:8": "", "v5e:2x4": "1x", "h100:1x8": "1x"}
LEAST = 0.01  # what a program in which only XLA sends counts in the mean
PAGE = 4096  # less temporary memory counts as much as this
FEW = 4096  # fewer FLOPs count as much as this
LIMIT = 1.05  # of XLA's FLOPs: more is no rounding of uneven parts any more
NEAR = 1e-3  # results that are further off, relative to the largest number, are wrong,
ROUNDING = 4  # unless it is no more than so many times as far as those of one device, in float32, are off
ALL = {**CASES, **SMALL, **serving_programs.CASES}
CHANCES = "its own arguments", "our arguments"


def machine_of(name: str, devices: int) -> Machine:
    """A machine, or one of its kind with as many devices."""
    machine = Machine.of(name)
    return machine if devices == DEVICES else Machine.of(f"{name.split(':')[0]}:{ONES[name]}{devices}")


def measured(compiled: Any, devices: int) -> dict[str, Any]:
    text = compiled.as_text()
    kinds = hlo_collectives.summary(hlo_collectives.collectives(text))
    total = sum(n for _, n in kinds.values())
    memory = compiled.memory_analysis().temp_size_in_bytes
    at_best = total - reduce_scatters_missed(text)
    work = flops.executed(compiled)
    times = {name: seconds(text, machine_of(name, devices)) for name in MACHINES}
    return {"bytes": total, "at_best": at_best, "kinds": kinds, "memory": memory, "flops": work, "seconds": times}


def reduce_scatters_missed(text: str) -> int:
    """Bytes that a compiled program would not send if no all-reduce were one whose result is only read in slices."""
    module = hlo_parser.read_module(text)
    saved = 0
    for found in hlo_collectives.collectives(text):
        if found.kind != "all_reduce":
            continue
        computation, made = module.computations[found.inside], found.itself
        parts = (
            [i for i in computation.instructions.values() if made.name in i.operands] if "(" in made.type else [made]
        )
        for part in parts:
            size, read = hlo_parser.type_bytes(part.type), slices_read(module, computation, part.name)
            if read is not None and read * found.group_size <= size:
                saved += found.executions * (size * (found.group_size - 1) // found.group_size)
    return saved


def slices_read(module: hlo_parser.Module, computation: hlo_parser.Computation, name: str) -> int | None:
    """Bytes of the largest slice that is read of a value, fused users included; None if more is read."""
    if computation.root == name:
        return None
    largest = 0
    for user in computation.instructions.values():
        if name not in user.operands:
            continue
        inner: int | None
        if user.opcode == "dynamic-slice" and user.operands[0] == name:
            inner = hlo_parser.type_bytes(user.type)
        elif user.opcode in ("bitcast", "copy", "transpose", "reshape"):
            inner = slices_read(module, computation, user.name)
        elif user.opcode == "fusion":
            body = module.computations[user.called("calls")[0]]
            numbers = [str(k) for k, operand in enumerate(user.operands) if operand == name]
            entered = [i for i in body.instructions.values() if i.opcode == "parameter" and i.literal in numbers]
            all_read = [slices_read(module, body, i.name) for i in entered]
            inner = None if None in all_read else max(n for n in all_read if n is not None)
        else:
            inner = None
        if inner is None:
            return None
        largest = max(largest, inner)
    return largest


def results_of(compiled: Any, arguments: Sequence[Any]) -> list[np.ndarray]:
    """What a compiled program gives for arguments on the host."""
    shardings = jax.tree.leaves(compiled.input_shardings[0])
    found = compiled(*[jax.device_put(x, s) for x, s in zip(arguments, shardings, strict=True)])
    return [np.asarray(x) for x in jax.tree.leaves(found)]


def difference(found: Sequence[np.ndarray], expected: Sequence[np.ndarray], exact: Sequence[np.ndarray]) -> float:
    """How far results are from the exact ones: the largest difference, relative to the largest number of each.

    Args:
        found: the results.
        expected: those of one device, of the same types.
        exact: the same computed in float64.
    """
    worst = 0.0
    for x, like, y in zip(found, expected, exact, strict=True):
        if x.shape != like.shape or x.dtype != like.dtype:
            return math.inf
        if not np.issubdtype(x.dtype, np.inexact):
            worst = max(worst, 0.0 if np.array_equal(x, like) else math.inf)
        elif x.size:
            x, y = x.astype(np.complex128), y.astype(np.complex128)
            off = np.max(np.abs(x - y)) / max(1e-6, float(np.max(np.abs(y))))
            worst = max(worst, math.inf if np.isnan(off) else float(off))
    return worst


def run(case: Case) -> Iterable[dict[str, Any]]:
    """Measures one program: our side first, then each chance of XLA's."""
    arguments, mesh = case.arguments, case.jax_mesh
    expected = [np.asarray(x) for x in jax.tree.leaves(jax.jit(case.function)(*arguments))]
    exact = expected
    if case.name not in serving_programs.CASES:  # in float64 they would draw other tokens
        with jax.enable_x64(True):
            wide = jax.tree.map(lambda x: x.astype(np.float64) if x.dtype == np.float32 else x, arguments)
            exact = [np.asarray(x) for x in jax.tree.leaves(jax.jit(case.function)(*wide))]
    near = max(NEAR, ROUNDING * difference(expected, expected, exact))

    def compared(compiled: Any) -> dict[str, Any]:
        off = difference(results_of(compiled, flat), expected, exact)
        return {**measured(compiled, mesh.size), "off": off, "near": near}

    lowered = gshard.jit(case.function, mesh=mesh).lower(*arguments)
    program, spmd = lowered.program, lowered.spmd
    flat = [*program.captured, *jax.tree.leaves(arguments)]
    predicted = sum(c.total_bytes for c in spmd.collectives)
    ours = compared(lowered.executable.compiled)
    known = {str(spmd.jaxpr): ours}
    for name in MACHINES:
        planned = gshard.jit(case.function, mesh=mesh, machine=machine_of(name, mesh.size)).lower(*arguments)
        text = str(planned.spmd.jaxpr)
        if text not in known:
            known[text] = compared(planned.executable.compiled)
        ours["seconds"][name] = known[text]["seconds"][name]
        ours["off"] = max(ours["off"], known[text]["off"])
    yield {"side": "ours", "predicted": predicted, **ours}
    peer, shardings = xla_function(program, lowered.mesh), [named_sharding(lowered.mesh, s) for s in spmd.in_shardings]
    for side, function in zip(CHANCES, (jax.jit(peer), jax.jit(peer, in_shardings=shardings)), strict=True):
        try:
            yield {"side": side, **compared(function.lower(*flat).compile())}
        except Exception as error:
            yield {"side": side, "error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}


def child(names: Sequence[str]) -> None:
    for name in names:
        try:
            for result in run(ALL[name]):
                print(json.dumps({"name": name, **result}), flush=True)
        except Exception as error:  # ours: XLA's are caught where they happen
            text = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            print(json.dumps({"name": name, "side": "ours", "error": text}), flush=True)
        print(json.dumps({"name": name, "side": "end"}), flush=True)


def parent(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The results of some programs by name and side."""
    command = [sys.executable, __file__, "--child"]
    return measured_by_children(
        names, command, ("ours", *CHANCES), lambda name, sides: print(text_of(name, sides), flush=True)
    )


def is_wrong(side: dict[str, Any]) -> bool:
    """Whether a side has no results, or wrong ones."""
    return bool(side.get("off", math.inf) > side.get("near", NEAR))


def xla_of(sides: dict[str, Any], what: str = "bytes") -> dict[str, Any] | None:
    """The better of XLA's chances among those that are right; None if there is none."""
    right = [sides[c] for c in CHANCES if c in sides and not is_wrong(sides[c])]
    return min(right, key=lambda r: r[what]) if right else None


def ratio_of(sides: dict[str, Any], what: str = "bytes") -> float | None:
    """Our bytes over XLA's; None if XLA has no result, infinity if only we send."""
    ours, xla = sides["ours"], xla_of(sides, what)
    if "error" in ours:
        return math.inf
    if xla is None:
        return None
    if xla[what] == 0:
        return math.inf if ours["bytes"] else 1.0
    return float(ours["bytes"] / xla[what])


def work_of(sides: dict[str, Any], what: str, least: int) -> float | None:
    """Our FLOPs or temporaries over XLA's; None if one of us has no result."""
    xla = xla_of(sides, what)
    if xla is None or what not in sides["ours"]:
        return None
    return float(max(least, sides["ours"][what]) / max(least, xla[what]))


def seconds_of(sides: dict[str, Any], machine: str) -> float | None:
    """Our seconds on a machine over XLA's better chance; None if one of us has no result."""
    right = [sides[c] for c in CHANCES if c in sides and not is_wrong(sides[c])]
    least = min((r["seconds"][machine] for r in right), default=None)
    if least is None or "seconds" not in sides["ours"]:
        return None
    return float(sides["ours"]["seconds"][machine] / least) if least else 1.0


def text_of(name: str, sides: dict[str, Any]) -> str:
    """A row of the table."""
    ours, xla, ratio = sides.get("ours", {}), xla_of(sides), ratio_of(sides)
    failed = next(
        (sides[c]["error"] for c in CHANCES if "error" in sides.get(c, {})),
        "wrong" if CHANCES[0] in sides else "not tried",
    )
    off = " WRONG" if "off" in ours and is_wrong(ours) else ""
    unlike = "" if as_predicted(ours) else f" predicted {ours.get('predicted')}"
    times = "".join(f"{two(seconds_of(sides, machine)):>9}" for machine in MACHINES)
    return (
        f"{name:<42}{times}   {cell(ours, ours.get('error', '')):<36}{cell(xla, f'fails ({failed})'):<36}"
        f"{two(ratio):>6}{two(work_of(sides, 'flops', FEW)):>8}{two(work_of(sides, 'memory', PAGE)):>8}{off}{unlike}"
    )


def two(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


SHORT = {
    "all_gather": "AG", "all_reduce": "AR", "reduce_scatter": "RS", "all_to_all": "AA", "collective_permute": "CP"
}  # fmt: skip


def cell(side: dict[str, Any] | None, otherwise: str) -> str:
    if side is None or "bytes" not in side:
        return otherwise[:100] + " "
    kinds = " ".join(f"{n}{SHORT.get(kind, kind)}" for kind, (n, _) in side["kinds"].items() if n)
    return f"{side['bytes']:>9,}  {kinds}"


def report(found: dict[str, dict[str, Any]]) -> None:
    ratios = {name: ratio_of(sides) for name, sides in found.items()}
    compared = [r for r in ratios.values() if r is not None and r < math.inf]
    at_best = [ratio_of(sides, "at_best") for sides in found.values()]
    given = [r for r in at_best if r is not None and r < math.inf]
    worse = {name: r for name, r in ratios.items() if r is not None and r > 1.0}
    memory = [r for sides in found.values() if (r := work_of(sides, "memory", PAGE)) is not None]
    work = {name: r for name, sides in found.items() if (r := work_of(sides, "flops", FEW)) is not None}
    busier = sorted((n for n in work if work[n] > LIMIT), key=lambda n: -work[n])
    print(f"\n{len(found)} programs, {len(compared)} compared, jax {jax.__version__}")
    for machine in MACHINES:
        times = {n: r for n, sides in found.items() if (r := seconds_of(sides, machine)) is not None}
        slower = sorted((n for n in times if times[n] > 1.0), key=lambda n: -times[n])
        print(f"geometric mean of seconds on {machine:<10}    {mean(list(times.values())):.3f}   (target 0.60)")
        print(f"  slower than XLA's                         {len(slower)}   (target 0)")
        for n in slower:
            print(f"    {n:<40}{times[n]:>8.3f}")
    print(f"geometric mean of bytes, ours / XLA's       {mean([max(LEAST, r) for r in compared]):.3f}   (target 0.50)")
    print(f"  without those in which only XLA sends     {mean([r for r in compared if r]):.3f}")
    print(f"  if XLA scattered what it only slices      {mean([max(LEAST, r) for r in given]):.3f}")
    print(f"programs above 1.0                          {len(worse)}   (target 0)")
    print(f"  if XLA scattered what it only slices      {sum(r is not None and r > 1.0 for r in at_best)}")
    print(f"geometric mean of temporary memory          {mean(memory):.3f}   (target 1.00)")
    print(f"geometric mean of FLOPs                     {mean(list(work.values())):.3f}   (target 1.00)")
    print(f"programs with more FLOPs                    {sum(r > 1.0 for r in work.values())}")
    print(f"  with more than {LIMIT} of XLA's             {len(busier)}   (target 0)")
    lists: list[tuple[str, list[str]]] = [
        ("only XLA sends", [n for n, r in ratios.items() if r == 0.0]),
        ("XLA fails or is wrong", [n for n, r in ratios.items() if r is None]),
        ("our results are WRONG", [n for n, s in found.items() if "off" in s["ours"] and is_wrong(s["ours"])]),
        ("we FAIL", [n for n, sides in found.items() if "error" in sides["ours"]]),
        ("bytes sent are not those predicted", [n for n, sides in found.items() if not as_predicted(sides["ours"])]),
    ]
    for title, names in lists:
        print(f"{title}: {len(names)}{': ' if names else ''}{', '.join(names)}")
    if busier:
        print(f"\nMORE THAN {LIMIT} OF XLA'S FLOPS")
        for name in busier:
            ours, xla = found[name]["ours"]["flops"], xla_of(found[name], "flops")
            print(f"{name:<42}{ours:>14,.0f}{xla['flops'] if xla else 0:>14,.0f}{work[name]:>8.2f}")
    if worse:
        print("\nSENDS MORE THAN XLA")
        for name in sorted(worse, key=lambda n: -worse[n]):
            print(text_of(name, found[name]))


def mean(ratios: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / max(1, len(ratios)))


def as_predicted(ours: dict[str, Any]) -> bool:
    return bool(ours.get("predicted") == ours.get("bytes"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="programs whose name contains this")
    parser.add_argument("--small", action="store_true", help="the programs with dimensions smaller than the mesh")
    parser.add_argument("--serving", action="store_true", help="the programs of a step of inference")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--json", type=Path, help="write all that was measured")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child)
        return
    programs = SMALL if options.small else serving_programs.CASES if options.serving else CASES
    names = [name for name in programs if not options.only or any(text in name for text in options.only)]
    machines = "".join(f"{m:>9}" for m in MACHINES)
    print(f"{'program':<42}{machines}   {'gshard: bytes, collectives':<36}{'XLA':<36} ratio   flops   temps")
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        parts = list(pool.map(parent, [names[i :: options.jobs] for i in range(options.jobs)]))
    found = {name: part[name] for name in names for part in parts if name in part}
    report(found)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
