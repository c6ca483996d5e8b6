"""SpmdProgram: the program of one device, and the collectives in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from gshard.core.device_order import Order
from gshard.core.memory_kinds import DEVICE
from gshard.core.mesh import Mesh
from gshard.core.program import Equation, Program, Value, format_block, short_dtype
from gshard.core.sharding import Sharding


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    """One collective of the per-device program.

    Attributes:
        kind: all_gather, all_reduce, reduce_scatter, all_to_all or collective_permute.
        atoms: the atoms of the mesh it runs over.
        bytes: bytes that each device sends in one run.
        times: how often it runs in one call of the program.
        shape: the local operand, as text.
        line: the user's source line of what caused it.
        why: what needed it.
        value: the array that is moved, None inside an equation's own way to run on shards.
        before, after: its shardings.
        source: its sharding before the first step of the whole reshard.
        cause: the equation of ``line``: it makes what must be combined or moved, or needs an operand moved.
        emitted: the equation in whose place in the per-device program it runs. What an equation makes is moved where
            it is first used, so this may be a later line than the cause's.
    """

    kind: str
    atoms: tuple[str, ...]
    bytes: int
    times: int
    shape: str
    line: str
    why: str
    value: Value | None = None
    before: Sharding | None = None
    after: Sharding | None = None
    source: Sharding | None = None
    cause: Equation | None = None
    emitted: Equation | None = None

    @property
    def total_bytes(self) -> int:
        """Bytes that each device sends in one call of the program."""
        return self.bytes * self.times


RECOMPUTED = "recomputed to save memory"  # why a collective runs that belongs to a value that was not kept
_SHOWN = 15  # rows of what is recomputed


@dataclasses.dataclass(frozen=True, slots=True)
class Recomputation:
    """Values that are recomputed instead of being kept over the peak of memory.

    Attributes:
        name: the operation that makes the largest of them.
        line: the user's source line of it.
        shape: the largest, one device's part, as text; in loops all rounds together.
        values: how many values are recomputed together.
        freed: bytes.
        seconds: what it takes, as modelled; only an order where there is no model of the devices.
    """

    name: str
    line: str
    shape: str
    values: int
    freed: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Recomputed:
    """What a limit of memory did to a program.

    Attributes:
        limit: bytes that a device may hold.
        before, after: the modelled peak without recomputation, and with it.
        flops: operations of one call without recomputation, on one device.
        flops_again: operations that are done once more.
        values: what is recomputed, in the order in which it was chosen.
    """

    limit: int
    before: int
    after: int
    flops: int
    flops_again: int
    values: tuple[Recomputation, ...]

    @property
    def share(self) -> float:
        """Operations that are done again by all others."""
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


@dataclasses.dataclass(frozen=True)
class Prefetched:
    """What loops gather a round before it is needed.

    Attributes:
        without, seconds: of a call, as modelled, if they did not, and as they do.
        machine: the name of the machine that this is of.
        lines: the user's source lines for which something is gathered so.
    """

    without: float
    seconds: float
    machine: str
    lines: tuple[str, ...]

    def __str__(self) -> str:
        return (
            "gathered one iteration early, beside the products of the previous iteration: a call on "
            f"{self.machine} takes {self.seconds * 1e3:.4g} instead of {self.without * 1e3:.4g} ms\n"
            + "\n".join(f"  {line}" for line in self.lines)
        )


@dataclasses.dataclass(frozen=True, eq=False)
class SpmdProgram:
    """The per-device program.

    Attributes:
        jaxpr: a closed jaxpr with one ``shard_map`` equation; inside it every array is one device's part.
        mesh: the mesh it is for.
        in_shardings, out_shardings: how the program's inputs (captured arrays first) and results are sharded.
        collectives: everything the devices send each other.
        in_orders, out_orders: inputs and results (by number) whose parts are in another order of devices than the
            mesh's. The program takes and gives their parts as they are, as if that were the mesh's order.
        recomputed: what is recomputed so that the program fits, if it was given a limit that it did not fit.
        prefetched: what loops gather a round before it is needed, if that is faster.
    """

    jaxpr: Any
    mesh: Mesh
    in_shardings: tuple[Sharding, ...]
    out_shardings: tuple[Sharding, ...]
    collectives: tuple[Collective, ...]
    program: Program
    in_orders: Mapping[int, Order] = dataclasses.field(default_factory=dict)
    out_orders: Mapping[int, Order] = dataclasses.field(default_factory=dict)
    recomputed: Recomputed | None = None
    prefetched: Prefetched | None = None

    def identified(self) -> str:
        """What every process must have in common to run it, as text: the same for the same program anywhere."""
        block, mesh = self.program.block, self.mesh
        values, shardings = (*block.inputs, *block.outputs), (*self.in_shardings, *self.out_shardings)
        lines = [f"mesh {mesh}"]
        lines += [s.format(mesh, v.shape, short_dtype(v.dtype)) for v, s in zip(values, shardings, strict=True)]
        memories = (("input", self.program.input_memories), ("result", self.program.output_memories))
        lines += [f"{what} {i} in {kind}" for what, every in memories for i, kind in enumerate(every) if kind != DEVICE]
        for what, orders in (("input", self.in_orders), ("result", self.out_orders)):
            lines += [f"{what} {i} in the order of devices {order}" for i, order in orders.items()]
        for c in self.collectives:
            over = f"{c.kind} over {mesh.format_atoms(c.atoms)}"
            lines.append(f"{c.times} x {over}, {c.shape}, {c.bytes} B: {c.why} at {c.line}")
        return "\n".join([*lines, format_block(block)])

    def __str__(self) -> str:
        return f"spmd program {self.program.name} on {self.mesh}\n{self.jaxpr}"
