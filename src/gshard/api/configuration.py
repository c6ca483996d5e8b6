"""Configurations of a training step: what ``gshard.configure`` returns, each with its step, its mesh and its plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gshard.api.jit import Jitted, jit
from gshard.core.errors import LISTED, ArgumentError
from gshard.core.jax_adapter import user_line
from gshard.core.jax_adapter_tracebacks import without_our_frames_in_methods
from gshard.core.mesh import Mesh, MeshLike
from gshard.core.number_text import format_seconds, significant
from gshard.core.plan import Plan
from gshard.core.program import format_bytes
from gshard.device.cost import Cost
from gshard.device.machine import Machine
from gshard.explanation.report.page import InNotebooks, page
from gshard.explanation.search_result import SearchResult
from gshard.explanation.verdict import headline
from gshard.planning.saved_plan import SavedPlan
from gshard.search.find import ended, how_near
from gshard.tracing.by_jax import name_of


def text_of(keywords: Mapping[str, Any]) -> str:
    """Keywords as text.

    >>> text_of({"micro_batches": 4, "recompute": "full"})
    "micro_batches=4, recompute='full'"
    """
    return ", ".join(f"{key}={value!r}" for key, value in keywords.items())


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class BuiltStep:
    """A step, as a builder returned it.

    Attributes:
        keywords: the keywords of the builder.
        step: the function that ``jit`` partitions.
        arguments: its arguments.
    """

    keywords: dict[str, Any]
    step: Callable[..., Any]
    arguments: tuple[Any, ...]


def built_by(builder: Callable[..., Any], keywords: dict[str, Any]) -> BuiltStep | None:
    """Calls a builder; None if it returns None, because there is no step for these keywords."""
    name = name_of(builder)
    try:
        made = builder(**keywords)
    except Exception as error:
        error.add_note(f"gshard called {name}({text_of(keywords)})")
        raise
    if made is None:
        return None
    if not isinstance(made, tuple) or not made or not callable(made[0]):
        kind = "a tuple that begins with no function" if isinstance(made, tuple) else type(made).__name__
        raise ArgumentError(
            f"{name} returned {kind}{'' if isinstance(made, tuple) else ', not a tuple'}.",
            user_line(),
            text_of(keywords),
            "A builder returns (step, *arguments), or None if there is no step for these keywords.",
        )
    return BuiltStep(keywords, made[0], made[1:])


@without_our_frames_in_methods
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Configuration(BuiltStep):
    """A configuration of a training step: keywords of the builder, a mesh and a plan.

    Attributes:
        keywords, step, arguments: what the builder was given, and what it returned.
        found: the search that found the plan.
        machine: as ``gshard.jit`` takes it.
    """

    found: SearchResult
    machine: str | Machine | None

    @property
    def mesh(self) -> Mesh:
        """The mesh of the plan."""
        return self.found.mesh

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.found.plan

    @property
    def memory_limit(self) -> int | None:
        """Bytes that a device may hold, if gshard recomputes values to keep to it; None if it recomputes nothing."""
        return int(self.found.best.limit) if self.found.best.chosen.recomputed else None

    @property
    def cost(self) -> Cost:
        """The modelled cost of a step on each device."""
        return self.found.cost

    @property
    def seconds(self) -> float:
        """Modelled seconds of a step."""
        return self.cost.seconds

    def jit(self, mesh: MeshLike = None) -> Jitted[..., Any]:
        """The partitioned step, as ``gshard.jit`` returns it.

        Args:
            mesh: devices with the axes of the plan's mesh: a JAX mesh, or ``{"data": 8}``. By default the first devices
                that JAX has, if there are enough; otherwise it can be lowered, but not run.

        Raises:
            ArgumentError: a framework jits the step.
            MeshError: the mesh has other axes.
        """
        self.found.refuse_framework()
        made = self.step if isinstance(self.step, Jitted) else jit(self.step)
        on, recorded = Mesh.of(self.mesh if mesh is None else mesh), SavedPlan.of(self.plan)
        return made._with(mesh=on, machine=self.machine, memory_limit=self.memory_limit, recorded=recorded)

    def save(self, path: str | Path) -> None:
        """Writes the plan, for ``gshard.jit(plan=gshard.SavedPlan.load(path))`` of the step with these keywords."""
        self.found.save(path)

    def __str__(self) -> str:
        memory = f"peak {format_bytes(self.cost.peak)}, {format_bytes(self.cost.sent)} sent by each device"
        return f"{format_seconds(self.seconds)} a step: {text_of(self.keywords)}; mesh {self.mesh}; {memory}"

    __repr__ = __str__


_NONE = 1e-5  # a gap that counts as none, to the printed digits


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Configurations(InNotebooks):
    """The configurations that were found for a step, the best first.

    Attributes:
        rows: the configurations that have a plan: first those that fit, by time; then the others, by memory.
        not_searched: the configurations without a plan, each with the reason.
        machine: the machine.
        limit: bytes that a device may hold.
        left_out: steps that were cut, or not begun, because the time was over.
        failed: steps that ended with an error, each with its first line.
        seconds: the time that it took.
        stopped: the signal that ended it; None if none did.
    """

    rows: tuple[Configuration, ...]
    not_searched: Mapping[str, str]
    machine: Machine
    limit: float
    left_out: tuple[str, ...]
    failed: tuple[str, ...]
    seconds: float
    stopped: int | None = None

    @property
    def best(self) -> Configuration:
        """The best configuration."""
        return self.rows[0]

    def _table(self) -> str:
        """The best configurations, one a line."""
        keywords = list(dict.fromkeys(key for row in self.rows for key in row.keywords))
        lines = [["a step", "peak", "sent", "mesh", *keywords, "gshard recomputes", "gap"]]
        for row in self.rows[:LISTED]:
            fits = row.cost.peak <= self.limit
            lines.append([
                format_seconds(row.seconds),
                f"{format_bytes(row.cost.peak)}{'' if fits else ', does not fit'}",
                format_bytes(row.cost.sent),
                str(row.mesh),
                *(str(row.keywords[key]) if key in row.keywords else "" for key in keywords),
                "-" if row.memory_limit is None else "yes",
                _percent(row.found.gap),
            ])  # fmt: skip
        return "\n".join(_columns(lines))

    def html(self, path: str | Path) -> Path:
        """Writes the report of the best plan as one page, with what is known of the others. Returns the path."""
        path = Path(path)
        path.write_text(page(self._page_data()), "utf-8")
        return path

    def _page_data(self) -> dict[str, Any]:
        data = self.best.found._page_data()
        return data | {"searched": f"{self}\n\n{data['searched']}"}

    def __str__(self) -> str:
        best = self.best
        total = len(self.rows) + len(self.not_searched)
        lines = [
            f"{total} configuration{'s' * (total != 1)} on {self.machine.name}, "
            f"{format_bytes(int(self.limit))} of memory; {len(self.rows)} with plans; {self.seconds:.1f} s",
            self._table(),
            headline(best.cost),
        ]
        lines.append(f"the best: {how_near(best.found.best)}")
        if best.memory_limit is not None:
            lines.append("gshard recomputes some of its values to fit: best.jit() has the memory limit for that")
        lines += _folded(self.not_searched)
        return "\n".join(lines + ended(self.seconds, self.left_out, self.stopped, self.failed))

    __repr__ = __str__


def _folded(others: Mapping[str, str]) -> list[str]:
    """A line for each reason why configurations have no plan, with their number and the first of them."""
    of_reason: dict[str, list[str]] = {}
    for text, why in others.items():
        of_reason.setdefault(why, []).append(text)
    return [f"{len(some)} {why}: {some[0]}{', ...' * (len(some) > 1)}" for why, some in of_reason.items()]


def _percent(gap: float | None) -> str:
    return "-" if gap is None else "0 %" if gap < _NONE else f"{significant(100 * gap, 2)} %"


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(f"{cell:<{n}}" for cell, n in zip(row, widths, strict=True)).rstrip() for row in rows]
