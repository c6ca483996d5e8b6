"""Explanation: the sharding of each array with its reasons, and the collectives of a program.

print(gshard.explain(loss, params, batch, mesh=8))

tensors     the largest ones: sharding, bytes of one device's part, the reasons back to a mark
collectives kind, how often, bytes that each device sends, axes, the user's line, what needed it
layout      what names of dimensions came to, if there is one
gathered    operations without a rule, if there are any
dropped     what the program says and gshard does not keep, if there is any
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gshard.core.errors import ArgumentError
from gshard.core.jax_adapter_tracebacks import without_our_frames_in_methods
from gshard.core.mesh import Mesh
from gshard.core.plan import Plan
from gshard.core.planning_tables import with_tables
from gshard.core.program import Program, format_bytes
from gshard.core.spmd import SpmdProgram
from gshard.device.cost import Cost, cost
from gshard.device.hardware import machine_of, unknown_devices
from gshard.device.machine import Machine
from gshard.device.origin import origins
from gshard.explanation.difference import Comparable, Difference, data_of, difference
from gshard.explanation.host_memory import HostMemory, host_memory
from gshard.explanation.merged_collectives import merged, rows_of
from gshard.explanation.moved_instead import moved_instead
from gshard.explanation.peer_lines import against_xla
from gshard.explanation.purposes import Purposes, purposes_of
from gshard.explanation.report.data import report_data
from gshard.explanation.report.page import framed, page
from gshard.explanation.row_text import collective_lines, lines_of_parts, tensor_lines
from gshard.explanation.rows import CollectiveRow, TensorRow, row_called, text_of_rings
from gshard.explanation.timeline import trace_of
from gshard.explanation.trials import SECONDS, Trials, trials
from gshard.explanation.unsplit_work import unsplit_work
from gshard.explanation.value_costs import Compared, ValueCosts, value_costs
from gshard.explanation.verdict import Verdict, verdict
from gshard.explanation.what_if import Instead, instead
from gshard.naming.array_names import ArrayNames


@without_our_frames_in_methods
@dataclasses.dataclass(frozen=True, repr=False)
class Explanation:
    """Everything ``explain`` found; print it, or read its rows.

    Attributes:
        name: the function.
        mesh: the devices.
        equations: number of equations, bodies included.
        tensors: all arrays, largest first.
        collectives: all collectives, most bytes first; those of equal layers in one row;
        all_rows: and each layer by itself.
        gathered: operations without a rule: line, operation, operands, bytes gathered on every device.
        argument_bytes: bytes of all arguments in the memory of the devices, whole and on one device.
        plan: what it was read from;
        spmd: and the per-device program.
        marked: what all devices would run if the program had other marks;
        marked_by_bytes: and if it were planned by bytes, where ``marked`` plans for a machine.
        names: what its arrays are called, and in which module each operation is.
        donated: arguments whose memory results may take.
        replicated: axes whose devices repeat each other's work, dimensions with too few elements for their devices;
            operations that every device computes whole although an operand is split: line, how many times its share,
            bytes spared, the mark that forbids it.
        layout: how many values each row of the layout applies to, which names are open, where the order of rules
            decided;
        unused: marks whose results nothing reads, and parts of the layout that apply to nothing.
        machine: what the plan was made for; None if by bytes, or given.
        by_bytes: whether it is the plan that sends least.
        dropped: what the program says and gshard does not keep: line, parameter, value, what is done instead.
        choice: what planning or a search chose, and from what; None for a plan that was given, or is a preset.
        low_precision: arrays that marks with ``send`` round: line, arrays, dtype, error bound.
        returned: results that a ``jax.Array`` cannot hold in the shards of the plan: these, those that are returned,
            the bytes of both on a device, the way out.
    """

    name: str
    mesh: Mesh
    equations: int
    tensors: tuple[TensorRow, ...]
    collectives: tuple[CollectiveRow, ...]
    all_rows: tuple[CollectiveRow, ...]
    gathered: tuple[str, ...]
    argument_bytes: tuple[int, int]
    plan: Plan = dataclasses.field(repr=False)
    spmd: SpmdProgram = dataclasses.field(repr=False)
    marked: Callable[[Program], SpmdProgram] = dataclasses.field(repr=False)
    names: ArrayNames = dataclasses.field(repr=False)
    donated: frozenset[int] = frozenset()
    replicated: tuple[str, ...] = ()
    layout: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    by_bytes: bool = False
    machine: Machine | None = None
    dropped: tuple[str, ...] = ()
    marked_by_bytes: Callable[[Program], SpmdProgram] | None = dataclasses.field(default=None, repr=False)
    choice: Callable[[], Compared | None] | None = dataclasses.field(default=None, repr=False)
    returned: tuple[str, ...] = ()
    low_precision: tuple[str, ...] = ()

    def cost(self, machine: Machine | str | None = None) -> Cost:
        """Time, FLOPs, bytes and memory of one call.

        Args:
            machine: what it would run on, or the text of one (``v3:32x32``); None takes what the plan was made for, or
                else the devices of the mesh, and CPUs for an abstract one. The plan does not change: to plan for
                another machine, give it to ``explain``.

        Raises:
            MachineError: no such machine, or not as many devices as the mesh; none is named, and there is no model of
                the devices.
        """
        machine = self.machine if machine is None else machine
        on = machine_of(self.mesh) if machine is None else Machine.read(machine, self.mesh.size)
        return cost(self.spmd, on, self.donated)

    @with_tables
    def verdict(self, machine: Machine | str | None = None, seconds: float = SECONDS) -> Verdict:
        """What bounds a call, in a few sentences, and the mark that would lower what is sent.

        Args:
            machine: as for ``cost``.
            seconds: how long to plan again with other marks, about: 0 tries none, ``math.inf`` all.

        >>> import gshard, jax.numpy as jnp
        >>> f = lambda x, w: gshard.split(x, 1, 8) @ w
        >>> found = gshard.explain(f, jnp.ones((64, 512)), jnp.ones((512, 32)), mesh=gshard.Mesh.abstract(devices=8))
        >>> found.verdict("v3:2x2").bound
        'latency'
        """
        return self._verdict(self.cost(machine), seconds)

    def _verdict(self, found: Cost, seconds: float) -> Verdict:
        rows = merged(self.spmd, found, self.names)
        unsplit = unsplit_work(self.plan, found, self.names, self.marked_by_bytes)
        return verdict(self.plan, found, rows, self._trials(seconds), self.by_bytes, self.machine, unsplit)

    def _trials(self, seconds: float) -> Trials:
        if seconds not in self._tried:
            rows = rows_of(self.spmd.collectives, self.names)
            self._tried[seconds] = trials(rows, self.plan, self.marked, by_bytes=self.marked_by_bytes, seconds=seconds)
        return self._tried[seconds]

    @functools.cached_property
    def _tried(self) -> dict[float, Trials]:
        return {}

    @with_tables
    def data(self, machine: Machine | str | None = None, seconds: float = SECONDS) -> dict[str, Any]:
        """Everything the HTML report shows, as JSON can hold it; arguments as for ``verdict``."""
        found = self.cost(machine)
        return report_data(self, found, merged(self.spmd, found, self.names), self._verdict(found, seconds))

    def html(
        self,
        path: str | Path,
        machine: Machine | str | None = None,
        against: Comparable | Mapping[str, Any] | None = None,
        seconds: float = SECONDS,
    ) -> Path:
        """Writes the report as one HTML file that needs no network.

        Args:
            path: where to.
            machine: as for ``cost``.
            against: shows the difference to this one, line by line; as for ``difference``.
            seconds: as for ``verdict``.

        Returns:
            the path.
        """
        path, data = Path(path), self.data(machine, seconds)
        if against is not None:
            data["difference"] = self._difference(data, against, machine).data()
        path.write_text(page(data), "utf-8")
        return path

    def difference(self, before: Comparable | Mapping[str, Any], machine: Machine | str | None = None) -> Difference:
        """What became more and what less against another explanation, by line of the source.

        Args:
            before: another explanation, of gshard's program or of XLA's, or what its ``data`` gave: the content of a
                file of ``gshard explain --json``.
            machine: as for ``cost``; for both.

        Raises:
            DifferenceError: ``before`` is no explanation, or was written by another version.
        """
        return self._difference(self.data(machine), before, machine)

    def _difference(self, data: Mapping[str, Any], before: Any, machine: Machine | str | None) -> Difference:
        return difference(data_of(before, machine), data)

    def against_xla(self, machine: Machine | str | None = None) -> Difference:
        """The difference from XLA's own partitioner, given the same marks, to this: bytes, products, time by line.

        Args:
            machine: as for ``cost``.

        Raises:
            MeshError: the mesh is abstract: XLA compiles for devices that exist.
        """
        return against_xla(self.plan, self.spmd, self.donated, self.cost(machine).machine, self.data(machine))

    def trace(self, path: str | Path, machine: Machine | str | None = None) -> Path:
        """Writes the modelled timeline of a call in the Trace Event Format, for ui.perfetto.dev or chrome://tracing.

        Args:
            path: where to.
            machine: as for ``cost``.

        Returns:
            the path.
        """
        path, found = Path(path), self.cost(machine)
        events = trace_of(found, origins(self.spmd, found), self.name)
        path.write_text(json.dumps(events, separators=(",", ":"), allow_nan=False), "utf-8")
        return path

    def _repr_html_(self) -> str | None:
        """The report in a frame, for notebooks; None, which shows the text, where there is no model of the devices."""
        if unknown_devices(self.mesh) is not None:
            return None
        return framed(self.data(), self.name)

    @functools.cached_property
    def host(self) -> HostMemory:
        """What is in the memory of the host, and what moves between host and device in one call."""
        return host_memory(self.spmd)

    @property
    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes that each device sends in one call, by kind of collective."""
        total: dict[str, int] = {}
        for row in self.collectives:
            total[row.kind] = total.get(row.kind, 0) + row.bytes
        return total

    @property
    def total_bytes(self) -> int:
        """Bytes that each device sends in one call."""
        return sum(row.bytes for row in self.collectives)

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

    def format(self, tensors: int = 12, collectives: int = 30) -> str:
        """The report as text with at most so many rows of each kind; with 0 ``tensors`` of the collectives only."""
        whole, local = self.argument_bytes
        lines = [
            f"{self.name} on {self.mesh.size} devices ({self.mesh}), {self.equations} equations",
            f"arguments: {format_bytes(whole)} in all, {format_bytes(local)} on each device",
        ]
        if self.by_bytes and (called := unknown_devices(self.mesh)) is not None:
            lines.append(f"no model of {called}: planned by bytes")
        own = [row for row in self.tensors if row.is_argument]
        inside = [row for row in self.tensors if not row.is_argument]
        lines += tensor_lines("arguments", own, tensors) if tensors else []
        lines += tensor_lines("values inside", inside, tensors) if tensors else []
        lines += ["", f"collectives ({sum(r.times for r in self.collectives)} in one call)"]
        lines += collective_lines(self.collectives, collectives)
        kinds = ", ".join(
            f"{kind} {format_bytes(n)}" for kind, n in sorted(self.bytes_by_kind.items(), key=lambda kv: -kv[1])
        )
        lines.append(f"  each device sends {format_bytes(self.total_bytes)} in one call{': ' + kinds if kinds else ''}")
        lines += lines_of_parts(self.collectives[:collectives], self.mesh)
        lines += self.host.lines
        lines += [] if self.plan.spared is None else ["", text_of_rings(self.plan, *self.plan.spared)]
        if self.spmd.recomputed is not None:
            lines += ["", str(self.spmd.recomputed)]
        if self.spmd.prefetched is not None:
            lines += ["", str(self.spmd.prefetched)]
        moved = tuple(map(str, moved_instead(self.plan)))
        for title, texts in (
            ("work that every device repeats, and devices without work", self.replicated),
            ("operands gathered because moving the larger arrays sends less", moved),
            ("loops that run as pipelines", self.plan.program.pipelines),
            ("equal functions of separate arrays, computed in one batch", self.plan.program.batches),
            ("results returned in fewer shards than they have inside: a jax.Array cannot have these", self.returned),
            ("arrays in low precision, by marks with send=", self.low_precision),
            ("layout", self.layout),
            (
                "marks and rows of the layout without effect, probably by mistake (strict=True refuses them)",
                self.unused,
            ),
            (
                "operators without a rule: gshard gathers their operands, and every device repeats the work",
                self.gathered,
            ),
            ("features of the program that gshard drops (strict=True refuses them)", self.dropped),
        ):
            lines += ["", title, *(f"  {text}" for text in texts)] if texts else []
        return "\n".join(lines)

    def why(self, name: str) -> str:
        """The chain of reasons for one tensor, from its sharding back to a mark.

        Args:
            name: a printed name: an argument, by its short name or its whole path, ``%2`` for a value inside,
                ``train.py:9`` for the largest value that the line makes, or the array of a collective, such as
                ``gradient of w``.

        Raises:
            ArgumentError: there is no tensor of this name.
        """
        row = self._row(name)
        return "\n".join([f"{row.name}: {row.sharding}", *(f"  {line}" for chain in row.why for line in chain)])

    @with_tables
    def instead(self, name: str, machine: Machine | str | None = None) -> tuple[Instead, ...]:
        """What else a tensor could be, and what a call would then take: planned again with a mark on it, each time.

        Args:
            name: as for ``why``.
            machine: as for ``cost``.

        Returns:
            the fastest first; none for a value that has a mark already or enters a body.

        Raises:
            ArgumentError: there is no tensor of this name.
            MachineError: no such machine, or not as many devices as the mesh.

        >>> import gshard, jax.numpy as jnp
        >>> f = lambda x, w: gshard.split(x, 0, 8) @ w
        >>> found = gshard.explain(f, jnp.ones((64, 512)), jnp.ones((512, 32)), mesh=gshard.Mesh.abstract(devices=8))
        >>> [row.mark for row in found.instead("w", "h100")]
        ["gshard.shard(x, P('devices', None))", "gshard.shard(x, P(None, 'devices'))"]
        """
        row = self._row(name)
        return instead(self.plan, row.value, self.cost(machine), sorted(self.donated), self.marked)

    def _row(self, name: str) -> TensorRow:
        return row_called(self.tensors, name, self.names, self.spmd.collectives)

    @functools.cached_property
    def _compared(self) -> Compared | None:
        return None if self.choice is None else self.choice()

    @with_tables
    def costs(self, name: str) -> ValueCosts:
        """The shardings that planning compared for a tensor: the cost of the best plan with each, split by cause.

        Each sharding takes another solution of the problem that planning solved.

        Args:
            name: as for ``why``.

        Returns:
            the shardings, the cheapest first, in the unit of the plan: bytes sent, or seconds on its machine.

        Raises:
            ArgumentError: there is no tensor of this name; the plan was given, or is a preset of a search, so that
                nothing was compared.

        >>> import gshard, jax.numpy as jnp
        >>> f = lambda x, w: gshard.split(x, 0, 8) @ w
        >>> found = gshard.explain(f, jnp.ones((64, 512)), jnp.ones((512, 32)), mesh=gshard.Mesh.abstract(devices=8))
        >>> found.costs("%3").chosen.sharding
        'f32[64@devices,32]'
        """
        row = self._row(name)
        if self.choice is None:
            raise ArgumentError(
                f"nothing was compared for {name!r}: the plan was given, or is a preset of a search.",
                hint="Explain the function without plan= and search=.",
            )
        choice = self._compared
        group = choice.graph.groups.of if choice is not None else {}
        others = [
            x.short or x.name for x in self.tensors if x is not row and group.get(x.value) == group.get(row.value)
        ]
        return value_costs(choice, row, others, self.machine)

    def __str__(self) -> str:
        return self.format()

    __repr__ = __str__
