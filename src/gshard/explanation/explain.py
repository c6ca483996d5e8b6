"""Explanation: the sharding of each array with its reasons, and the collectives of a program.

``print(gshard.explain(loss, params, batch, mesh=8))`` shows collectives with the user's lines and causes, what a layout
came to, operations without a rule and what is dropped; ``format(tensors=12)`` also the largest arrays.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from gshard.core.errors import MeshError
from gshard.core.jax_adapter_tracebacks import without_our_frames_in_methods
from gshard.core.memory_kinds import shape_in_memory
from gshard.core.planning_tables import with_tables
from gshard.core.program import format_bytes
from gshard.core.spmd import SpmdProgram
from gshard.device.cost import Cost, cost, origins
from gshard.device.machine import Machine, machine_of, unknown_devices
from gshard.emit.compile import compile_spmd, named_sharding
from gshard.explanation.compiled_explanation import read_compiled
from gshard.explanation.difference import Difference, difference
from gshard.explanation.explained_plan import ExplainedPlan
from gshard.explanation.report.data import report_data
from gshard.explanation.report.page import framed
from gshard.explanation.rows import (
    TensorRow,
    collective_lines,
    lines_of_parts,
    merged,
    row_called,
    rows_of,
    tensor_lines,
    text_of_rings,
)
from gshard.explanation.timeline import trace_of
from gshard.explanation.trials import Instead, Trials, instead, trials
from gshard.explanation.verdict import Verdict, verdict
from gshard.explanation.warnings import moved_instead, unsplit_work
from gshard.search.time_budget import TRIAL_SECONDS
from gshard.xla.peer import xla_function


@without_our_frames_in_methods
@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class Explanation(ExplainedPlan):
    """Everything ``explain`` found; print it, or read its rows.

    Attributes:
        marked: what all devices would run if the program had other marks, also planned by bytes.
        machine: what the plan was made for; None if by bytes, or given.
        by_bytes: whether it is the plan that sends least.
        planning_seconds: what planning took, and with other marks takes about again; 0 if not measured.
    """

    marked: Callable[..., SpmdProgram]
    machine: Machine | None = None
    by_bytes: bool = False
    planning_seconds: float = 0.0

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
    def verdict(self, machine: Machine | str | None = None, seconds: float = TRIAL_SECONDS) -> Verdict:
        """What bounds a call, in a few sentences, and the mark that would lower what is sent.

        Args:
            machine: as for ``cost``.
            seconds: how long to plan again with other marks, about: 0 tries none, ``math.inf`` all. None is tried if
                planning took longer than that and than 10 s.

        >>> import gshard, jax.numpy as jnp
        >>> f = lambda x, w: gshard.split(x, 1, 8) @ w
        >>> found = gshard.explain(f, jnp.ones((64, 512)), jnp.ones((512, 32)), mesh=gshard.Mesh.abstract(devices=8))
        >>> found.verdict("v3:2x2").bound
        'latency'
        """
        return self._verdict(self.cost(machine), seconds)

    def _verdict(self, found: Cost, seconds: float) -> Verdict:
        rows = merged(self.spmd, found, self.names)
        takes_long = self.planning_seconds > max(seconds, TRIAL_SECONDS)
        by_bytes = (
            functools.partial(self.marked, by_bytes=True) if self.machine is not None and not takes_long else None
        )
        unsplit = unsplit_work(self.plan, found, self.names, by_bytes)
        return verdict(self.plan, found, rows, self._trials(seconds), self.by_bytes, self.machine, unsplit)

    def _trials(self, seconds: float) -> Trials:
        if seconds not in self._tried:
            rows = rows_of(self.spmd.collectives, self.names)
            self._tried[seconds] = trials(rows, self.plan, self.marked, seconds=seconds, one=self.planning_seconds)
        return self._tried[seconds]

    @functools.cached_property
    def _tried(self) -> dict[float, Trials]:
        return {}

    @with_tables
    def data(self, machine: Machine | str | None = None, seconds: float = TRIAL_SECONDS) -> dict[str, Any]:
        """Everything the HTML report shows, as JSON can hold it; arguments as for ``verdict``."""
        found = self.cost(machine)
        return report_data(self, found, merged(self.spmd, found, self.names), self._verdict(found, seconds))

    def _compared(self, machine: Machine | str | None) -> Mapping[str, Any]:
        return self.data(machine, 0.0)  # a difference shows no other marks

    def against_xla(self, machine: Machine | str | None = None) -> Difference:
        """The difference from XLA's own partitioner, given the same marks, to this, as XLA compiles both, by line.

        Args:
            machine: as for ``cost``.

        Raises:
            MeshError: the mesh is abstract: XLA compiles for devices that exist.
        """
        if self.mesh.devices is None:
            raise MeshError(
                "XLA cannot compile for an abstract mesh.",
                got=f"mesh: {self.mesh}",
                hint="Explain for devices that exist: mesh=8, with "
                "XLA_FLAGS=--xla_force_host_platform_device_count=8 on one CPU.",
            )
        program, on = self.plan.program, self.cost(machine).machine
        given = enumerate(self.spmd.in_shardings)
        shardings = [named_sharding(self.mesh, s, program.input_memory(i)) for i, s in given]
        donated = tuple(len(program.captured) + i for i in self.donated)
        theirs = jax.jit(xla_function(program, self.mesh), in_shardings=shardings, donate_argnums=donated)
        takes = [shape_in_memory(v.shape, v.dtype, on_host=v.on_host) for v in program.block.inputs]
        pair = theirs.lower(*takes).compile(), compile_spmd(self.spmd, self.donated).compiled
        before, after = (read_compiled(compiled, self.mesh, on).data() for compiled in pair)
        name = f"{program.name} by"
        return difference(before | {"name": f"{name} XLA's partitioner"}, after | {"name": f"{name} gshard"})

    def _trace(self, machine: Machine | str | None) -> dict[str, Any]:
        found = self.cost(machine)
        return trace_of(found, origins(self.spmd, found), self.name)

    def _repr_html_(self) -> str | None:
        """The report in a frame, for notebooks; None, which shows the text, where there is no model of the devices."""
        if unknown_devices(self.mesh) is not None:
            return None
        return framed(self.data(), self.name)

    @with_tables
    def format(self, tensors: int = 0, collectives: int = 12) -> str:
        """The report as text, with at most so many rows of arguments and of values inside, and of collectives."""
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
        lines.append(self._sent_line)
        lines += lines_of_parts(self.collectives[:collectives], self.mesh)
        lines += self.host.lines
        lines += [] if self.plan.spared is None else ["", text_of_rings(self.plan, *self.plan.spared)]
        if self.spmd.recomputed is not None:
            lines += ["", str(self.spmd.recomputed)]
        lists = [(title, texts) for _, title, _, texts in self.lists]
        moved = tuple(map(str, moved_instead(self.plan)))
        lists.insert(1, ("operands gathered because moving the larger arrays sends less", moved))
        for title, texts in lists:
            lines += ["", title, *(f"  {text}" for text in texts)] if texts else []
        return "\n".join(lines)

    def why(self, name: str) -> str:
        """The chain of reasons for one tensor, from its sharding back to a mark.

        Args:
            name: a printed name: an argument, ``params/up`` or ``params['up']``, ``%2`` for a value inside,
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

    def __str__(self) -> str:
        return self.format()

    __repr__ = __str__
