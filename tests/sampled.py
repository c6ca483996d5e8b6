"""Which cases the fast tests take: a sample that leaves out no kind of case; `make test-full` takes all of them.

Of the rows of a table, the first of every kind and some others: rows of one kind go through the same code with other
parameters. Of a grid of parameters, some cases in which every value of every parameter occurs. The sample is
the same at every run; tests of one table have different ones, so that together they take most of its rows.
"""

import itertools
import zlib

import pytest

from harness import elementwise

_ELEMENTWISE = frozenset(row.name for row in elementwise())


def sampled(names, kind, one_in, seed):
    """The names that are drawn: the first of each kind and, of the others, about one in ``one_in(name)``."""
    found, kinds = set(), set()
    for name in names:
        first = kind(name) not in kinds
        kinds.add(kind(name))
        if first or zlib.crc32(f"{seed} {name}".encode()) % one_in(name) == 0:
            found.add(name)
    return found


def sampled_rows(rows, seed):
    """A row of every primitive and a third of the others; of elementwise operators, which share one rule, an eighth."""
    by_name = {row.name: row for row in rows}
    drawn = sampled(
        by_name,
        lambda name: "elementwise" if name in _ELEMENTWISE else by_name[name].primitive,
        lambda name: 8 if name in _ELEMENTWISE else 3,
        seed,
    )
    return [row for name, row in by_name.items() if name in drawn]


def others_slow(rows, seed):
    """All rows as parameters of a test; those that are not drawn are marked slow."""
    all_rows = list(rows)
    drawn = {row.name for row in sampled_rows(all_rows, seed)}
    return [pytest.param(row, id=row.name, marks=() if row.name in drawn else pytest.mark.slow) for row in all_rows]


def crossed(*values, one_in):
    """All combinations of these values of several parameters; most are marked slow.

    In those that are not, every value occurs, and they are at least one in ``one_in`` of all.
    """
    cases = list(itertools.product(*values))
    names = ["-".join(map(_name, case)) for case in cases]
    fast = []
    seen = set()
    order = sorted(range(len(cases)), key=lambda i: zlib.crc32(names[i].encode()))
    for i in order:  # first those that bring only new values, then those that bring any, then as many as are missing
        if not seen & _values(cases[i]):
            fast.append(i)
            seen |= _values(cases[i])
    for i in order:
        if not _values(cases[i]) <= seen:
            fast.append(i)
            seen |= _values(cases[i])
    fast += [i for i in order if i not in fast][: max(0, -(-len(cases) // one_in) - len(fast))]
    return [
        pytest.param(*case, id=name, marks=() if i in fast else pytest.mark.slow)
        for i, (case, name) in enumerate(zip(cases, names, strict=True))
    ]


def _values(case):
    return {(k, _name(value)) for k, value in enumerate(case)}


def _name(value):
    return str(getattr(value, "__name__", value))
