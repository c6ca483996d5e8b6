"""Compiled explanation: a program as XLA compiled it: its collectives, what causes them, its time and its memory.

Everything is read from the text of the compiled program, so it is the same for programs of XLA's partitioner, of
``jax.shard_map`` and of gshard, and for CPU, GPU and TPU.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
from jax.sharding import NamedSharding

from gshard.core.errors import ArgumentError
from gshard.core.jax_adapter import user_line
from gshard.core.mesh import Mesh
from gshard.core.paths import path_of
from gshard.core.program import format_bytes
from gshard.device.machine import Machine, kind_of_devices, machine_of
from gshard.explanation.compiled_cost import CompiledCost, CompiledVerdict, compiled_cost
from gshard.explanation.compiled_program import (
    WHOLE,
    CompiledArgument,
    CompiledProgram,
    ReadSharding,
    memory_figures,
    read_program,
    sharding_of_spec,
)
from gshard.explanation.compiled_report import CompiledReport
from gshard.explanation.compiled_rows import (
    CompiledRow,
    Part,
    Regathered,
    argument_lines,
    collective_lines_of,
    compiled_rows,
    memory_lines,
    parts_of,
    regathered,
    regathered_lines,
    whole_arguments,
    whole_lines,
)
from gshard.explanation.constraint_candidates import Planned, constraints_to_try
from gshard.explanation.difference import Comparable
from gshard.explanation.report.page import framed
from gshard.explanation.traced_expressions import TracedProgram
from gshard.explanation.tried_changes import (
    SECONDS,
    Change,
    Figures,
    Specs,
    Tried,
    constraint_helps,
    sharding_changes,
    sharding_helps,
    try_changes,
)
from gshard.search.time_budget import Progress

# What JAX and XLA raise for a program with a sharding that they do not support, or that jax.jit was given otherwise.
_REFUSED = (jax.errors.JaxRuntimeError, ValueError, TypeError, NotImplementedError)
_OF_PROGRAM = ("parts", "arguments", "whole", "regathered", "bytes_by_kind", "times_by_kind")


@dataclasses.dataclass(frozen=True, eq=False)
class CompiledAgain:
    """What compiles an explained function once more, with other shardings or constraints."""

    # for each argument of the program the array that the user gives, as ``jax.ShapeDtypeStruct`` with its sharding;
    # None if it is not known
    leaves: tuple[Any, ...]
    traced: Callable[[], Any]  # the jaxpr of the function
    # compiles and explains a jaxpr in its place, with other shardings of some arguments
    instead: Callable[[Any, Specs], CompiledExplanation]
    # the sharding that gshard plans for each value; it takes the seconds after which it gives up
    planned: Callable[[float], Planned]

    def compiled(self, specs: Specs, changed: Callable[[Any], Any] = lambda jaxpr: jaxpr) -> CompiledExplanation | None:
        """Compiles the function with other shardings and a changed jaxpr; None if JAX or XLA refuses it."""
        jaxpr = self.traced()
        try:
            return self.instead(changed(jaxpr), specs)
        except _REFUSED:
            return None


@dataclasses.dataclass(frozen=True, repr=False)
class CompiledExplanation(Comparable):
    """What a compiled program sends, holds and computes; print it, or read its rows.

    Attributes:
        program: what was read.
        machine: what its times are modelled on where none is named; None if the devices are not known.
        again: what compiles the function again, with other shardings or constraints; None for a program that was
            compiled elsewhere.
    """

    program: CompiledProgram
    machine: Machine | None = None
    again: CompiledAgain | None = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def name(self) -> str:
        """The function."""
        return self.program.name

    @property
    def mesh(self) -> Mesh:
        """The devices."""
        return self.program.mesh

    @functools.cached_property
    def collectives(self) -> tuple[CompiledRow, ...]:
        """The collectives, most bytes first; those of equal layers in one row."""
        return compiled_rows(self.program, self.parts, None if self.machine is None else self.cost().by_collective)

    @functools.cached_property
    def parts(self) -> tuple[Part, ...]:
        """The arrays that collectives move, one by one, in the order of the program."""
        return parts_of(self.program)

    @functools.cached_property
    def arguments(self) -> tuple[CompiledArgument, ...]:
        """The arguments, largest first."""
        return tuple(sorted(self.program.arguments, key=lambda a: -(a.bytes or a.local_bytes)))

    @functools.cached_property
    def whole(self) -> tuple[CompiledArgument, ...]:
        """The large arguments that every device holds whole, largest first."""
        return whole_arguments(self.program)

    @functools.cached_property
    def regathered(self) -> tuple[Regathered, ...]:
        """Arrays that are gathered although each device then keeps a part only, most bytes first."""
        return regathered(self.program, self.parts)

    @functools.cached_property
    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes that each device sends in one call, by kind of collective; the largest first."""
        total: Counter[str] = Counter()
        for sent in self.program.sent:
            total[sent.collective.kind] += sent.collective.total_bytes
        return dict(total.most_common())

    @functools.cached_property
    def times_by_kind(self) -> dict[str, int]:
        """How many collectives of each kind run in one call; one that moves several arrays counts once."""
        total: Counter[str] = Counter()
        for sent in self.program.sent:
            total[sent.collective.kind] += sent.collective.executions
        return dict(total)

    @property
    def peak(self) -> int:
        """The most bytes that a device holds."""
        return self.program.peak

    def on(self, machine: Machine | str) -> CompiledExplanation:
        """The same with the times of another machine.

        Args:
            machine: the devices, such as ``h100:1x8``, or the name of a kind for as many as the program runs on.

        Raises:
            MachineError: no such machine, or not as many devices as the program runs on.
        """
        there = dataclasses.replace(self, machine=Machine.read(machine, self.mesh.size))
        # What depends on no machine is read once.
        vars(there).update({name: vars(self)[name] for name in _OF_PROGRAM if name in vars(self)})
        return there

    @functools.cached_property
    def _own_cost(self) -> CompiledCost:
        if self.machine is None:
            raise ArgumentError(
                "no machine is known for this compiled program, so that no times are.",
                hint='Name one: machine="h100:1x8", on the command line --machine h100:1x8.',
            )
        return compiled_cost(self.program, self.machine)

    def cost(self, machine: Machine | str | None = None) -> CompiledCost:
        """Time, FLOPs, bytes and memory of one call, as modelled.

        Args:
            machine: as for ``on``; None takes the devices that the program was compiled for.

        Raises:
            MachineError: no such machine, or not as many devices as the program runs on.
            ArgumentError: none is named, and nothing tells what the program was compiled for.
        """
        return self._own_cost if machine is None else self.on(machine)._own_cost

    def verdict(self, machine: Machine | str | None = None) -> CompiledVerdict:
        """What bounds a call, in a few sentences; arguments and errors as for ``cost``."""
        there = self if machine is None else self.on(machine)
        return CompiledVerdict(there._own_cost, there.collectives, self.program.platform)

    def try_shardings(self, seconds: float = SECONDS) -> Tried:
        """Compiles the function with other shardings of its arguments, and tells which lower bytes, memory or time.

        Each dimension of an argument that causes traffic, or that every device holds whole, is split over each axis of
        the mesh. A change is kept if it lowers what each device sends, the peak of its memory or the modelled time, and
        raises none of them.

        Args:
            seconds: how long to go on, about: each change is one compilation.

        Returns:
            the changes that help, the best first, each with what the program takes; print it.

        Raises:
            ArgumentError: this is a program that was compiled elsewhere: there is no function to compile again.
        """
        again = self._again("other shardings")

        def compiled(changes: Sequence[Change]) -> Figures | None:
            specs = {i: change.spec for change in changes for i in change.arguments if change.spec is not None}
            return self._figures_of(again.compiled(specs))

        changes = list(sharding_changes(self.program, self.parts, again.leaves)) if seconds > 0 else []
        return try_changes(self.figures, "other shardings of arguments", changes, compiled, sharding_helps, seconds)

    def try_constraints(
        self, seconds: float = SECONDS, progress: bool | Callable[[str], object] | None = False
    ) -> Tried:
        """Compiles the function with sharding constraints on values inside, and tells which lower time or bytes.

        For the values that collectives move, and for the constraints that the function has, a few shardings are tried.
        Each is put into the traced program as if you had written ``jax.lax.with_sharding_constraint`` there: on the
        value of the expression, and on its cotangent in the gradient. A constraint helps if it lowers
        the modelled time, or the bytes sent at no more time, and raises the peak of memory by 5 % at most. Without a
        machine it helps if it lowers the bytes sent, and at most 2 % more is computed.

        Args:
            seconds: how long to go on, about: each constraint is one compilation. Planning with gshard, whose shardings
                are among those that are tried, takes a quarter of it at most.
            progress: False for none, True for a line on stderr for each constraint, None for such lines after two
                seconds, or a function that takes each line.

        Returns:
            the constraints that help, the best first, each with what to write at which line and what the program then
            takes; and what those that help together take, compiled together. Print it.

        Raises:
            ArgumentError: this is a program that was compiled elsewhere: there is no function to compile again.
        """
        again, began = self._again("sharding constraints"), time.monotonic()
        mesh, before = self.mesh.user_jax_mesh, self.figures
        assert isinstance(mesh, jax.sharding.Mesh), "it was compiled for devices"
        if seconds <= 0:
            return try_changes(before, "sharding constraints inside", (), lambda _: None, sharding_helps, seconds)
        program = TracedProgram(again.traced())
        planned = again.planned(seconds / 4)
        found, notes = constraints_to_try(self.collectives, program, mesh, planned)
        changes = [Change(f"{c.text}  ({c.expression.type})", c.spec, constraint=c) for c in found]
        shown = dataclasses.replace(Progress.of(progress), name="gshard.explain")
        numbers = itertools.count(1)

        def compiled(some: Sequence[Change]) -> Figures | None:
            first = f"a constraint, {next(numbers)} of {len(changes)}: {some[0].text}" if len(some) == 1 else ""
            shown.step(f"compiling with {first or f'{len(some)} constraints'}")
            constraints = [change.constraint for change in some if change.constraint is not None]
            return self._figures_of(again.compiled({}, lambda _: program.with_constraints(constraints, mesh)))

        left = max(seconds - (time.monotonic() - began), 1e-3)
        return try_changes(
            before, "sharding constraints inside", changes, compiled,
            lambda now, then: constraint_helps(now, then, before.peak), left, notes,
        )  # fmt: skip

    def _again(self, what: str) -> CompiledAgain:
        if self.again is None:
            raise ArgumentError(
                f"a program that was compiled elsewhere cannot be compiled with {what}.",
                hint="Give gshard.explain the function from jax.jit and its arguments.",
            )
        return self.again

    def _figures_of(self, other: CompiledExplanation | None) -> Figures | None:
        """What the function takes, compiled again with a change; None if JAX or XLA refuses it."""
        return None if other is None else (other if self.machine is None else other.on(self.machine)).figures

    @property
    def figures(self) -> Figures:
        """What the program takes."""
        messages, cost = sum(self.times_by_kind.values()), self._operations
        seconds = 0.0 if self.machine is None else cost.seconds
        return Figures(self.total_bytes, self.peak, seconds, messages, cost.flops)

    @property
    def _operations(self) -> CompiledCost:
        """The cost; without a machine for its operations only, which depend on none."""
        return (
            compiled_cost(self.program, Machine.read("cpu", self.mesh.size)) if self.machine is None else self._own_cost
        )

    def data(self, machine: Machine | str | None = None, tried: Sequence[Tried] = ()) -> dict[str, Any]:
        """Everything the HTML report shows, as JSON can hold it, in the format of ``Explanation.data``.

        Args:
            machine: as for ``cost``; without one, and without devices that gshard has a model of, all times are 0, and
                ``machine`` of the data is None.
            tried: what ``try_shardings`` and ``try_constraints`` found, to be shown with the rest.

        Raises:
            MachineError: no such machine, or not as many devices as the program runs on.
        """
        data = (self if machine is None else self.on(machine))._report().data()
        return {**data, "notes": [*data["notes"], *(one.lines for one in tried)]}

    def _report(self) -> CompiledReport:
        found = self._operations
        verdict = None if self.machine is None else CompiledVerdict(found, self.collectives)
        return CompiledReport(
            self.program, self.collectives, self.parts, self.arguments, self.whole, self.regathered, found, verdict
        )

    def _trace(self, machine: Machine | str | None) -> dict[str, Any]:
        there = self if machine is None else self.on(machine)
        there.cost()  # refuses a program without a machine
        return there._report().trace()

    def _repr_html_(self) -> str:
        """The report in a frame, for notebooks."""
        return framed(self.data(), self.name)

    def format(self, collectives: int = 12, arguments: int = 0, held: int = 3) -> str:
        """The explanation as text with at most so many rows of each kind."""
        program = self.program
        local, sizes = sum(a.local_bytes for a in program.arguments), [a.bytes for a in program.arguments]
        whole = "" if None in sizes else f"{format_bytes(sum(filter(None, sizes)))} in all, "
        compiled = f"compiled by XLA{f' for {program.platform}' if program.platform else ''}"
        size = f"{program.instructions:,} instructions"
        shared = "; x1/2 is one message with arrays of 2 rows" * any(row.sharing > 1 for row in self.collectives)
        lines = [
            f"{self.name}, {compiled}, on {self.mesh.size} devices ({self.mesh}), {size}",
            f"arguments: {whole}{format_bytes(local)} on each device",
            *whole_lines(self.whole),
            *regathered_lines(self.regathered),
            *argument_lines(self.arguments, arguments),
            "",
            f"collectives ({sum(self.times_by_kind.values()):,} in one call{shared})",
            *collective_lines_of(self.collectives, collectives),
        ]
        lines += [self._sent_line, *memory_lines(program, held)]
        if self.machine is not None:
            lines += ["", str(self.verdict())]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.format()

    def __repr__(self) -> str:
        sent = format_bytes(self.total_bytes)
        return f"<CompiledExplanation of {self.name} on {self.mesh}: {sent} sent, peak {format_bytes(self.peak)}>"


# Reads compiled programs with what JAX tells of them.

T = TypeVar("T")


def read_compiled(
    compiled: jax.stages.Compiled,
    mesh: Mesh | None = None,
    machine: str | Machine | None = None,
    out_tree: Any = None,
    names: Mapping[str, str] | None = None,
) -> CompiledExplanation:
    """Explains what JAX compiled.

    The default mesh is that of the shardings, the default machine its devices if gshard has a model of them, and the
    default tree of results that of the program.
    """
    text = compiled.as_text()
    if not text:
        raise ArgumentError("this compiled program has no text.", user_line(), hint="Its backend does not give one.")
    shardings = jax.tree.leaves(compiled.input_shardings, is_leaf=lambda s: isinstance(s, jax.sharding.Sharding))
    on = mesh or _mesh_of([*shardings, *jax.tree.leaves(compiled.output_shardings)])
    found = CompiledExplanation(
        read_program(
            text, on, whole=_of_arguments(_whole, compiled, shardings, on),
            cuts=_of_arguments(_cut, compiled, shardings, on),
            results=_results(compiled.out_tree if out_tree is None else out_tree),
            platform=str(on.devices[0].platform) if on is not None and on.devices else "",
            memory=memory_figures(compiled), names=names,
        )
    )  # fmt: skip
    if machine is None and on is not None and on.devices is not None and kind_of_devices(on) is not None:
        machine = machine_of(on)
    return found if machine is None else found.on(machine)


def _mesh_of(shardings: Sequence[Any]) -> Mesh | None:
    """The mesh of shardings: the largest, with the names of its axes; else the devices in their order."""
    named = [s.mesh for s in shardings if isinstance(s, NamedSharding) and isinstance(s.mesh, jax.sharding.Mesh)]
    if named:
        return Mesh.of(max(named, key=lambda mesh: mesh.size))
    devices = max((getattr(s, "_device_assignment", ()) for s in shardings), key=len, default=())
    return Mesh.of(list(devices)) if devices else None


def _of_arguments(
    read: Callable[[Any, Any, Mesh], T], compiled: Any, shardings: Sequence[Any], mesh: Mesh | None
) -> list[T]:
    """What is read of the type and the sharding of each argument, if all arguments are kept."""
    avals = jax.tree.leaves(compiled.in_avals)
    if len(avals) != len(shardings) or mesh is None:
        return []
    return [read(aval, sharding, mesh) for aval, sharding in zip(avals, shardings, strict=True)]


def _whole(aval: Any, sharding: Any, mesh: Mesh) -> tuple[int, str] | None:
    """The bytes of the whole array and its sharding."""
    try:
        size = aval.size * aval.dtype.itemsize
    except (AttributeError, TypeError):
        return None  # a key: its numbers are another array
    if mesh.size == 1:
        return size, ""
    if sharding.is_fully_replicated:
        return size, WHOLE
    spec = getattr(sharding, "spec", None)
    return size, f"P({', '.join(map(_word, spec))})" if spec is not None else str(sharding)


def _cut(aval: Any, sharding: Any, mesh: Mesh) -> ReadSharding | None:
    """The axes that cut the array, where its sharding names them."""
    if not isinstance(sharding, NamedSharding):
        return None
    entries = [*sharding.spec, *[None] * (len(aval.shape) - len(sharding.spec))]
    axes_of = [[] if entry is None else list(entry) if isinstance(entry, tuple) else [str(entry)] for entry in entries]
    return sharding_of_spec(axes_of, dict(sharding.mesh.shape), mesh)


def _word(entry: Any) -> str:
    return f"({', '.join(map(str, entry))})" if isinstance(entry, tuple) else str(entry)


def _results(tree: Any) -> list[str]:
    paths = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(tree, range(tree.num_leaves)))[0]
    return [path_of("result", path) for path, _ in paths]
