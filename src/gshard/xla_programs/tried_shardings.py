"""Tried shardings: other shardings of arguments with which XLA's partitioner sends or holds less, each compiled.

For the arguments that cause most of what is sent, and those that every device holds whole, each dimension is split over
each mesh axis, one change at a time, and the program is compiled again. A change helps if it lowers what is sent, what
is held or the modelled time, and raises none of the three. The changes that help are then put together, the best first,
as long as each helps. Equal layers change together.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from jax.sharding import NamedSharding, PartitionSpec

from gshard.core.program import format_bytes, format_flops
from gshard.device.machine import Machine
from gshard.xla_programs.compiled_cost import CompiledCost, compiled_cost
from gshard.xla_programs.compiled_program import CompiledProgram
from gshard.xla_programs.moved_parts import Part

SECONDS = 30.0  # how long to try, if nothing else is asked for
WORTH = 0.98  # of bytes, memory or seconds: a change must spare 2 % of one
_SAME = 1.001  # of bytes, memory or seconds: no more is no more
_ROWS = 8  # changes that are printed

Specs = Mapping[int, PartitionSpec]  # by the number of the argument


class Explained(Protocol):
    """What is read of a ``CompiledExplanation``."""

    @property
    def program(self) -> CompiledProgram: ...
    @property
    def parts(self) -> Sequence[Part]: ...
    @property
    def total_bytes(self) -> int: ...
    @property
    def peak(self) -> int: ...
    @property
    def machine(self) -> Machine | None: ...
    def cost(self) -> CompiledCost: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Figures:
    """What a compiled program takes.

    Attributes:
        sent: bytes that each device sends in one call.
        peak: bytes that it holds at most.
        seconds: of a call, as modelled; 0 without a machine.
        messages: collectives that run in one call.
        flops: operations that each device performs.
    """

    sent: int
    peak: int
    seconds: float
    messages: int
    flops: int

    @staticmethod
    def of(found: Explained) -> Figures:
        """Those of a compiled program."""
        is_timed = found.machine is not None
        # Operations depend on no machine.
        cost = found.cost() if is_timed else compiled_cost(found.program, Machine.read("cpu", found.program.mesh.size))
        messages = sum(sent.collective.executions for sent in found.program.sent)
        return Figures(found.total_bytes, found.peak, cost.seconds if is_timed else 0.0, messages, cost.flops)

    def helps(self, before: Figures) -> bool:
        """Whether something is lower than before, and nothing higher."""
        pairs = [(self.sent, before.sent), (self.peak, before.peak), (self.seconds, before.seconds)]
        return all(now <= _SAME * then for now, then in pairs) and any(now < WORTH * then for now, then in pairs)

    @property
    def rank(self) -> tuple[float, int, int]:
        """Orders figures, the better first: by time, where it is known, then by bytes and memory."""
        return self.seconds, self.sent, self.peak

    def change_to(self, after: Figures) -> str:
        """What another program takes instead, as text."""
        pairs = [
            ("sent", format_bytes(self.sent), format_bytes(after.sent)),
            ("messages", f"{self.messages:,}", f"{after.messages:,}"),
            ("peak", format_bytes(self.peak), format_bytes(after.peak)),
        ]
        if self.seconds:
            pairs.append(("a call", f"{self.seconds * 1e3:.4g} ms", f"{after.seconds * 1e3:.4g} ms"))
        else:
            pairs.append(("computed", format_flops(self.flops), format_flops(after.flops)))
        return ", ".join(f"{what} {then} -> {now}" if then != now else f"{what} {then}" for what, then, now in pairs)


@dataclasses.dataclass(frozen=True, slots=True)
class TriedSharding:
    """Another sharding of an argument, or of one argument of each of some equal layers.

    Attributes:
        name: of the argument, ``params.embed``; ``layers[*].up`` for equal layers.
        arguments: their numbers.
        before, spec: the sharding now, as text, and the other one.
        figures: what the program takes with it; None if XLA fails.
    """

    name: str
    arguments: tuple[int, ...]
    before: str
    spec: PartitionSpec
    figures: Figures | None

    def __str__(self) -> str:
        return f"{self.name}: {spec_text(self.spec)} instead of {self.before or 'its sharding'}"


@dataclasses.dataclass(frozen=True)
class TriedShardings:
    """What XLA compiles with other shardings of arguments.

    Attributes:
        before: what the unchanged program takes.
        helping: the changes that help by themselves, the best first.
        together: those of them that help together, and what the program then takes.
        tried, changes: how many changes were compiled, of how many.
        refused: at how many of these XLA failed, or ``jax.jit``, which may have been given ``in_shardings`` of its own.
    """

    before: Figures
    helping: tuple[TriedSharding, ...]
    together: tuple[tuple[TriedSharding, ...], Figures]
    tried: int
    changes: int
    refused: int = 0

    @property
    def lines(self) -> tuple[str, list[str]]:
        """The result as a title and lines below it."""
        of = f"{self.tried} of {self.changes}" if self.tried < self.changes else f"all {self.changes}"
        more = "; with more seconds, more are tried" if self.tried < self.changes else ""
        more += f"; jax.jit or XLA refused {self.refused} of them" if self.refused else ""
        if not self.helping:
            return f"Compiled with {of} other shardings of arguments: none lowers bytes, memory or time alone{more}", []
        rows = []
        for change in self.helping[:_ROWS]:
            assert change.figures is not None, "it helps"
            rows.append(f"{change}: {self.before.change_to(change.figures)}")
        changes, after = self.together
        if len(changes) > 1:
            names = ", ".join(change.name for change in changes)
            rows.append(f"together ({names}): {self.before.change_to(after)}")
        return f"Other shardings of arguments that help, compiled with {of}{more}", rows

    def __str__(self) -> str:
        title, rows = self.lines
        return "\n".join([f"{title}{':' if rows else '.'}", *(f"  {row}" for row in rows)])


def spec_text(spec: PartitionSpec) -> str:
    """A spec as Python source: ``P('data', None)``.

    >>> spec_text(PartitionSpec(None, ("data", "model")))
    "P(None, ('data', 'model'))"
    """
    return f"P({', '.join(map(repr, spec))})"


def try_shardings(
    found: Explained,
    leaves: Sequence[Any],
    compiled: Callable[[Specs], Explained | None],
    seconds: float = SECONDS,
) -> TriedShardings:
    """Compiles a program with other shardings of its arguments.

    Args:
        found: the unchanged program.
        leaves: its arguments in order, each with a sharding; None for one that is not known.
        compiled: compiles it with other shardings of some of them; None if XLA fails.
        seconds: how long to go on. No program is begun that would end later, if it takes as long as the longest before;
            one is compiled in any case.
    """
    began, longest = time.monotonic(), 0.0
    before = Figures.of(found)

    def figures(specs: Specs) -> Figures | None:
        nonlocal longest
        start = time.monotonic()
        made = compiled(specs)
        longest = max(longest, time.monotonic() - start)
        return None if made is None else Figures.of(made)

    def has_time() -> bool:
        return not longest or time.monotonic() - began + longest <= seconds

    changes = list(_changes(found, leaves)) if seconds > 0 else []
    helping: list[TriedSharding] = []
    tried = refused = 0
    for change in changes:
        if not has_time():
            break
        tried += 1
        made = dataclasses.replace(change, figures=figures(dict.fromkeys(change.arguments, change.spec)))
        refused += made.figures is None
        if made.figures is not None and made.figures.helps(before):
            helping.append(made)
    helping.sort(key=lambda change: (change.figures or before).rank)
    together, after = (helping[:1], helping[0].figures or before) if helping else ([], before)
    for change in helping[1:]:
        if not has_time() or {i for kept in together for i in kept.arguments} & {*change.arguments}:
            continue
        specs = {i: kept.spec for kept in (*together, change) for i in kept.arguments}
        more = figures(specs)
        if more is not None and more.helps(after):
            together, after = [*together, change], more
    return TriedShardings(before, tuple(helping), (tuple(together), after), tried, len(changes), refused)


def _changes(found: Explained, leaves: Sequence[Any]) -> Iterator[TriedSharding]:
    """The changes to try: of the arguments at which most bytes are at stake first."""
    program = found.program
    stake: dict[str, int] = {}
    for part in found.parts:
        name = part.array.alike.rpartition(" of ")[2]
        stake[name] = stake.get(name, 0) + part.bytes * part.sent.collective.executions
    groups: dict[tuple[str, str], list[int]] = {}
    for i, argument in enumerate(program.arguments):
        groups.setdefault((argument.short.alike, argument.sharding), []).append(i)

    def weight(group: tuple[tuple[str, str], list[int]]) -> int:
        (name, _), members = group
        held = sum(program.arguments[i].local_bytes for i in members if program.arguments[i].is_whole)
        return stake.get(name, 0) + held

    for (name, sharding), members in sorted(groups.items(), key=lambda group: -weight(group)):
        if weight(((name, sharding), members)):
            own = program.arguments[members[0]].short.text if len(members) == 1 else name
            for spec in _specs(leaves[members[0]]):
                yield TriedSharding(own, tuple(members), sharding, spec, None)


def _specs(leaf: Any) -> Iterator[PartitionSpec]:
    """Other shardings of an array: each dimension over each axis, which then splits no other dimension."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return
    now = [*sharding.spec, *(None for _ in range(len(leaf.shape) - len(sharding.spec)))]
    known = [_axes(entry) for entry in now]
    seen = {tuple(known)}
    for axis, size in sharding.mesh.shape.items():
        for d, n in enumerate(leaf.shape):
            for kept in ((), tuple(a for a in known[d] if a != axis)):
                dims = [tuple(a for a in own if a != axis) for own in known]
                dims[d] = (*kept, axis)
                parts = size
                for a in kept:
                    parts *= sharding.mesh.shape[a]
                if size > 1 and n % parts == 0 and tuple(dims) not in seen:
                    seen.add(tuple(dims))
                    yield PartitionSpec(*(own[0] if len(own) == 1 else own or None for own in dims))


def _axes(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
