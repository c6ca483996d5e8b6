"""Defines the per-device program and the records of its collectives and of recomputation."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from gshard.core.mark import Order
from gshard.core.memory_kinds import DEVICE
from gshard.core.mesh import Mesh
from gshard.core.program import Equation, Program, Value, format_block, short_dtype
from gshard.core.sharding import Sharding


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    """One collective of the per-device program."""

    kind: str  # all_gather, all_reduce, reduce_scatter, all_to_all or collective_permute
    atoms: tuple[str, ...]  # the atoms of the mesh over which it runs
    bytes: int  # bytes that each device sends in one run
    times: int  # number of runs in one call of the program
    shape: str  # the local operand, as text
    line: str  # the user's source line of its cause
    why: str  # what requires it, as text
    value: Value | None = None  # the array that it moves; None for a collective inside ``Rule.local`` of an equation
    before: Sharding | None = None  # before, after: the shardings of this array
    after: Sharding | None = None
    source: Sharding | None = None  # the sharding of this array before the first step of the whole reshard
    # the equation of ``line``. Its result must be combined or moved, or it requires an operand to be moved.
    cause: Equation | None = None
    # the equation at whose position in the per-device program it runs. gshard moves a result where it is first used, so
    # this equation may be later than the cause.
    emitted: Equation | None = None

    @property
    def total_bytes(self) -> int:
        """Bytes that each device sends in one call of the program."""
        return self.bytes * self.times


def by_kind(rows: Iterable[tuple[str, int]]) -> Counter[str]:
    """The sums of the numbers of each kind of collective: bytes, or runs."""
    found: Counter[str] = Counter()
    for kind, number in rows:
        found[kind] += number
    return found


RECOMPUTED = "recomputed to save memory"  # ``Collective.why`` of the recomputation of a value
_SHOWN = 15  # printed rows of recomputed values


@dataclasses.dataclass(frozen=True, slots=True)
class Recomputation:
    """Values that are recomputed instead of stored across the peak of memory."""

    name: str  # the primitive that computes the largest of the values
    line: str  # the user's source line of this primitive
    shape: str  # one device's part of the largest value, as text; in loops of all iterations together
    values: int  # the number of values that are recomputed together
    freed: int  # bytes freed at the peak


@dataclasses.dataclass(frozen=True)
class Recomputed:
    """The recomputation that a memory limit has added to a program."""

    limit: int  # bytes that a device may hold
    before: int  # before, after: the modelled peak in bytes, without and with recomputation
    after: int
    flops: int  # floating-point operations of one call on one device, without recomputation
    flops_again: int  # floating-point operations that are repeated
    values: tuple[Recomputation, ...]  # the recomputed values, in the order in which they were chosen

    @property
    def share(self) -> float:
        """The repeated operations as a fraction of the operations without recomputation."""
        return self.flops_again / max(self.flops, 1)

    def __str__(self) -> str:
        mib = 2**20
        lines = [
            f"recomputed to fit in {self.limit / mib:,.1f} MiB: peak {self.before / mib:,.1f} -> "
            f"{self.after / mib:,.1f} MiB, {100 * self.share:.1f} % more FLOPs"
        ]
        rows: dict[tuple[str, str, str], tuple[int, int]] = {}
        for v in self.values:
            n, freed = rows.get((v.name, v.line, v.shape), (0, 0))
            rows[v.name, v.line, v.shape] = (n + v.values, freed + v.freed)
        ordered = sorted(rows.items(), key=lambda row: -row[1][1])
        for (name, line, shape), (n, freed) in ordered[:_SHOWN]:
            lines.append(f"  {freed / mib:>10,.1f} MiB  x{n:<4} {shape:<24} {name} at {line}")
        if rest := ordered[_SHOWN:]:
            lines.append(f"  {sum(freed for _, (_, freed) in rest) / mib:>10,.1f} MiB  in {len(rest)} more rows")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True, eq=False)
class SpmdProgram:
    """The per-device program."""

    jaxpr: Any  # a closed jaxpr with one ``shard_map`` equation, inside which each array is one device's part
    mesh: Mesh
    in_shardings: tuple[Sharding, ...]  # of the inputs, captured arrays first
    out_shardings: tuple[Sharding, ...]
    collectives: tuple[Collective, ...]  # all of the program
    program: Program  # what was partitioned
    # The device orders of inputs and results, by number, that differ from the order of the mesh. The program reads and
    # writes their parts as if they were in the order of the mesh.
    in_orders: Mapping[int, Order] = dataclasses.field(default_factory=dict)
    out_orders: Mapping[int, Order] = dataclasses.field(default_factory=dict)
    recomputed: Recomputed | None = None  # what makes the program fit a memory limit

    def identified(self) -> str:
        """A text that identifies the program. It is equal in all processes that run the same program."""
        block = self.program.block
        mesh = self.mesh
        values = (*block.inputs, *block.outputs)
        shardings = (*self.in_shardings, *self.out_shardings)
        lines = [f"mesh {mesh}"]
        lines += [s.format(mesh, v.shape, short_dtype(v.dtype)) for v, s in zip(values, shardings, strict=True)]
        for what, kinds in (("input", self.program.input_memories), ("result", self.program.output_memories)):
            lines += [f"{what} {i} in {kind}" for i, kind in enumerate(kinds) if kind != DEVICE]
        for what, orders in (("input", self.in_orders), ("result", self.out_orders)):
            lines += [f"{what} {i} in the order of devices {order}" for i, order in orders.items()]
        for c in self.collectives:
            over = f"{c.kind} over {mesh.format_atoms(c.atoms)}"
            lines.append(f"{c.times} x {over}, {c.shape}, {c.bytes} B: {c.why} at {c.line}")
        return "\n".join([*lines, format_block(block)])

    def __str__(self) -> str:
        return f"spmd program {self.program.name} on {self.mesh}\n{self.jaxpr}"
