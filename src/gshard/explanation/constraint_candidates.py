"""Constraint candidates: which sharding constraints may lower what XLA's partitioner sends, the most promising first.

Each collective is matched with the values of its line, and with those that they read, of a fitting size. A few
shardings are tried for each; a constraint that the user wrote is also removed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from jax.sharding import AxisType, Mesh, PartitionSpec

from gshard.core.jax_adapter import Expression
from gshard.core.program import format_bytes
from gshard.explanation.rows import CollectiveRow
from gshard.explanation.traced_expressions import Constraint, TracedExpression, TracedProgram
from gshard.explanation.tried_changes import MORE_PEAK, SPECS, specs_to_try
from gshard.xla.hlo_parser import arrays_of

_LIMIT = f"the peak may rise by {100 * (MORE_PEAK - 1):.0f} %"

# The sharding that is planned for a value, by the path of the file, the line, and the shape.
Planned = Mapping[tuple[str, int, tuple[int, ...]], PartitionSpec]


def constraints_to_try(
    rows: Sequence[CollectiveRow], program: TracedProgram, mesh: Mesh, planned: Planned
) -> tuple[list[Constraint], list[str]]:
    """The constraints to try on the values that collectives move; and what no constraint changes, as text."""
    axes = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    sizes = {str(name): size for name, size, kind in axes if kind == AxisType.Auto and size > 1}
    by_place = {expression.place: expression for expression in program.expressions}
    # What a constraint of the user's makes XLA send may be at another line.
    stakes = {expression: float(expression.spec is not None) for expression in program.expressions}
    others = sent = 0
    for row in rows:
        moved = list(_moved(row, by_place, mesh.size))
        others, sent = others + row.times * (not moved), sent + row.bytes * (not moved)
        for expression in moved:
            stakes[expression] += row.exposed or row.seconds or row.bytes
    ranked = [
        (stake / (i + 1), Constraint(expression, spec))
        for expression, stake in stakes.items()
        for i, spec in enumerate(itertools.islice(_specs(expression, sizes, planned), SPECS if stake else 0))
    ]
    every = sum(row.times for row in rows)
    moves = f"{others} of {every} collectives ({format_bytes(sent)}) move arguments, or no value of one expression"
    left_out = f"{program.left_out} expressions have no one array as their value, or are in jax.vmap"
    notes = [(_LIMIT, ranked), (moves, others), (left_out, program.left_out)]
    return [constraint for _, constraint in sorted(ranked, key=lambda pair: -pair[0])], [
        note for note, is_so in notes if is_so
    ]


def _moved(
    row: CollectiveRow, by_place: Mapping[Expression, TracedExpression], devices: int
) -> Iterator[TracedExpression]:
    """The expressions whose value a collective may move."""
    cause = row.moved[0].cause
    file, line = ("", 0) if cause is None else cause.via or cause[:2]
    at = [e for p, e in by_place.items() if p.file == file and p.line <= line <= max(p.line, p.end_line)]
    read = [by_place[place] for e in at for place in e.reads if place in by_place]
    local = max(math.prod(arrays_of(row.shape)[0].shape), 1)
    for expression in dict.fromkeys([*at, *read]):
        parts, rest = divmod(math.prod(expression.shape or ()), local)
        if expression.shape is not None and not rest and parts and devices % parts == 0:
            yield expression


def _specs(expression: TracedExpression, sizes: Mapping[str, int], planned: Planned) -> Iterator[PartitionSpec | None]:
    """The shardings to try for a value, each once: the planned one first; None removes a constraint."""
    now, shape, place = expression.spec, expression.shape, expression.place
    if now is not None:
        yield None
    if shape is not None:
        yield from specs_to_try(shape, sizes, now, planned.get((place.file, place.line, shape)))
