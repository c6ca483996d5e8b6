"""Unexpected: one warning for a function whose program is split otherwise than its marks and its layout suggest.

``explain`` lists all of this, and ``strict=True`` refuses what has no effect. A call that says nothing would hide it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from gshard.core.errors import known_names, warn_once
from gshard.core.jax_adapter import user_line
from gshard.core.mark import Mark
from gshard.core.mesh import Mesh
from gshard.core.plan import Plan
from gshard.core.program import Program
from gshard.explanation.returned import returned_in_fewer_shards


def warn_of(plan: Plan, told: set[str]) -> None:
    """Warns of what a program that is compiled now does not do as its user may expect."""
    program = plan.program
    found = [
        *program.unread_marks,
        *_mistaken_rows(program),
        *dict.fromkeys(_foreign_marks(program, plan.mesh)),
        *returned_in_fewer_shards(plan),
    ]
    hint = f"gshard.explain shows more. {program.name} is compiled at {user_line()}." if found else ""
    warn_once(program.name, told, "is not split as it may seem:", found, hint)


def _foreign_marks(program: Program, mesh: Mesh) -> Iterator[str]:
    """Marks on a mesh that divides the devices into axes of other sizes: they split over parts of the mesh's axes."""
    for e in program.block.walk():
        if e.mark is not None and e.mark.is_foreign(mesh) and _sizes(e.mark) != _sizes(mesh):
            yield f"{e.line}: {e.mark.text_on(mesh)} splits over parts of the axes of {mesh}"


def _sizes(of: Mark | Mesh) -> list[int]:
    return [size for _, size in of.axes if size > 1]


def _mistaken_rows(program: Program) -> Iterator[str]:
    """Rows of the layout that are probably mistakes: those near a name of the program, or all rows if none applies.

    A layout may have rows for other functions, too, so rows that apply to nothing are no mistake in general.
    """
    of_layout = [named for named in program.named if named.layout == program.layout]
    names = sorted({name for named in of_layout for name in named.names.dims if name is not None})
    rows = program.layout.rows if program.layout is not None and names else ()
    unknown = [row for row in rows if row.name not in names]
    for row in unknown:
        if len(unknown) == len(rows) or difflib.get_close_matches(row.name, names, n=1):
            yield f"{row}: nothing is called {row.name!r}. {known_names(row.name, names, 'Names are')}"
