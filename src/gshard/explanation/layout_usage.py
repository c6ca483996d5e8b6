"""Layout usage: the values that each row of a layout applies to, and the rows that are unused.

``explain`` lists both, and marks whose results nothing reads; ``jit(strict=True)`` refuses what is unused.
"""

from __future__ import annotations

from collections import Counter

from gshard.core.errors import PlanError
from gshard.core.layout import Named
from gshard.core.mesh import Mesh
from gshard.core.program import Program
from gshard.planning.demands import demands

SHOWN = 8  # names, and places where the order of rules decided


def uses_of_layout(program: Program) -> tuple[str, ...]:
    """How many values each row of the layout applies to, which names are open, and where the order of rules decided."""
    layout = program.layout
    if layout is None:
        return ()
    used: Counter[str] = Counter()
    left: dict[str, None] = {}
    decided: dict[str, list[str]] = {}
    for named in _under(program):
        rows = layout.rows_of(named.names)
        used.update(dict.fromkeys((str(row) for row in rows if row is not None), 1))
        left |= dict.fromkeys(n for n, row in zip(named.names.dims, rows, strict=True) if n is not None and row is None)
        for text in layout.decided(named.names):
            decided.setdefault(text, []).append(named.place)
    lines = [f"{row}: {_values(used[row])}" for row in dict.fromkeys(map(str, layout.rows)) if used[row]]
    if left:
        rest = ", ..." if len(left) > SHOWN else ""
        what = "left whole, since no rule is free for them" if layout.ordered else "open, since no row mentions them"
        lines.append(f"{what}: {', '.join(list(left)[:SHOWN])}{rest}")
    for text, places in list(decided.items())[:SHOWN]:
        lines.append(f"the order of rules decided: {text} ({places[0]}{_more(places)})")
    if len(decided) > SHOWN:
        lines.append(f"the order of rules decided {len(decided) - SHOWN} more times")
    return tuple(lines)


def unused_of_layout(program: Program, mesh: Mesh) -> tuple[str, ...]:
    """Rows that apply to nothing, and axes of the mesh that neither the layout nor any mark uses."""
    layout = program.layout
    if layout is None:
        return ()
    names = {name for named in _under(program) for name in named.names.dims}
    used = {row for named in _under(program) for row in layout.rows_of(named.names) if row is not None}
    found = []
    for row in dict.fromkeys(layout.rows):
        if row.name not in names:
            found.append(f"{row}: nothing is called {row.name!r}")
        elif row not in used and not layout.ordered:  # a rule that is never free is a second choice
            where = f"no argument below {row.at!r} has that name" if row.at else "another row goes before it everywhere"
            found.append(f"{row}: never applies, {where}")
    asked = {atom for _, demand, _ in demands(program, mesh) for atoms in demand.dims for atom in atoms}
    for axis, atoms in mesh.atoms_of.items():
        if mesh.count(atoms) > 1 and not asked & set(atoms):
            found.append(f"axis {axis!r} of the mesh: no row and no mark of this program uses it")
    return tuple(dict.fromkeys(found))


def refuse_unused(program: Program, mesh: Mesh) -> None:
    """Refuses a program that does not use all of its marks and all of its layout."""
    if program.unread_marks:
        where, _, what = program.unread_marks[0].partition(": ")
        hint = "A mark is about the value that it returns. Use that value, or allow it with strict=False."
        raise PlanError(f"a mark of {program.name} has no effect.", where, what, hint)
    if found := unused_of_layout(program, mesh):
        raise PlanError(
            f"{program.name} does not use all of its layout.",
            None,
            "\n  ".join([*found, f"mesh: {mesh}; {program.layout}"]),
            "Correct the names, leave out the rows, or allow it with strict=False.",
        )


def _under(program: Program) -> list[Named]:
    """The values for which the program's own layout says what their names mean."""
    return [named for named in program.named if named.layout == program.layout]


def _values(n: int) -> str:
    return "1 value" if n == 1 else f"{n} values"


def _more(places: list[str]) -> str:
    return f" and {len(places) - 1} more" if len(places) > 1 else ""
