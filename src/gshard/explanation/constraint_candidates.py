"""Constraint candidates: which sharding constraints may lower what XLA's partitioner sends, the most promising first.

Each collective is matched with the values that its line makes or reads, of a fitting size. Where XLA sends more at the
line than gshard's plan, these values get the shardings that they have in the plan.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import AxisType, Mesh, PartitionSpec

from gshard.core.jax_adapter import Expression
from gshard.core.mark import axes_of_entry
from gshard.core.program import format_bytes
from gshard.explanation.rows import CollectiveRow
from gshard.explanation.traced_expressions import Constraint, TracedExpression, TracedProgram
from gshard.xla.hlo_parser import arrays_of

Line = tuple[str, int]  # a line of a file


@dataclasses.dataclass(frozen=True, slots=True)
class Planned:
    """What gshard plans for a function."""

    sent: int  # bytes that each device sends in one call
    lines: Mapping[Line | None, int]  # those of each line
    # the sharding of the value of an expression, by its shape too
    specs: Mapping[tuple[Expression, tuple[int, ...]], PartitionSpec | None]


def constraints_to_try(
    rows: Sequence[CollectiveRow], program: TracedProgram, mesh: Mesh, planned: Planned
) -> tuple[list[Constraint], list[str]]:
    """The constraints to try on the values that collectives move; and what no constraint changes, as text."""
    axes = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    sizes = {str(name): size for name, size, kind in axes if kind == AxisType.Auto}
    at = collections.defaultdict[Any, list[TracedExpression]](list)
    for expression in program.expressions:
        for v in expression.values:
            at[v].append(expression)
    sent = collections.Counter[Line | None]()
    for row in rows:
        sent[_line(row)] += row.bytes
    stakes = collections.Counter[TracedExpression]()
    others = left = 0
    for row in rows:
        line = _line(row)
        more = max(0.0, 1 - planned.lines.get(line, 0) / max(sent[line], 1))
        moved = {e for v in program.values_at(*line) for e in at[v] if _fits(row, e, mesh.size)} if line else ()
        others, left = others + row.times * (not moved), left + row.bytes * (not moved)
        stakes.update({expression: more * row.bytes for expression in moved})
    found = [Constraint(e, spec) for e, stake in stakes.most_common() if stake and (spec := _spec(e, sizes, planned))]
    wider = [(c.expression.values, c.spec) for c in found]
    found = [c for c in found if not any(c.spec == spec and c.expression.values < values for values, spec in wider)]
    # Values of one type with one sharding mostly bring the same: of each of these the first one is tried first.
    order = {e: i for i, e in enumerate(program.expressions)}
    firsts = {(c.expression.type, c.spec): c for c in sorted(found, key=lambda c: -order[c.expression])}
    ranked = [c for c in found if firsts[c.expression.type, c.spec] is c]
    ranked = [each for c in ranked for each in (c, *_coarser(c))] + [c for c in found if c not in ranked]
    every = sum(row.times for row in rows)
    moves = f"{others} of {every} collectives ({format_bytes(left)}) move arguments, or no value of one expression"
    return ranked, [moves] * bool(others)


def _coarser(c: Constraint) -> list[Constraint]:
    """The same with one axis for each dimension: XLA may not bring other values to a split over several."""
    assert c.spec is not None, "it is planned"
    spec = PartitionSpec(*((axes_of_entry(entry) or (None,))[0] for entry in c.spec))
    return [] if spec == c.spec else [Constraint(c.expression, spec)]


def _line(row: CollectiveRow) -> Line | None:
    cause = row.moved[0].cause
    return None if cause is None else (cause.path, cause.line)


def _fits(row: CollectiveRow, expression: TracedExpression, devices: int) -> bool:
    """Whether a collective may move the value of an expression."""
    local = max(math.prod(arrays_of(row.shape)[0].shape), 1)
    parts, rest = divmod(math.prod(expression.shape or ()), local)
    return expression.spec is None and not rest and parts > 0 and devices % parts == 0


def _spec(expression: TracedExpression, sizes: Mapping[str, int], planned: Planned) -> PartitionSpec | None:
    """The planned sharding of a value, if a constraint can say it."""
    shape = expression.shape or ()
    if (spec := planned.specs.get((expression.place, shape))) is None:
        return None
    axes = [axes_of_entry(entry) for entry in spec]
    is_said = all(a in sizes for names in axes for a in names)
    is_even = all(n % math.prod(sizes.get(a, 1) for a in names) == 0 for n, names in zip(shape, axes, strict=False))
    return spec if is_said and is_even else None
