"""Layouts: a plan said as one table, from classes of dimensions to axes.

A layout says less than a plan: a dimension is cut alike wherever it occurs. Data, tensor and expert parallelism can be
said so; a state that is gathered for its readers, or a dimension that is cut here and whole there, cannot. What is lost
is told: the table is planned and priced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from gshard.analysis.dimensions import Dimensions, dimensions_of
from gshard.analysis.proposal import spec_of_cut, with_marks
from gshard.core.errors import GShardError
from gshard.core.layout import Layout, Names
from gshard.core.mark import Mark
from gshard.core.mesh import Mesh
from gshard.core.plan import Plan
from gshard.core.program import Program, Value
from gshard.core.sharding import Sharding
from gshard.passes.propagate import propagate
from gshard.search.find import PricedPlan

_TRIED = 8  # rows, those by which most bytes are cut first


@dataclasses.dataclass(frozen=True, repr=False)
class FoundLayout:
    """A layout for a function, and what is known of it.

    Attributes:
        layout: the table, for ``gshard.jit(..., layout=...)``.
        names: what the dimensions of the positional arguments are called, for ``gshard.jit(..., names=...)``.
        priced: the plan that follows, and what it costs.
        goal: the plan that was searched.
        dimensions: the classes of dimensions.
    """

    layout: Layout
    names: Any
    priced: PricedPlan
    goal: PricedPlan
    dimensions: Dimensions

    def __str__(self) -> str:
        over = 100 * (self.priced.cost.seconds / self.goal.cost.seconds - 1)
        rows = []
        for row in self.layout.rows:
            members = self.dimensions[row.name]
            shown = ", ".join(f"{path}.{d}" for path, d in members.arguments[:3])
            rows.append(f"  {row!s:<24} {members.size} of {shown}{', ...' if len(members.arguments) > 3 else ''}")
        return "\n".join(
            [
                str(self.layout),
                *rows,
                f"{self.priced.cost.seconds * 1e3:.4g} ms a call, {over:+.2g} % to the plan",
            ]
        )

    __repr__ = __str__


def layout_of(
    goal: PricedPlan, limit: float, price: Callable[[Plan], PricedPlan], as_given: Callable[[Sequence[str]], Any]
) -> FoundLayout:
    """Says a plan as a layout, of as many rows as make a call shorter.

    Args:
        goal: the plan.
        limit: bytes that a device may hold.
        price: prices another plan of the program.
        as_given: the words of all arguments in the structure of the positional arguments.
    """
    program, mesh = goal.plan.program, goal.plan.mesh
    found = dimensions_of(program)
    inputs = program.block.inputs[len(program.captured) :]
    words = [" ".join(found.labels[v]) for v in inputs]

    def tried(rows: Mapping[str, tuple[str, ...]]) -> PricedPlan | None:
        try:
            marked = with_marks(program, _marks(Layout(rows), program, inputs, found))
            return None if marked is None else price(propagate(marked, mesh))
        except GShardError:  # two dimensions of an array over one axis, or another mark
            return None

    rows: dict[str, tuple[str, ...]] = {}
    best = tried(rows)
    assert best is not None, "the program was planned without these marks"
    for label, axes in _votes(goal.plan, found, mesh):
        more = {**rows, label: axes}
        after = tried(more)
        if after is not None and after.rank(limit) < best.rank(limit):
            rows, best = more, after
    for label in list(rows) if len(rows) > 1 else ():
        fewer = {name: axes for name, axes in rows.items() if name != label}
        after = tried(fewer)
        if after is not None and after.rank(limit) <= best.rank(limit):
            rows, best = fewer, after
    return FoundLayout(Layout(rows), as_given(words), best, goal, found)


def _marks(layout: Layout, program: Program, inputs: Sequence[Value], found: Dimensions) -> dict[Value, Mark]:
    marks = {}
    for v, known in zip(inputs, program.argument_marks, strict=True):
        names = Names(tuple(None if word == "_" else word for word in found.labels[v]))
        if known is None and (mark := layout.mark(names)) is not None:
            marks[v] = mark
    return marks


def _votes(plan: Plan, found: Dimensions, mesh: Mesh) -> Iterator[tuple[str, tuple[str, ...]]]:
    """How the plan cuts each class of dimensions, by most bytes; first those of which most bytes are cut."""
    classes = {c.label for c in found.classes}
    votes: dict[str, dict[tuple[str, ...], int]] = {}
    for v, labels in found.labels.items():
        spec = spec_of_cut(Sharding(plan.shardings[v].dims), mesh) or ()
        for label, entry in zip(labels, spec, strict=False):
            if entry is not None and label in classes:
                own = votes.setdefault(label, {})
                axes = (entry,) if isinstance(entry, str) else tuple(entry)
                own[axes] = own.get(axes, 0) + v.bytes
    order = sorted(votes, key=lambda label: -max(votes[label].values()))
    for label in order[:_TRIED]:
        yield label, max(votes[label], key=lambda axes: votes[label][axes])
