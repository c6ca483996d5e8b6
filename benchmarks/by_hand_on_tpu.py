"""Programs beside the same written by hand, compiled ahead of time for a TPU that need not exist: read, not run.

``python benchmarks/by_hand.py --topology v5e:2x4`` prints what is measured here. libtpu's compiler is given three
programs of the same function, with arguments and results that lie alike: ours, the one by hand, and XLA's own
partitioner's, which has two chances (the function as it is written, and as gshard opened it), of which the better
counts, in bytes and in time apart. Of the schedule that libtpu made is read:

- bytes that a device sends, and messages, in all rounds of loops: asynchronous collectives count once, and what libtpu
  fused into others counts there (``tpu_schedules``);
- cycles, the compiler's own estimate, which counts no collective, and temporaries;
- seconds: the cycles, and for each collective what the links need (``gshard.device.network``), less the cycles that
  the compiler put between its start and its end, but never less than a microsecond for a message: as in ``overlap.py``;
  for kernels of which libtpu estimates nothing (sorts, look-ups, scatters, windows, strided slices) what their memory
  traffic and arithmetic take (``priced_hlo``), of a sort those of a sorting network: ``log2(n) * (log2(n) + 1) / 2``
  comparisons an element. That is little for what a TPU does one row after the other.

Each program is a child process's, so that one that makes the compiler abort or hang loses nothing but itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import overlap
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from peer import xla_function
from priced_hlo import FREE, kernel_seconds, kernels
from tpu_schedules import cycles_of, estimated_cycles, schedule
from twins.program import Program

import gshard
from flops import elements_of
from gshard.device.machine import Machine
from gshard.xla.described import described_mesh
from gshard.xla.hlo_collectives import OPCODE
from gshard.xla.hlo_parser import Module, read_module

SIDES = "ours", "by hand", "XLA", "XLA, opened"
FEW = 64  # bytes sent that count as none
PAGE = 4096  # less temporary memory counts as much as this
MESSAGE = 1e-6
NEAR = 1.2


def on(machine: Machine, mesh: jax.sharding.Mesh) -> jax.sharding.Mesh:
    """The mesh of a program with the devices of a topology in its place."""
    devices = described_mesh(machine).devices
    assert devices is not None
    grid = np.array(devices, dtype=object).reshape(tuple(mesh.shape.values()))
    return jax.sharding.Mesh(grid, mesh.axis_names, axis_types=mesh.axis_types)


def read(compiled: Any, machine: Machine) -> dict[str, Any]:
    """What a compiled program sends, holds and takes."""
    text = compiled.as_text()
    rows = schedule(text)
    cycle = 2 * overlap.MATRIX_UNITS[machine.kind] * 128 * 128 / machine.rate("bf16")
    waited = sum(max(MESSAGE, overlap.taken(r, machine) - r.beside * cycle) * r.times for r in rows if r.sent)
    kinds: dict[str, int] = {}
    for r in rows:
        kinds[r.kind] = kinds.get(r.kind, 0) + r.times
    cycles = estimated_cycles(text)
    return {
        "bytes": sum(r.total_sent for r in rows),
        "messages": sum(r.times for r in rows if r.sent),
        "kinds": kinds,
        "cycles": cycles,
        "temporaries": compiled.memory_analysis().temp_size_in_bytes,
        "flops": (compiled.cost_analysis() or {}).get("flops", 0.0),
        "untold": untold(read_module(text), machine),
        "seconds": cycles * cycle + waited + untold(read_module(text), machine),
    }


def untold(module: Module, machine: Machine) -> float:
    """Seconds of the kernels of which the compiler estimates nothing."""
    total = 0.0
    for computation, made, times in kernels(module, module.computations[module.entry], 1):
        quiet = made.opcode in FREE or OPCODE.fullmatch(made.opcode) or made.opcode.endswith(("-start", "-done"))
        if quiet or made.opcode == "custom-call" or cycles_of(module, computation, made):
            continue
        one = kernel_seconds(module, computation, made, machine)
        if made.opcode == "sort":
            along = int(made.attributes.partition("dimensions={")[2].partition("}")[0])
            shape = computation.instructions[made.operands[0]].type.partition("[")[2].partition("]")[0].split(",")
            rounds = math.ceil(math.log2(max(2, int(shape[along]))))
            compared = sum(elements_of(computation.instructions[o].type) for o in made.operands)
            one = max(one, compared * rounds * (rounds + 1) / 2 / machine.vector_flops)
        total += one * times
    return total


def compiles(program: Program, machine: Machine, planned_for: str | None) -> Iterable[tuple[str, Callable[[], Any]]]:
    """Each side and what compiles it."""
    mesh = on(machine, program.mesh)
    lie = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), (program.specs, program.out), is_leaf=lambda x: isinstance(x, P)
    )
    options: dict[str, Any] = {"in_shardings": lie[0], "out_shardings": lie[1]}
    given = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in program.arguments]
    ours = gshard.jit(
        program.whole, mesh=mesh, in_shardings=program.specs, out_shardings=program.out, machine=planned_for,
        finite=program.finite,
    ).lower(*given)  # fmt: skip
    hand = jax.shard_map(program.by_hand, mesh=mesh, in_specs=program.specs, out_specs=program.out, check_vma=False)

    def opened() -> Any:
        captured = ours.program.captured
        replay = xla_function(ours.program, ours.mesh)
        return (
            jax.jit(
                lambda *arrays: jax.tree.unflatten(jax.tree.structure(lie[1]), replay(*captured, *arrays)), **options
            )
            .lower(*given)
            .compile()
        )

    yield SIDES[0], lambda: ours.executable.compiled
    yield SIDES[1], lambda: jax.jit(hand, **options).lower(*given).compile()
    yield SIDES[2], lambda: jax.jit(program.whole, **options).lower(*given).compile()
    yield SIDES[3], opened


def child(programs: Sequence[Program], topology: str, planned: bool, folder: Path | None) -> None:
    """Prints what each side of some programs is, a line of JSON each."""
    machine = Machine.of(topology, 8)
    for program in programs:
        for side, made in compiles(program, machine, topology if planned else None):
            try:
                compiled = made()
                found = read(compiled, machine)
                if folder is not None:
                    path = folder / f"{program.name}.{side}.hlo".replace(" ", "_").replace("/", "_")
                    path.write_text(compiled.as_text())
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
            print(json.dumps({"name": program.name, "side": side, **found}), flush=True)
        print(json.dumps({"name": program.name, "side": "end"}), flush=True)


def best(sides: dict[str, Any], what: str) -> dict[str, Any] | None:
    """The chance of XLA's that has least of something."""
    right = [sides[s] for s in SIDES[2:] if what in sides.get(s, {})]
    return min(right, key=lambda r: r[what]) if right else None


def ratio(a: float, b: float, few: float = 0.0) -> float:
    if a <= few:
        return 1.0 if b <= few else 0.0
    return a / b if b > few else math.inf


SHORT = {
    "all_gather": "AG", "all_reduce": "AR", "reduce_scatter": "RS", "all_to_all": "AA", "collective_permute": "CP"
}  # fmt: skip


def cell(side: dict[str, Any] | None) -> str:
    if side is None or "bytes" not in side:
        return (side or {}).get("error", "not tried")[:44]
    kinds = " ".join(f"{n}{SHORT.get(kind, kind)}" for kind, n in side["kinds"].items() if n)
    return f"{side['bytes']:>10,} {kinds:<14} {1e6 * side['seconds']:>8.1f}us"


HEADER = (
    f"{'':34}{'by hand: bytes, collectives, time':<38} {'ours':<37}{'XLA':<37}"
    f"|{'by hand = 1: ours':>35}   |{'XLA = 1: ours':>14}\n"
    f"{'':146}|{'bytes':>8}{'cycles':>8}{'temps':>8}{'time':>8}   |{'bytes':>8}{'time':>8}"
)


def compared(sides: dict[str, Any]) -> dict[str, float]:
    """Ratios of one program, as far as both sides have been compiled."""
    ours, hand = sides.get("ours", {}), sides.get("by hand", {})
    found = {}
    if "bytes" in ours and "bytes" in hand:
        found = {
            "bytes": ratio(ours["bytes"], hand["bytes"], FEW),
            "cycles": ratio(ours["cycles"], hand["cycles"]),
            "temporaries": max(PAGE, ours["temporaries"]) / max(PAGE, hand["temporaries"]),
            "seconds": ratio(ours["seconds"], hand["seconds"]),
        }
    for what, few in ("bytes", FEW), ("seconds", 0.0):
        xla = best(sides, what)
        if what in ours and xla is not None:
            found[f"XLA {what}"] = ratio(ours[what], xla[what], few)
            if what in hand:
                found[f"XLA by hand {what}"] = ratio(xla[what], hand[what], few)
    return found


def row(name: str, sides: dict[str, Any]) -> str:
    """A line of the table."""
    r = compared(sides)
    cells = [cell(sides.get("by hand")), cell(sides.get("ours")), cell(best(sides, "bytes") or sides.get("XLA"))]
    keys = "bytes", "cycles", "temporaries", "seconds"
    return (
        f"{name:34}" + "".join(f"{c:<37} " for c in cells)
        + "|" + "".join(f"{r.get(k, math.nan):>8.2f}" for k in keys)
        + "   |" + "".join(f"{r.get(k, math.nan):>8.2f}" for k in ("XLA bytes", "XLA seconds"))
    )  # fmt: skip


def totals(found: dict[str, dict[str, Any]]) -> str:
    """Means, and the programs that are above what is aimed at."""
    rows = {name: compared(sides) for name, sides in found.items()}

    def mean(key: str) -> float:
        numbers = [r[key] for r in rows.values() if 0 < r.get(key, 0) < math.inf]
        return math.exp(sum(map(math.log, numbers)) / max(1, len(numbers)))

    def above(key: str, limit: float) -> list[str]:
        names = sorted((n for n, r in rows.items() if r.get(key, 0) > limit), key=lambda n: -rows[n][key])
        return [f"{n} {rows[n][key]:.2f}" for n in names]

    def means(of: str, keys: Sequence[str]) -> str:
        return ", ".join(f"{k} {mean(f'{of}{k}'):.3f}" for k in keys)

    lines = ["", "geometric means (without 0 and infinity)"]
    lines += [f"  ours by hand's    {means('', ('bytes', 'cycles', 'temporaries', 'seconds'))}"]
    lines += [f"  XLA's by hand's   {means('XLA by hand ', ('bytes', 'seconds'))}"]
    lines += [f"  ours by XLA's     {means('XLA ', ('bytes', 'seconds'))}"]
    lists = [
        ("only XLA sends", [n for n, r in rows.items() if r.get("XLA bytes") == 0.0]),
        ("XLA sends less than ours (aim: none)", above("XLA bytes", 1.0)),
        ("XLA is faster than ours", above("XLA seconds", 1.0)),
        (f"ours takes more than {NEAR} of the time by hand (aim: none)", above("seconds", NEAR)),
        (f"XLA takes more than {NEAR} of the time by hand", above("XLA by hand seconds", NEAR)),
        ("ours sends more than 1.05 of the bytes by hand", above("bytes", 1.05)),
        ("not compiled", [f"{n} ({s})" for n, x in found.items() for s in SIDES if "error" in x.get(s, {})]),
    ]
    lines += [f"{title}: {len(names)}{': ' if names else ''}{', '.join(names)}" for title, names in lists]
    return "\n".join(lines)
