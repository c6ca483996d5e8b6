"""Computes the rows and lists of an explanation from a plan and its per-device program."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter

from gshard.core.memory_kinds import is_host_kind
from gshard.core.mesh import Mesh
from gshard.core.plan import Plan, local_bytes
from gshard.core.planning_tables import with_tables
from gshard.core.spmd import SpmdProgram
from gshard.explanation.comparable import Comparable
from gshard.explanation.host_memory import HostMemory, host_memory
from gshard.explanation.idle import idle_devices
from gshard.explanation.layout_usage import unused_of_layout, uses_of_layout
from gshard.explanation.purposes import Purposes, purposes_of
from gshard.explanation.replicated import Replicated, notes_of_whole_values, replicated_work
from gshard.explanation.returned import returned_in_fewer_shards
from gshard.explanation.rows import (
    CollectiveRow,
    TensorRow,
    rows_of_collectives,
    rows_of_equal_layers,
    rows_of_tensors,
)
from gshard.explanation.sent_narrow import sent_narrow
from gshard.naming.array_names import ArrayNames


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class ExplainedPlan(Comparable):
    """A plan and its per-device program, with the rows and lists that explain them."""

    plan: Plan  # the sharding of every value
    spmd: SpmdProgram  # the per-device program
    donated: frozenset[int] = frozenset()  # arguments whose memory results may take

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.plan.program.name

    @property
    def mesh(self) -> Mesh:
        """The devices."""
        return self.plan.mesh

    @property
    def equations(self) -> int:
        """Number of equations, bodies included."""
        return sum(1 for _ in self.plan.program.block.walk())

    @functools.cached_property
    def names(self) -> ArrayNames:
        """What its arrays are called, and in which module each operation is."""
        return ArrayNames(self.plan.program)

    @functools.cached_property
    def tensors(self) -> tuple[TensorRow, ...]:
        """All arrays, largest first."""
        return rows_of_tensors(self.plan, self.names, notes_of_whole_values(self.plan, self._replicated_work))

    @functools.cached_property
    def collectives(self) -> tuple[CollectiveRow, ...]:
        """All collectives, most bytes first; those of equal layers in one row."""
        return rows_of_equal_layers(self.spmd.collectives, self.mesh, self.names)

    @functools.cached_property
    def all_rows(self) -> tuple[CollectiveRow, ...]:
        """The same with each layer by itself."""
        return rows_of_collectives(self.spmd.collectives, self.mesh, self.names)

    @property
    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes that each device sends in one call, by kind of collective."""
        total: Counter[str] = Counter()
        for row in self.collectives:
            total[row.kind] += row.bytes
        return dict(total)

    @property
    def purposes(self) -> Purposes:
        """What the collectives are for, in the terms of data, fully sharded and tensor parallelism; prints as lines.

        >>> import gshard, jax.numpy as jnp
        >>> f = lambda x, w: gshard.split(x, 1, 8) @ w
        >>> found = gshard.explain(f, jnp.ones((64, 512)), jnp.ones((512, 32)), mesh=gshard.Mesh.abstract(devices=8))
        >>> [(row.kind, row.purpose) for row in found.purposes]
        [('all_reduce', 'sums partial results of products whose summed dimension is split')]
        """
        return purposes_of(self.plan, self.spmd.collectives, self.names)

    @property
    def argument_bytes(self) -> tuple[int, int]:
        """Bytes of all arguments in the memory of the devices, whole and on one device."""
        program = self.plan.program
        held = [v for i, v in enumerate(program.block.inputs) if not is_host_kind(program.input_memory(i))]
        return sum(v.bytes for v in held), sum(local_bytes(v, self.plan.shardings[v], self.mesh) for v in held)

    @functools.cached_property
    def host(self) -> HostMemory:
        """What is in the memory of the host, and what moves between host and device in one call."""
        return host_memory(self.spmd, self.names)

    @functools.cached_property
    @with_tables
    def _replicated_work(self) -> tuple[Replicated, ...]:
        return replicated_work(self.plan)

    @functools.cached_property
    def replicated(self) -> tuple[str, ...]:
        """Work that devices repeat.

        Axes whose devices repeat each other's work, dimensions with too few elements for their devices; operations that
        every device computes whole although an operand is split: line, how many times its share, bytes spared, the mark
        that forbids it.
        """
        return (*idle_devices(self.plan, self.names), *map(str, self._replicated_work))

    @property
    def lists(self) -> tuple[tuple[str, str, str, tuple[str, ...]], ...]:
        """The lists of lines: key in the data, title in the text, title on the page if it is another, and the lines."""
        program = self.plan.program
        return (
            ("replicated", "work that every device repeats, and devices without work", "", self.replicated),
            ("pipelines", "loops that run as pipelines", "", program.pipelines),
            ("batches", "equal functions of separate arrays, computed in one batch", "", program.batches),
            (
                "returned",
                "results returned in fewer shards than they have inside: a jax.Array cannot have these",
                "Results returned in fewer shards than they have inside",
                self.returned,
            ),
            ("low_precision", "arrays in low precision, by marks with send=", "", self.low_precision),
            ("layout", "layout", "", self.layout),
            (
                "unused",
                "marks and rows of the layout without effect, probably by mistake (strict=True refuses them)",
                "Marks and rows of the layout without effect",
                self.unused,
            ),
            (
                "gathered",
                "operators without a rule: gshard gathers their operands, and every device repeats the work",
                "No rule, so operands are gathered",
                self.gathered,
            ),
            (
                "dropped",
                "features of the program that gshard drops (strict=True refuses them)",
                "Said by the program and not kept",
                self.dropped,
            ),
        )

    @property
    def gathered(self) -> tuple[str, ...]:
        """Operations without a rule: line, operation, operands, bytes gathered on every device."""
        return tuple(self.plan.gathered_text())

    @property
    def dropped(self) -> tuple[str, ...]:
        """Features of the program that gshard does not keep: line, parameter, value, what gshard does instead."""
        return tuple(map(str, self.plan.program.dropped))

    @property
    def layout(self) -> tuple[str, ...]:
        """How many values each row of the layout applies to, which names are open, where the order of rules decided."""
        return uses_of_layout(self.plan.program)

    @property
    def unused(self) -> tuple[str, ...]:
        """Marks whose results nothing reads, and parts of the layout that apply to nothing."""
        program = self.plan.program
        return (*program.unread_marks, *unused_of_layout(program, self.mesh))

    @functools.cached_property
    def returned(self) -> tuple[str, ...]:
        """Results that a ``jax.Array`` cannot hold in the shards of the plan.

        Each with these shards, those that are returned, the bytes of both on a device, and the way out.
        """
        return returned_in_fewer_shards(self.plan, self.names)

    @property
    def low_precision(self) -> tuple[str, ...]:
        """Arrays that marks with ``send`` round: line, arrays, dtype, error bound."""
        return sent_narrow(self.plan.program, self.names)
