"""Driver of rewrites: runs rows to a fixed point, removes dead code, and records which row fired where.

A row is a function with a decorator. It returns equations that compute the same results, or None:

    @at("searchsorted")                                    tried at each equation of this name
    def search_of_rev(graph: Graph, e: Equation) -> Sequence[Equation] | None: ...

    @over("pad")                                           tried once for a block that has such an equation
    def sink_pad(graph: Graph) -> Others: ...
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence

from gshard.core.fired import Fired
from gshard.core.program import Equation
from gshard.rewrite.graph import Array, Graph, Others, Writer

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


def run(
    rows: Sequence[Rewrite], equations: Sequence[Equation], outputs: Sequence[Array], writer: Writer
) -> tuple[list[Equation], list[Fired]]:
    """The equations that rows make of others, and what fired.

    Args:
        rows: in order. All are run again until none fires.
        equations: of one block, in one context.
        outputs: the values that are read outside of them.
        writer: makes new equations.
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
    return found, fired


def recorded(name: str, others: Others) -> Fired:
    """The record of a rewrite, which is also logged."""
    first = next(iter(others))
    after = (q.name for new in others.values() for q in new)
    fired = Fired(name, first.line, tuple(e.name for e in others), tuple(after))
    _log.debug("Rewrote %s", fired)
    return fired
