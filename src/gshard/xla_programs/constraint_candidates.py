"""Constraint candidates: which sharding constraints may lower what XLA's partitioner sends, the most promising first.

Each collective is matched with the values that it may move: those of expressions at its line, and those that these
expressions read, whose size is a multiple of what one device moves. For each value a few shardings are tried: the one
that gshard plans for it, those that dimensions of the same size have in the arguments, one axis on one dimension, and
whole arrays. A constraint that the user wrote is also removed.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from gshard.core.jax_adapter_operations import Expression
from gshard.core.mark import axes_of_entry, spec_of_axes
from gshard.xla_programs.compiled_rows import CompiledRow
from gshard.xla_programs.traced_expressions import Constraint, TracedExpression

_SPECS = 12  # shardings of one value that are tried

Axes = tuple[str, ...]
# Shardings that are planned for values, by the path of the file, the line, and the shape.
Planned = Mapping[tuple[str, int, tuple[int, ...]], Sequence[PartitionSpec]]


@dataclasses.dataclass(frozen=True)
class Candidates:
    """The constraints to try."""

    constraints: tuple[Constraint, ...]  # the most promising first
    matched: int  # how many collectives move a value of an expression;
    collectives: int  # of how many
    unmatched_bytes: int  # that each device sends in the others


def candidates_of(
    rows: Sequence[CompiledRow],
    expressions: Sequence[TracedExpression],
    leaves: Iterable[Any],
    sizes: Mapping[str, int],
    planned: Planned,
) -> Candidates:
    """The constraints to try on the values that collectives move."""
    by_place = {expression.place: expression for expression in expressions}
    stakes: dict[TracedExpression, float] = {}
    matched = unmatched = 0
    for row in rows:
        moved = list(_moved(row, expressions, by_place, math.prod(sizes.values())))
        matched += bool(moved) * row.times
        unmatched += 0 if moved else row.bytes
        for expression in moved:
            stakes[expression] = stakes.get(expression, 0.0) + (row.exposed or row.seconds or row.bytes)
    for expression in expressions:
        if expression.spec is not None:
            stakes.setdefault(expression, 0.0)  # what it makes XLA send may be at another line
    given = _Given.of(leaves)
    ranked = [
        ((stake + bool(expression.spec is not None)) / (i + 1), Constraint(expression, spec))
        for expression, stake in stakes.items()
        for i, spec in enumerate(itertools.islice(_specs(expression, given, sizes, planned), _SPECS))
    ]
    ranked.sort(key=lambda pair: -pair[0])
    return Candidates(tuple(c for _, c in ranked), matched, sum(row.times for row in rows), unmatched)


def _moved(
    row: CompiledRow,
    expressions: Sequence[TracedExpression],
    by_place: Mapping[Expression, TracedExpression],
    devices: int,
) -> Iterator[TracedExpression]:
    """The expressions whose value a collective may move."""
    file, _, line = row.place.rpartition(":")
    if not file or not line.isdigit():
        return
    at = [e for e in expressions if e.place.file == file and e.place.line <= int(line) <= _end(e.place)]
    read = [by_place[place] for e in at for place in e.reads if place in by_place]
    local = math.prod(row.parts[0].type.shape)
    for expression in dict.fromkeys([*at, *read]):
        parts, rest = divmod(math.prod(expression.shape or ()), max(local, 1))
        if expression.shape is not None and not rest and parts and devices % parts == 0:
            yield expression


def _end(place: Expression) -> int:
    return place.end_line or place.line


@dataclasses.dataclass(frozen=True)
class _Given:
    """How arguments are split."""

    by_size: Mapping[int, Axes]  # the axes over which most of them split a dimension, by its size
    groups: tuple[Axes, ...]  # the axes over which they split a dimension, the most frequent first

    @staticmethod
    def of(leaves: Iterable[Any]) -> _Given:
        found: dict[int, Counter[Axes]] = {}
        every = Counter[Axes]()
        for leaf in leaves:
            sharding = getattr(leaf, "sharding", None)
            if isinstance(sharding, NamedSharding):
                for size, entry in zip(leaf.shape, sharding.spec, strict=False):
                    if axes := axes_of_entry(entry):
                        found.setdefault(size, Counter())[axes] += 1
                        every[axes] += 1
        by_size = {size: counts.most_common(1)[0][0] for size, counts in found.items()}
        return _Given(by_size, tuple(axes for axes, _ in every.most_common()))


def _specs(
    expression: TracedExpression, given: _Given, sizes: Mapping[str, int], planned: Planned
) -> Iterator[PartitionSpec | None]:
    """The shardings to try for a value, each once; None removes a constraint."""
    now = expression.spec
    if now is not None:
        yield None
    if expression.shape is None:
        return
    seen = set[tuple[Axes, ...]]() if now is None else {_dims(now, len(expression.shape))}
    for spec in _all_specs(expression.place, expression.shape, given, sizes, planned):
        dims = _dims(spec, len(expression.shape))
        if dims not in seen and _fits(dims, expression.shape, sizes):
            seen.add(dims)
            yield spec


def _dims(spec: PartitionSpec, rank: int) -> tuple[Axes, ...]:
    return tuple(
        axes_of_entry(entry) for entry in itertools.islice(itertools.chain(spec, itertools.repeat(None)), rank)
    )


def _fits(dims: Sequence[Axes], shape: Sequence[int], sizes: Mapping[str, int]) -> bool:
    used = [axis for axes in dims for axis in axes]
    if len(set(used)) < len(used) or not set(used) <= sizes.keys():
        return False
    return all(n % math.prod(sizes[axis] for axis in axes) == 0 for n, axes in zip(shape, dims, strict=True))


def _all_specs(
    place: Expression, shape: tuple[int, ...], given: _Given, sizes: Mapping[str, int], planned: Planned
) -> Iterator[PartitionSpec]:
    yield from itertools.islice(planned.get((place.file, place.line, shape), ()), 1)
    as_given: list[Axes] = []
    for size in shape:
        axes = given.by_size.get(size, ())
        as_given.append(axes if not {*axes} & {a for own in as_given for a in own} else ())
    nothing: list[Axes] = [()] * len(shape)
    first = next((d for d, axes in enumerate(as_given) if axes), None)
    bases = [as_given] if first is None else [_with(nothing, first, as_given[first]), as_given]  # the batch, mostly
    order = sorted(range(len(shape)), key=lambda d: -shape[d])
    for axes in given.groups:
        batch = _with(nothing, 0, axes)
        others = [(axis, d) for axis in sizes for d in order if axis not in axes and d]
        yield from (spec_of_axes(dims) for dims in (batch, *(_with(batch, d, (axis,)) for axis, d in others[:1])))
    yield from map(spec_of_axes, bases)
    for dims in (*bases, nothing):
        for axis in sizes:
            for d in order:
                if axis not in {a for own in dims for a in own}:
                    yield spec_of_axes(_with(dims, d, (*dims[d], axis)))
        yield spec_of_axes(nothing)


def _with(dims: Sequence[Axes], d: int, axes: Axes) -> list[Axes]:
    return [axes if e == d else own for e, own in enumerate(dims)]
