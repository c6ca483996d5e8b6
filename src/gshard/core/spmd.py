"""SpmdProgram: the one program that all devices run, and what they say to each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from gshard.core.mesh import Mesh
from gshard.core.order import Order
from gshard.core.program import Program, Value
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
        line: the user's source line.
        why: what needed it.
        value: the array that is moved, None inside an equation's own way to run on shards.
        before, after: how it lay and lies.
        source: how it lay before the first of the steps of which this is one.
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

    @property
    def total_bytes(self) -> int:
        """Bytes that each device sends in one call of the program."""
        return self.bytes * self.times


@dataclasses.dataclass(frozen=True, eq=False)
class SpmdProgram:
    """The per-device program.

    Attributes:
        jaxpr: a closed jaxpr with one ``shard_map`` equation; inside it every array is one device's part.
        mesh: the mesh it is for.
        in_shardings, out_shardings: how the program's inputs (captured arrays first) and results lie.
        collectives: everything the devices say to each other.
        in_orders, out_orders: inputs and results (by number) whose parts lie in another order of devices than the
            mesh's. The program takes and gives their parts as they lie, as if that were the mesh's order.
    """

    jaxpr: Any
    mesh: Mesh
    in_shardings: tuple[Sharding, ...]
    out_shardings: tuple[Sharding, ...]
    collectives: tuple[Collective, ...]
    program: Program
    in_orders: Mapping[int, Order] = dataclasses.field(default_factory=dict)
    out_orders: Mapping[int, Order] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        return f"spmd program {self.program.name} on {self.mesh}\n{self.jaxpr}"
