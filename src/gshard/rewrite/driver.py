"""Runs rewrites to a fixed point, removes dead code, and records which rewrite fired where.

A rewrite of the phase TRACE is a decorated function. It returns equations that compute the same results, or None:

    @at("transpose")                                       tried at each equation of this name
    def transpose_of_dot(graph: Graph, e: Equation) -> Others | None: ...

    @over("pad")                                           tried once for a block that has such an equation
    def sink_pad(graph: Graph) -> Others: ...

A rewrite of the phase SPLIT depends on the split of values. Its candidates are determined once for each program:

    @where_split(transforms_of)
    def fft_by_dimension(e: Equation, split: Split) -> Others: ...
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from gshard.core.program import Equation, Fired, Program, Value
from gshard.rewrite.equation_graph import Array, Graph, Others, Writer

_MOST = 1000  # largest number of rewrites of one block

_log = logging.getLogger("gshard")


@dataclasses.dataclass(frozen=True)
class Rewrite:
    """One rewrite of the phase TRACE."""

    name: str  # the name of the rewrite
    names: frozenset[str]  # primitive names. Blocks without equations of these names are skipped.
    # returns the replaced equations of a graph with their replacements; empty if the rewrite does not fire
    others: Callable[[Graph], Others]


OfEquation = Callable[[Graph, Equation], Sequence[Equation] | Others | None]


def over(*names: str) -> Callable[[Callable[[Graph], Others]], Rewrite]:
    """A decorator for a rewrite of whole blocks that contain equations of these names."""
    return lambda function: Rewrite(function.__name__, frozenset(names), function)


def at(*names: str) -> Callable[[OfEquation], Rewrite]:
    """A decorator for a rewrite of single equations of these names. Marks are skipped.

    The function returns the equations that replace this one, or a mapping that replaces several equations.
    """

    def decorate(function: OfEquation) -> Rewrite:
        def others(graph: Graph) -> Others:
            replacements: dict[Equation, Sequence[Equation]] = {}
            for e in graph.equations:
                if e.name not in names or e.mark is not None:
                    continue
                new = function(graph, e)
                if new is not None:
                    replacements |= new if isinstance(new, Mapping) else {e: new}
            return replacements

        return Rewrite(function.__name__, frozenset(names), others)

    return decorate


@dataclasses.dataclass(frozen=True)
class Split:
    """The split of the values of a program."""

    parts: Callable[[Value, int], int]  # returns the number of parts of a dimension of a value
    writer: Writer  # creates new equations

    def is_split(self, v: Value) -> bool:
        """Whether any dimension of a value is split."""
        return any(self.parts(v, d) > 1 for d in range(len(v.shape)))


@dataclasses.dataclass(frozen=True)
class SplitRewrite:
    """One rewrite of the phase SPLIT."""

    name: str  # the name of the rewrite
    candidates: Callable[[Program], Sequence[Any]]  # returns the parts of a program that may be rewritten
    # returns independent rewrites of a candidate: each the replaced equations with their replacements
    others: Callable[[Any, Split], Iterable[Others]]


def where_split(
    candidates: Callable[[Program], Sequence[Any]],
) -> Callable[[Callable[[Any, Split], Iterable[Others]]], SplitRewrite]:
    """A decorator for a rewrite of the phase SPLIT, whose function rewrites one candidate."""
    return lambda function: SplitRewrite(function.__name__, candidates, function)


def run(
    rows: Sequence[Rewrite], equations: Sequence[Equation], outputs: Sequence[Array], writer: Writer
) -> tuple[list[Equation], list[Fired]]:
    """Runs rewrites on the equations of a block, until none fires.

    A rewrite that fires without end has a bug. gshard stops it, and logs a warning.
    """
    graph, fired = Graph(equations, outputs, writer), list[Fired]()
    names = {e.name for e in equations}
    settled: dict[str, int] = {}  # for each rewrite the number of fired rewrites when it last did not fire
    while any(settled.get(row.name) != len(fired) for row in rows) and len(fired) < _MOST:
        for row in rows:
            while settled.get(row.name) != len(fired) and len(fired) < _MOST:
                others = {} if row.names.isdisjoint(names) else row.others(graph)
                if not others:
                    settled[row.name] = len(fired)
                    break
                graph = Graph(graph.replaced(others), outputs, writer)
                names = {e.name for e in graph.equations}
                fired.append(recorded(row.name, others))
    if len(fired) >= _MOST:
        last = fired[-1]
        _log.warning(
            "%s still fires at %s after %d rewrites, so gshard stops here. Results are right. Please report it.",
            last.rewrite, last.line or "an unknown line", _MOST,
        )  # fmt: skip
    return list(graph.equations), fired


def run_where_split(
    rows: Mapping[SplitRewrite, Sequence[Any]], split: Split
) -> tuple[dict[Equation, Sequence[Equation]], list[Fired]]:
    """Runs rewrites that depend on the split of values. Each equation is rewritten at most once."""
    replacements, fired = dict[Equation, Sequence[Equation]](), list[Fired]()
    for row, candidates in rows.items():
        for others in (others for candidate in candidates for others in row.others(candidate, split)):
            if replacements.keys().isdisjoint(others):
                replacements.update(others)
                fired.append(recorded(row.name, others))
    return replacements, fired


def recorded(name: str, others: Others, note: str = "") -> Fired:
    """Records and logs a rewrite, with the text of what it batches."""
    first = next(iter(others))
    after = (q.name for new in others.values() for q in new)
    fired = Fired(name, first.line, tuple(e.name for e in others), tuple(after), note)
    _log.debug("Rewrote %s", fired)
    return fired
