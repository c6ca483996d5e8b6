"""Constraint candidates: which sharding constraints may lower what XLA's partitioner sends, the most promising first.

Where XLA sends more at a line than gshard's plan, the values that the line makes or reads get the shardings that they
have in the plan. What is moved may be a weight, because another value is split otherwise.
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
from gshard.explanation.rows import Moved
from gshard.explanation.traced_expressions import Constraint, TracedExpression, TracedProgram

Line = tuple[str, int]  # a line of a file


@dataclasses.dataclass(frozen=True, slots=True)
class Planned:
    """What gshard plans for a function."""

    sent: int  # bytes that each device sends in one call
    lines: Mapping[Line, int]  # those of each line, and of what it calls
    # the sharding of the value of an expression, by its shape too
    specs: Mapping[tuple[Expression, tuple[int, ...]], PartitionSpec | None]


def constraints_to_try(
    moved: Sequence[Moved], program: TracedProgram, mesh: Mesh, planned: Planned
) -> list[Constraint]:
    """The constraints to try on the values that lines make or read at which XLA sends more than the plan."""
    axes = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    sizes = {str(name): size for name, size, kind in axes if kind == AxisType.Auto}
    at = collections.defaultdict[Any, list[TracedExpression]](list)
    for v, expression in ((v, e) for e in program.expressions if e.spec is None for v in e.values):
        at[v].append(expression)
    sent = collections.Counter[Line]()
    for one, cause in ((one, one.cause) for one in moved if one.cause is not None):
        sent[cause.path, cause.line] += one.bytes
    stakes = collections.Counter[TracedExpression]()
    for line, size in sent.items():
        if (more := size - planned.lines.get(line, 0)) > 0:
            # Large ones matter more.
            roots = {e: math.sqrt(math.prod(e.shape or ())) for v in program.values_at(*line) for e in at[v]}
            stakes.update({e: round(more * root) for e, root in roots.items()})
    found = [Constraint(e, spec) for e, _ in stakes.most_common() if (spec := _spec(e, sizes, planned))]
    wider = [(c.expression.values, c.spec) for c in found]
    found = [c for c in found if not any(c.spec == spec and c.expression.values < values for values, spec in wider)]
    # Values of one type with one sharding mostly bring the same: of each of these the first one is tried first.
    order = {e: i for i, e in enumerate(program.expressions)}
    firsts = {(c.expression.type, c.spec): c for c in sorted(found, key=lambda c: -order[c.expression])}
    ranked = [c for c in found if firsts[c.expression.type, c.spec] is c]
    return [each for c in ranked for each in (c, *_coarser(c))] + [c for c in found if c not in ranked]


def _coarser(c: Constraint) -> list[Constraint]:
    """The same with one axis for each dimension: XLA may not bring other values to a split over several."""
    assert c.spec is not None, "it is planned"
    spec = PartitionSpec(*((axes_of_entry(entry) or (None,))[0] for entry in c.spec))
    return [] if spec == c.spec else [Constraint(c.expression, spec)]


def _spec(expression: TracedExpression, sizes: Mapping[str, int], planned: Planned) -> PartitionSpec | None:
    """The planned sharding of a value, if a constraint can say it."""
    shape = expression.shape or ()
    if (spec := planned.specs.get((expression.place, shape))) is None:
        return None
    axes = [axes_of_entry(entry) for entry in spec]
    is_said = all(a in sizes for names in axes for a in names)
    is_even = all(n % math.prod(sizes.get(a, 1) for a in names) == 0 for n, names in zip(shape, axes, strict=False))
    return spec if is_said and is_even else None
