"""Driver of rewrites: runs rows to a fixed point, removes dead code, and records which row fired where.

A row of the phase TRACE is a function with a decorator. It returns equations that compute the same results, or None:

    @at("searchsorted")                                    tried at each equation of this name
    def search_of_rev(graph: Graph, e: Equation) -> Sequence[Equation] | None: ...

    @over("pad")                                           tried once for a block that has such an equation
    def sink_pad(graph: Graph) -> Others: ...

A row of the phase SPLIT depends on how values are split. Which equations it may rewrite is found once for a program:

    @where_split(transforms_of)
    def fft_by_dimension(e: Equation, split: Split) -> Others: ...
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from gshard.core.fired import Fired
from gshard.core.program import Equation, Program, Value
from gshard.rewrite.equation_graph import Array, Graph, Others, Writer

_MOST = 1000  # rewrites of one block

_log = logging.getLogger("gshard")


@dataclasses.dataclass(frozen=True)
class Rewrite:
    """One row.

    Attributes:
        name: the rewrite's.
        names: of equations; a block without any of them is skipped.
        others: for a graph the equations that are replaced, and those in their place. Empty if it does not fire.
    """

    name: str
    names: frozenset[str]
    others: Callable[[Graph], Others]


def over(*names: str) -> Callable[[Callable[[Graph], Others]], Rewrite]:
    """Makes a row of a function that looks at a whole block with equations of these names."""
    return lambda function: Rewrite(function.__name__, frozenset(names), function)


def at(*names: str) -> Callable[[Callable[[Graph, Equation], Sequence[Equation] | Others | None]], Rewrite]:
    """Makes a row of a function that looks at one equation of these names after the other; marks are skipped.

    The function gives the equations in the place of that one, or in the places of several.
    """

    def made(function: Callable[[Graph, Equation], Sequence[Equation] | Others | None]) -> Rewrite:
        def others(graph: Graph) -> Others:
            found: dict[Equation, Sequence[Equation]] = {}
            for e in graph.equations:
                if e.name in names and e.mark is None and (new := function(graph, e)) is not None:
                    found |= new if isinstance(new, Mapping) else {e: new}
            return found

        return Rewrite(function.__name__, frozenset(names), others)

    return made


@dataclasses.dataclass(frozen=True)
class Split:
    """How the values of a program are split.

    Attributes:
        parts: for a value and one of its dimensions, in how many parts it is.
        writer: makes new equations.
    """

    parts: Callable[[Value, int], int]
    writer: Writer

    def is_split(self, v: Value) -> bool:
        """Whether any dimension of a value is split."""
        return any(self.parts(v, d) > 1 for d in range(len(v.shape)))


@dataclasses.dataclass(frozen=True)
class SplitRewrite:
    """One row of the phase SPLIT.

    Attributes:
        name: the rewrite's.
        candidates: what of a program may be rewritten.
        others: for one candidate the equations that are replaced, and those in their place, one independent rewrite
            after the other.
    """

    name: str
    candidates: Callable[[Program], Sequence[Any]]
    others: Callable[[Any, Split], Iterable[Others]]


def where_split(
    candidates: Callable[[Program], Sequence[Any]],
) -> Callable[[Callable[[Any, Split], Iterable[Others]]], SplitRewrite]:
    """Makes a row of the phase SPLIT of a function that looks at one candidate after the other."""
    return lambda function: SplitRewrite(function.__name__, candidates, function)


def run(
    rows: Sequence[Rewrite], equations: Sequence[Equation], outputs: Sequence[Array], writer: Writer
) -> tuple[list[Equation], list[Fired]]:
    """The equations that rows make of others, and what fired.

    Args:
        rows: in order. All are run again until none fires.
        equations: of one block, in one context.
        outputs: the values that are read outside of them.
        writer: makes new equations.

    A row that fires without end is a bug of that row. The driver stops it, and the log has a warning.
    """
    found, fired = list(equations), list[Fired]()
    settled: dict[str, int] = {}  # for a row how many had fired when it last did not
    while any(settled.get(row.name) != len(fired) for row in rows) and len(fired) < _MOST:
        for row in rows:
            while settled.get(row.name) != len(fired) and len(fired) < _MOST:
                graph = Graph(found, outputs, writer)
                others = {} if row.names.isdisjoint(e.name for e in found) else row.others(graph)
                if not others:
                    settled[row.name] = len(fired)
                    break
                found = graph.replaced(others)
                fired.append(recorded(row.name, others))
    if len(fired) >= _MOST:
        last = fired[-1]
        _log.warning(
            "%s still fires at %s after %d rewrites, so gshard stops here. Results are right. Please report it.",
            last.rewrite, last.line or "an unknown line", _MOST,
        )  # fmt: skip
    return found, fired


def run_where_split(
    rows: Mapping[SplitRewrite, Sequence[Any]], split: Split
) -> tuple[dict[Equation, Sequence[Equation]], list[Fired]]:
    """The equations that rows replace, those in their place, and what fired; no equation is rewritten twice.

    Args:
        rows: in order, each with its candidates.
        split: how values are split.
    """
    found, fired = dict[Equation, Sequence[Equation]](), list[Fired]()
    for row, candidates in rows.items():
        for others in (others for candidate in candidates for others in row.others(candidate, split)):
            if found.keys().isdisjoint(others):
                found.update(others)
                fired.append(recorded(row.name, others))
    return found, fired


def recorded(name: str, others: Others) -> Fired:
    """The record of a rewrite, which is also logged."""
    first = next(iter(others))
    after = (q.name for new in others.values() for q in new)
    fired = Fired(name, first.line, tuple(e.name for e in others), tuple(after))
    _log.debug("Rewrote %s", fired)
    return fired
