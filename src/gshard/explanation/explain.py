"""Explanation: what the devices of a program send and hold, why, what a call takes, and what would make it faster.

Of a function that gshard partitions, or of a program that XLA compiled: ``print(gshard.explain(...))`` shows the
collectives with the user's lines and causes, and lists of what to know; ``format(tensors=12)`` also the largest arrays.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax

from gshard.core.errors import ArgumentError
from gshard.core.jax_adapter_tracebacks import without_our_frames_in_methods
from gshard.core.mesh import Mesh
from gshard.core.plan import Plan
from gshard.core.planning_tables import with_tables
from gshard.core.program import format_bytes
from gshard.core.spmd import SpmdProgram
from gshard.core.time_budget import TRIAL_SECONDS
from gshard.device.cost import CallTotals
from gshard.device.machine import Machine, MachineError, kind_of_devices, machine_of
from gshard.explanation.compiled_source import CompiledSource, source_of
from gshard.explanation.difference import Difference, difference
from gshard.explanation.plan_source import PlanSource
from gshard.explanation.report.data import report_data
from gshard.explanation.report.page import InNotebooks, page
from gshard.explanation.rows import (
    ArrayRow,
    CollectiveRow,
    array_lines,
    collective_lines,
    collective_rows,
    held_lines,
    lines_of_parts,
    listed_lines,
    sent_by,
    spent_by,
)
from gshard.explanation.trials import Instead, instead
from gshard.explanation.tried_changes import SECONDS, Advice
from gshard.explanation.verdict import Verdict

_Kind = TypeVar("_Kind", PlanSource, CompiledSource)
_Found = TypeVar("_Found")


@without_our_frames_in_methods
@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Explanation(InNotebooks):
    """Everything ``explain`` found; print it, or read its rows.

    Attributes:
        source: what was read: a plan of gshard's, or a program that XLA compiled.
        machine: what times are modelled on where no machine is named: what the plan was made for, or the devices that
            the program was compiled for. None if a plan was made by bytes or given, or the devices are not known.
    """

    source: PlanSource | CompiledSource
    machine: Machine | None = None

    @property
    def is_compiled(self) -> bool:
        """Whether this is what XLA compiled; else it is a plan of gshard's."""
        return isinstance(self.source, CompiledSource)

    def _only(self, kind: type[_Kind], member: str) -> _Kind:
        """The source for a member that only one kind of program has."""
        if isinstance(self.source, kind):
            return self.source
        by, others = ("XLA", "gshard") if kind is CompiledSource else ("gshard", "XLA")
        tried = "verdict(seconds=...) tries other marks, and instead(name) other shardings of an array."
        raise ArgumentError(
            f"{member} is for what {by} partitions, and {others} partitions this program.",
            got=f"{self.name}, {self.source.size}",
            hint=tried if kind is CompiledSource else 'Explain the function itself with partitioner="gshard".',
        )

    @property
    def plan(self) -> Plan:
        """The sharding of every value, of what gshard partitions."""
        return self._only(PlanSource, "plan").plan

    @property
    def spmd(self) -> SpmdProgram:
        """The per-device program, of what gshard partitions."""
        return self._only(PlanSource, "spmd").spmd

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.source.name

    @property
    def mesh(self) -> Mesh:
        """The devices."""
        return self.source.mesh

    @property
    def tensors(self) -> tuple[ArrayRow, ...]:
        """All arrays, largest first; of a compiled program the arguments."""
        return self.source.arrays

    @property
    def argument_bytes(self) -> tuple[int | None, int]:
        """Bytes of all arguments in the memory of the devices, whole (None if that is not known) and on one device."""
        return self.source.argument_bytes

    @property
    def collectives(self) -> tuple[CollectiveRow, ...]:
        """All collectives, most bytes first; those of equal layers in one row, which has them in ``moved``."""
        return self._rows(None if self.machine is None else self.cost())

    def _rows(self, found: Any) -> tuple[CollectiveRow, ...]:
        """The collectives with the seconds of a cost; without seconds for None."""

        def rows() -> tuple[CollectiveRow, ...]:
            return collective_rows(self.source.moved, {} if found is None else spent_by(self.source.kernels(found)))

        return self._once(("rows", None if found is None else found.machine), rows)

    def _once(self, key: Hashable, make: Callable[[], _Found]) -> _Found:
        """What is made once for a machine, and further arguments."""
        if key not in self._made:
            self._made[key] = make()
        found: _Found = self._made[key]
        return found

    @functools.cached_property
    def _made(self) -> dict[Hashable, Any]:
        return {}

    @property
    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes that each device sends in one call, by kind of collective; the largest first."""
        return {kind: size for kind, (_, size) in sorted(self._by_kind.items(), key=lambda pair: -pair[1][1])}

    @property
    def times_by_kind(self) -> dict[str, int]:
        """How many collectives of each kind run in one call; one that moves several arrays counts once."""
        return {kind: times for kind, (times, _) in self._by_kind.items()}

    @functools.cached_property
    def _by_kind(self) -> dict[str, tuple[int, int]]:
        return sent_by((one.kind, one) for one in self.source.moved)

    @property
    def total_bytes(self) -> int:
        """Bytes that each device sends in one call."""
        return sum(self.bytes_by_kind.values())

    @functools.cached_property
    def lists(self) -> dict[str, tuple[str, ...]]:
        """What to know of the program, as lists of lines by name.

        Of a plan: ``host`` (what is in the memory of the host, and moves);
        ``collective_matmuls``; ``recomputed``; ``replicated`` (work that devices repeat, and devices without work);
        ``pipelines``; ``batches``; ``returned`` (results that a ``jax.Array`` cannot hold in the shards of the plan);
        ``low_precision``; ``unused`` (marks and rows of the layout
        without effect); ``gathered`` (operations without a rule); ``dropped`` (features of the program that gshard
        does not keep). Of a compiled program: ``whole`` (large arguments that every device holds whole).
        """
        return {one.key: one.lines for one in self.source.lists}

    def _on(self, machine: Machine | str | None) -> Machine | None:
        """The machine that is named, the own one, or what the source tells; None if nothing does."""
        named = self.machine if machine is None else machine
        return self.source.machine() if named is None else Machine.read(named, self.mesh.size)

    def cost(self, machine: Machine | str | None = None) -> CallTotals:
        """Time, FLOPs, bytes and memory of one call, as modelled.

        Args:
            machine: what it would run on, or the text of one (``v3:32x32``); None takes what the plan was made for or
                the program compiled for, else the devices of the mesh, and CPUs for the abstract mesh of a plan. The
                plan does not change: to plan for another machine, give it to ``explain``.

        Raises:
            MachineError: no such machine, or not as many devices as the mesh; none is named, and there is no model of
                the devices. ArgumentError: none is named, and nothing tells what a program was compiled for.
        """
        on = self._on(machine)
        if on is None:
            raise ArgumentError(
                "no machine is known for this compiled program, so that no times are.",
                hint='Name one: machine="h100:1x8", on the command line --machine h100:1x8.',
            )
        return self._once(("cost", on), lambda: self.source.cost(on))

    @property
    def peak(self) -> int:
        """The most bytes that a device holds; of a plan as modelled, where ``cost`` has a machine."""
        return self.source.program.peak if isinstance(self.source, CompiledSource) else self.cost().peak

    @with_tables
    def verdict(self, machine: Machine | str | None = None, seconds: float = TRIAL_SECONDS) -> Verdict:
        """What bounds a call, in a few sentences, and of a plan the mark that would lower what is sent.

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
        found: Any = self.cost(machine)
        make = functools.partial(self.source.verdict, found, self._rows(found), self.machine, seconds)
        return self._once(("verdict", found.machine, seconds), make)

    @with_tables
    def data(
        self,
        machine: Machine | str | None = None,
        seconds: float = TRIAL_SECONDS,
        tried: Sequence[Advice] = (),
    ) -> dict[str, Any]:
        """Everything the HTML report shows, as JSON can hold it.

        Args:
            machine: as for ``cost``; if nothing tells what a program was compiled for, all times are 0, and ``machine``
                of the data is None.
            seconds: as for ``verdict``.
            tried: what ``advise`` found, to be shown with the rest.
        """
        on = self._on(machine)
        if on is None:
            found = self.source.cost(Machine.read("cpu", self.mesh.size))  # operations and memory depend on none
            data = report_data(self.source, found, self._rows(None), None)
        else:
            told = self.verdict(on, seconds)
            data = report_data(self.source, told.cost, self._rows(told.cost), told)
        return {**data, "lists": [*data["lists"], *(("tried", *one.lines) for one in tried)]}

    def difference(self, before: Explanation | Mapping[str, Any], machine: Machine | str | None = None) -> Difference:
        """What became more and what less against another explanation, by line of the source.

        Args:
            before: an explanation, or its ``data``; of a plan or of a compiled program.
            machine: as for ``cost``, of both.
        """
        return difference(_data_of(before, machine), _data_of(self, machine))

    def html(
        self,
        path: str | Path,
        machine: Machine | str | None = None,
        against: Explanation | Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Path:
        """Writes the report as one HTML file that needs no network.

        Args:
            path: where to.
            machine: as for ``data``.
            against: shows the difference to this one, line by line; as for ``difference``.
            options: more arguments of ``data``.

        Returns:
            the path.
        """
        data = self.data(machine, **options)
        if against is not None:
            data["difference"] = difference(_data_of(against, machine), data).data()
        Path(path).write_text(page(data), "utf-8")
        return Path(path)

    def _page_data(self) -> dict[str, Any] | None:
        try:
            return self.data()
        except MachineError:  # there is no model of the devices
            return None

    @with_tables
    def format(
        self,
        tensors: int = 0,
        collectives: int = 12,
        machine: Machine | str | None = None,
        seconds: float = 0.0,
    ) -> str:
        """The report as text.

        Args:
            tensors, collectives: how many rows of arguments and of values inside, and of collectives, at most.
            machine: whose times and verdict are shown; None takes the own ``machine``, and without one shows none.
            seconds: as for ``verdict``.
        """
        source, (whole, local), on = self.source, self.argument_bytes, self.machine if machine is None else machine
        found: Any = None if on is None else self.cost(on)
        rows, lists = self._rows(found), listed_lines(source.lists)
        of_all = "" if whole is None else f"{format_bytes(whole)} in all, "
        shared = "; x1/2 is one message with arrays of 2 rows" * any(row.sharing > 1 for row in rows)
        each = ", ".join(f"{kind} {format_bytes(n)}" for kind, n in self.bytes_by_kind.items())
        own = [row for row in self.tensors if row.is_argument]
        inside = [row for row in self.tensors if not row.is_argument]
        lines = [
            f"{self.name} on {self.mesh.size} devices ({self.mesh}), {source.size}",
            f"arguments: {of_all}{format_bytes(local)} on each device",
            *(lists if self.is_compiled else []),
            *array_lines("arguments", own, tensors),
            *array_lines("values inside", inside, tensors),
            "",
            f"collectives ({sum(self.times_by_kind.values()):,} in one call{shared})",
            *collective_lines(rows, collectives),
            f"  each device sends {format_bytes(self.total_bytes)} in one call{f': {each}' if each else ''}",
            *lines_of_parts(rows[:collectives], self.mesh),
            *(held_lines(source.held(found), most=3) if self.is_compiled or found is not None else []),
            *([] if self.is_compiled else lists),
            *([] if found is None else ["", str(self.verdict(on, seconds))]),
        ]
        return "\n".join(lines)

    def why(self, name: str) -> str:
        """The chain of reasons for one tensor, from its sharding back to a mark, of what gshard partitions.

        Args:
            name: a printed name: an argument, ``params/up`` or ``params['up']``, ``%2`` for a value inside,
                ``train.py:9`` for the largest value that the line makes, or the array of a collective, such as
                ``gradient of w``.

        Raises:
            ArgumentError: there is no tensor of this name; or XLA compiled the program.
        """
        row = self._only(PlanSource, "why").row_called(name)
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
            ArgumentError: there is no tensor of this name; or XLA compiled the program.
            MachineError: no such machine, or not as many devices as the mesh.

        >>> import gshard, jax.numpy as jnp
        >>> f = lambda x, w: gshard.split(x, 0, 8) @ w
        >>> found = gshard.explain(f, jnp.ones((64, 512)), jnp.ones((512, 32)), mesh=gshard.Mesh.abstract(devices=8))
        >>> [row.mark for row in found.instead("w", "h100")]
        ["gshard.shard(x, P('devices', None))", "gshard.shard(x, P(None, 'devices'))"]
        """
        source = self._only(PlanSource, "instead")
        found: Any = self.cost(machine)
        return instead(source.plan, source.row_called(name).value, found, sorted(source.donated), source.marked)

    @with_tables
    def advise(self, seconds: float = SECONDS, progress: bool | Callable[[str], object] | None = False) -> Advice:
        """What to write so that XLA sends less: a few sharding constraints, or other shardings of arguments.

        gshard plans the same function. Where XLA moves what the plan does not, the values get the shardings of the plan
        as ``jax.lax.with_sharding_constraint`` in the traced function, as if you had written them there: all together
        first, then fewer and fewer, as long as nearly all of the saving stays. Then it tries to remove
        constraints of yours, and to split arguments otherwise. All is proved by compiling.

        A constraint helps if it lowers the modelled time, or the bytes sent at no more time, and raises the peak of
        memory by 5 % at most; without a machine, if it lowers the bytes sent, and at most 2 % more is computed.
        Another sharding of arguments helps if it lowers bytes, memory or time, and raises none of them.

        Args:
            seconds: how long to go on, about: each program is compiled once. With 0 only gshard plans.
            progress: False for none, True for a line on stderr for each program, None for such lines after two
                seconds, or a function that takes each line.

        Returns:
            at most six changes, each with what to write at which line and what it brings alone; what they bring
            together; and what gshard's partitioner would send. Print it.

        Raises:
            ArgumentError: this is a program that was compiled elsewhere: there is no function to compile again; or
                gshard partitions it.
        """
        return self._only(CompiledSource, "advise").advise(self.machine, seconds, progress)

    def __str__(self) -> str:
        return self.format()

    __repr__ = __str__


def read_compiled(
    compiled: jax.stages.Compiled,
    mesh: Mesh | None = None,
    machine: str | Machine | None = None,
    out_tree: Any = None,
    names: Mapping[str, str] | None = None,
) -> Explanation:
    """Explains what JAX compiled; other arguments as for ``source_of``.

    The default machine are the devices for which it was compiled, if gshard has a model of them; none for CPUs, which
    mostly stand for other devices.
    """
    source = source_of(compiled, mesh, out_tree, names)
    on = source.mesh
    if machine is None and on.devices is not None and kind_of_devices(on) not in (None, "cpu"):
        machine = machine_of(on)
    return Explanation(source, None if machine is None else Machine.read(machine, on.size))


def _data_of(side: Explanation | Mapping[str, Any], machine: Machine | str | None) -> Mapping[str, Any]:
    """The data of an explanation, without other marks, which a difference does not show; data that is given stays."""
    return side.data(machine, 0.0) if isinstance(side, Explanation) else side
