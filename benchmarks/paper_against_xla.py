"""Claim: the paper's models take no more memory, bytes and estimated time than under XLA's own partitioner.

A training step of a model of Table 1 is compiled by libtpu for a real TPU v3 topology (no TPU is needed): partitioned
by gshard with the marks of section 3.2 and no others (or with none, or with one more), and by XLA. XLA is given the
same marks as sharding constraints, then also what an expert would write:

- the shardings of all arguments and results, and both sides of each reshard (``expert``);
- what is recomputed: pairs of layers, or each branch but for what all-to-alls bring (``-branches``);
- gradients split over all devices, so that each device updates its part of each weight (``-zero``).

Which shardings these are is what gshard found, so that XLA is not left alone with a worse plan. Memory is the
compiler's. Cycles are the compiler's own estimate, which counts no collective: they are to be read beside the bytes
that a device must send, which are read off the compiled programs. A TPU v3 has no reduce-scatter, so that each is an
all-reduce there of which a part is taken; what a machine that has one would send is the column beside it.

    pip install libtpu    # the version that belongs to jaxlib
    python benchmarks/paper_against_xla.py [--rows ours,expert,expert-zero] ["MoE(128E, 12L)" v3:8x8 ...]
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from paper_models import configured, lower, lowered_as_searched
from peer import Marked, xla_function
from tpu_schedules import estimated_cycles

import gshard
from gshard.core.mesh import Mesh
from gshard.core.plan import Plan
from gshard.core.program import Constant, Equation, Program, Value
from gshard.core.rule import operand_sharding, result_sharding
from gshard.core.sharding import Sharding
from gshard.emit.compile import named_sharding
from gshard.moe.config import TransformerConfig
from gshard.moe.transformer import param_specs
from gshard.remat.rematerialise import MemoryLimitError, peak_of
from gshard.xla import hlo_collectives
from gshard.xla.described import described_mesh
from gshard.xla.hlo_parser import Computation, Instruction, Module, read_module, type_bytes

MODELS = ("MoE(128E, 12L)", "v3:8x8", "MoE(2048E, 12L)", "v3:32x32", "MoE(2048E, 36L)", "v3:32x32")
_TILE = (8, 128)  # of the last two dimensions of an array on a TPU


@dataclasses.dataclass(frozen=True)
class Row:
    """A way to have the step compiled.

    Attributes:
        text: what is printed.
        given: to XLA: ``marks``, also our ``arguments``, also ``both sides`` of reshards, or ``every value``; None is
            gshard.
        remat: what the function recomputes, see ``TransformerConfig``.
        zero: whether gradients are marked as split over all devices.
        limited: whether ``--memory-limit`` is kept, by gshard's own recomputation.
        searched: whether the marks are taken away and the plan is searched.
    """

    text: str
    given: str | None = None
    remat: bool | str = True
    zero: bool = False
    limited: bool = False
    searched: bool = False


ROWS = {
    "ours": Row("gshard, pairs again"),
    "ours-branches": Row("gshard, branches again", remat="branches"),
    "ours-zero": Row("gshard, pairs again, ZeRO", zero=True),
    "ours-zero-branches": Row("gshard, branches, ZeRO", remat="branches", zero=True),
    "ours-limit": Row("gshard, its own, limit", remat=False, limited=True),
    "ours-zero-limit": Row("gshard, limit, ZeRO", remat=False, zero=True, limited=True),
    "ours-searched": Row("gshard, searched, limit", limited=True, searched=True),
    "own": Row("XLA, marks", "marks"),
    "arguments": Row("XLA, marks, arguments", "arguments"),
    "values": Row("XLA, every value as ours", "every value"),
    "expert": Row("XLA expert, pairs again", "both sides"),
    "expert-branches": Row("XLA expert, branches again", "both sides", remat="branches"),
    "expert-kept": Row("XLA expert, all kept", "both sides", remat=False),
    "expert-zero": Row("XLA expert, pairs, ZeRO", "both sides", zero=True),
    "expert-zero-branches": Row("XLA expert, branches, ZeRO", "both sides", remat="branches", zero=True),
}


def split_gradients(config: TransformerConfig, devices: int) -> Any:
    """Marks that split the gradients of all weights which every device holds: ZeRO, as an annotation."""

    def marked(gradients: Any) -> Any:
        def of_weight(spec: Any, gradient: Any) -> Any:
            if "experts" in spec.dims:
                return gradient
            ways = [(d, math.gcd(n, devices)) for d, n in enumerate(gradient.shape) if spec.dims[d] != "layers"]
            dim, parts = min(ways, key=lambda way: _padded(gradient.shape, *way))
            return gshard.split(gradient, dim, parts) if parts > 1 else gradient

        return jax.tree.map(of_weight, param_specs(config), gradients)

    return marked


def _padded(shape: tuple[int, ...], dim: int, parts: int) -> int:
    """Elements of a device's part with those that fill its tiles."""
    local = [n // parts if d == dim else n for d, n in enumerate(shape)]
    tiles = (*(1,) * (len(local) - 2), *_TILE)[-len(local) :]
    return math.prod(-(-n // tile) * tile for n, tile in zip(local, tiles, strict=True))


@dataclasses.dataclass(frozen=True)
class EveryValue(Marked):
    """Every value of a plan is a constraint."""

    plan: Plan | None = None

    def equation(self, e: Equation, inputs: Sequence[Any]) -> Sequence[Any]:
        """Runs an equation; its results have the shardings of the plan."""
        assert self.plan is not None
        results = super().equation(e, inputs)
        return [self.constrained(x, v, self.plan.sharding(v)) for x, v in zip(results, e.outputs, strict=True)]

    def constrained(self, x: Any, value: Value | Constant, planned: Sharding) -> Any:
        """An array that is constrained to a sharding, if JAX has it."""
        if planned.unreduced or not planned.is_even(self.mesh, value.shape) or not value.shape:
            return x
        spec = jax.sharding.PartitionSpec(*(atoms or None for atoms in planned.dims))
        return jax.lax.with_sharding_constraint(x, jax.sharding.NamedSharding(self.mesh.jax_mesh, spec))


class BothSides(EveryValue):
    """Both sides of each all-to-all of a plan are constraints."""

    def equation(self, e: Equation, inputs: Sequence[Any]) -> Sequence[Any]:
        """Runs an equation; what is split along other dimensions on its way in or out is constrained twice."""
        assert self.plan is not None
        split, arrays = self.plan.splits.get(e, {}), list(inputs)
        for i, v in enumerate(e.inputs):
            enters = self.plan.sharding(e.outputs[0]) if e.mark else operand_sharding(e.operator_rule, i, split)
            arrays[i] = self._turned(arrays[i], v, self.plan.sharding(v), enters)
        results = Marked.equation(self, e, arrays)
        if e.mark:
            return results
        return [
            self._turned(x, v, result_sharding(e.operator_rule, i, split), self.plan.sharding(v))
            for i, (x, v) in enumerate(zip(results, e.outputs, strict=True))
        ]

    def _turned(self, x: Any, value: Value | Constant, before: Sharding, after: Sharding) -> Any:
        if before.dims == after.dims or _atoms(before) != _atoms(after):
            return x
        return self.constrained(self.constrained(x, value, before), value, after)


def _atoms(sharding: Sharding) -> set[str]:
    return {atom for atoms in sharding.dims for atom in atoms}


def of_both_sides(program: Program, mesh: Mesh, plan: Plan) -> Callable[..., list[Any]]:
    """A function of the program's flat inputs in which both sides of each all-to-all of a plan are constraints."""
    return lambda *arrays: BothSides(mesh, plan=plan).run(program.block, arrays)


def compiled(name: str, topology: str, row: Row, limit: str) -> Any:
    """The compiled program; raises what the compiler raises."""
    config, machine = configured(name, topology, row.remat)
    mesh = described_mesh(machine)
    if row.searched:
        return lowered_as_searched(config, mesh, machine, None, limit, True, print)[1].executable.compiled
    marked = {"marked": split_gradients(config, mesh.size)} if row.zero else {}
    lowered, _ = lower(config, mesh, memory_limit=limit if row.limited else None, machine=machine, **marked)
    if row.given is None:
        return lowered.executable.compiled
    program, captured = lowered.program, len(lowered.program.captured)
    f = xla_function(program, mesh)
    if row.given == "both sides":
        f = of_both_sides(program, mesh, lowered.plan)
    if row.given == "every value":
        every = EveryValue(mesh, plan=lowered.plan)
        f = lambda *arrays: every.run(program.block, arrays)  # noqa: E731
    given = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in program.block.inputs]
    where: dict[str, Any] = {}
    # Its own choice needs to be told no more than which devices there are, which the marks do.
    if row.given != "marks":
        where["in_shardings"] = [named_sharding(mesh, s) for s in lowered.spmd.in_shardings]
    if row.given == "both sides":
        where["out_shardings"] = [named_sharding(mesh, s) for s in lowered.spmd.out_shardings]
    donated = tuple(captured + i for i in lowered.donated)
    return jax.jit(f, donate_argnums=donated, keep_unused=True, **where).lower(*given).compile()


def scattered(text: str) -> float:
    """Bytes that a device would send less of all-reduces of which it takes a part, were they reduce-scatters."""
    module = read_module(text)
    spared = 0.0
    for sent in hlo_collectives.collectives_of(module):
        computation, made, c = module.computations[sent.inside], sent.itself, sent
        if made.opcode == "all-reduce":
            sizes = [type_bytes(x.type) for x in map(computation.instructions.get, made.operands) if x is not None]
            for i, size in enumerate(sizes):
                if _is_sliced(module, computation, made.name, i if len(sizes) > 1 else None):
                    spared += c.executions * size * (1 - 1 / c.group_size)
    return spared


def _is_sliced(module: Module, computation: Computation, name: str, at: int | None = None) -> bool:
    """Whether all that reads a result, or one of its elements, takes a slice of it."""
    users = [x for x in computation.instructions.values() if name in x.operands]
    if at is not None:
        users = [x for x in users if re.search(rf"\bindex={at}\b", x.attributes)]
    return bool(users) and all(_takes_a_slice(module, computation, x, name) for x in users)


def _takes_a_slice(module: Module, computation: Computation, user: Instruction, name: str) -> bool:
    if user.opcode in ("bitcast", "get-tuple-element", "copy", "reshape", "transpose"):
        return _is_sliced(module, computation, user.name)
    if user.opcode == "fusion":
        inner = module.computations[user.called("calls")[0]]
        inputs = [x for x in inner.instructions.values() if x.opcode == "parameter"]
        entered = [x for x in inputs if user.operands[int(x.literal)] == name]
        return all(_is_sliced(module, inner, x.name) for x in entered)
    return user.opcode == "dynamic-slice" and user.operands[0] == name


def measure(name: str, topology: str, row: Row, limit: str) -> None:
    """Prints one row: GiB of memory, sent and on wires, million cycles, then kinds; or why there is none."""
    start = time.perf_counter()
    try:
        found = compiled(name, topology, row, limit)
    except (jax.errors.JaxRuntimeError, MemoryLimitError) as error:
        print(f"FAILED\t{' '.join(str(error).split())[:200]}\t{time.perf_counter() - start:.0f}")
        return
    text = found.as_text()
    kinds = hlo_collectives.summary(hlo_collectives.collectives(text))
    sent = sum(n for _, n in kinds.values())
    sizes = (peak_of(found), sent, sent - scattered(text))
    numbers = (*(n / 2**30 for n in sizes), estimated_cycles(text) / 1e6)
    shown = ", ".join(f"{kind} x{n} {size / 2**30:.2f}" for kind, (n, size) in kinds.items())
    print("\t".join(["MEASURED", *(f"{n:.3f}" for n in numbers), shown, f"{time.perf_counter() - start:.0f}"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS), help="name and topology, in turns")
    parser.add_argument("--rows", default=",".join(ROWS), help=f"all by default: {', '.join(ROWS)}")
    parser.add_argument("--memory-limit", default="11GiB", help="of the rows that keep one")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.rows.split(",")
    if unknown := set(names) - set(ROWS):
        parser.error(f"no rows: {', '.join(sorted(unknown))}")
    if options.one:
        measure(options.models[0], options.models[1], ROWS[names[0]], options.memory_limit)
        return
    for name, topology in zip(options.models[::2], options.models[1::2], strict=True):
        print(f"\n{name} on {topology}; jax {jax.__version__}, memory limit {options.memory_limit}", flush=True)
        heads = "".join(f"{text:>12}" for text in ("memory, GiB", "sent, GiB", "scattered"))
        print(f"  {'':28}{heads}{'Mcycles':>10}   collectives, GiB", flush=True)
        for row in names:
            # A process for each: a compiler that gives up takes what it held with it.
            command = [sys.executable, __file__, "--one", "--rows", row, "--memory-limit", options.memory_limit]
            done = subprocess.run([*command, "--", name, topology], capture_output=True, text=True, check=False)
            rows = [line.split("\t") for line in done.stdout.splitlines() if line.startswith(("MEASURED", "FAILED"))]
            if not rows:
                raise SystemExit(f"{name}, {ROWS[row].text}: {done.stderr[-2000:]}")
            kind, *cells = rows[-1]
            if kind == "FAILED":
                print(f"  {ROWS[row].text:28}{cells[0]} ({cells[1]} s)", flush=True)
                continue
            numbers = "".join(f"{x:>12}" for x in cells[:3]) + f"{float(cells[3]):>10.1f}"
            print(f"  {ROWS[row].text:28}{numbers}   {cells[4]} ({cells[5]} s)", flush=True)


if __name__ == "__main__":
    main()
