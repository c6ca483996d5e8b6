"""Which rows of a table the fast tests take: the first of every kind, and a sample of the others.

Rows of one kind go through the same code of the library with other parameters. The sample is the same at every run and
another one in every test, so that the tests together take nearly every row. The long sweeps take all of them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import pytest

from harness import Row, elementwise

_ELEMENTWISE = frozenset(row.name for row in elementwise())


def sampled(names: Iterable[str], kind: Callable[[str], Hashable], one_in: Callable[[str], int], seed: str) -> set[str]:
    """The names that are drawn: the first of each kind and, of the others, about one in ``one_in(name)``."""
    found, kinds = set(), set()
    for name in names:
        first = kind(name) not in kinds
        kinds.add(kind(name))
        if first or zlib.crc32(f"{seed} {name}".encode()) % one_in(name) == 0:
            found.add(name)
    return found


def sampled_rows(rows: Iterable[Row], seed: str) -> list[Row]:
    """A row of every primitive and half of the others; of elementwise operators, which share one rule, a quarter."""
    by_name = {row.name: row for row in rows}
    drawn = sampled(
        by_name,
        lambda name: "elementwise" if name in _ELEMENTWISE else by_name[name].primitive,
        lambda name: 4 if name in _ELEMENTWISE else 2,
        seed,
    )
    return [row for name, row in by_name.items() if name in drawn]


def others_slow(rows: Iterable[Row], seed: str) -> list[Any]:
    """All rows as parameters of a test; those that are not drawn are marked slow."""
    all_rows = list(rows)
    drawn = {row.name for row in sampled_rows(all_rows, seed)}
    return [pytest.param(row, id=row.name, marks=() if row.name in drawn else pytest.mark.slow) for row in all_rows]
