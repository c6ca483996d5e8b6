"""Manual axes: the atoms that cannot split any value inside a partly manual ``shard_map``.

Such a region is opened when the program is traced: its body stands between equations that make parts of whole arrays
and whole arrays of parts (``Rule.manual``). A value in between is what the devices of one position along the manual
axes hold together. Over these axes each device has its own, so that a plan must neither split it over them nor gather
it along them; over all others it is planned like any value. What is made of nothing, or of whole arrays alone, is the
same everywhere, and free.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from gshard.core.errors import ShardingError
from gshard.core.mesh import Atoms, Mesh
from gshard.core.planning_tables import tabulated
from gshard.core.program import Block, Constant, Equation, Value
from gshard.core.split import Split

_Atoms = frozenset[str]
_NONE: _Atoms = frozenset()


@dataclasses.dataclass(frozen=True, eq=False)
class ManualAxes:
    """Which atoms are manual where in a program.

    Attributes:
        mesh: the devices.
        inside: for each value of a partly manual region, the atoms over which it cannot be split.
    """

    mesh: Mesh
    inside: Mapping[Value, _Atoms]

    def of(self, value: Value | Constant) -> _Atoms:
        """The atoms over which a value cannot be split."""
        return self.inside.get(value, _NONE) if isinstance(value, Value) and self.inside else _NONE

    def at(self, e: Equation) -> _Atoms:
        """The atoms over which no factor of an equation can be split, but those that are pinned."""
        if not self.inside and (e.rule is None or e.rule.manual is None):
            return _NONE
        found = _NONE.union(*map(self.of, (*e.inputs, *e.outputs)))
        return found if e.rule is None or e.rule.manual is None else found | e.rule.manual.atoms(self.mesh)

    def of_any(self, values: Iterable[Value | Constant]) -> _Atoms:
        """The atoms over which any of some values cannot be split."""
        return _NONE.union(*map(self.of, values)) if self.inside else _NONE

    def pinned(self, e: Equation) -> Split:
        """The factors of an equation whose atoms the boundary of a region names."""
        return {} if e.rule is None or e.rule.manual is None else e.rule.manual.pinned(self.mesh)

    def mesh_without(self, atoms: _Atoms) -> Mesh:
        """The devices of one position along these atoms."""
        return _without(self.mesh, atoms) if atoms else self.mesh


@tabulated(64)
def _without(mesh: Mesh, atoms: _Atoms) -> Mesh:
    return mesh.without(atoms)


def before_any(cut: Atoms, atoms: _Atoms) -> Atoms:
    """The first of some atoms, up to one of those that are not allowed.

    >>> before_any(("x", "y", "z"), frozenset({"y"}))
    ('x',)
    """
    return cut[: next((i for i, a in enumerate(cut) if a in atoms), len(cut))] if atoms else cut


def axes_without(axes: tuple[Atoms, ...], atoms: _Atoms) -> tuple[Atoms, ...]:
    """What is left of axes without some atoms.

    >>> axes_without((("x.0", "x.1"), ("y",)), frozenset({"x.0", "y"}))
    (('x.1',),)
    """
    if not atoms:
        return axes
    return tuple(rest for own in axes if (rest := tuple(a for a in own if a not in atoms)))


@tabulated(64)
def manual_axes(block: Block, mesh: Mesh) -> ManualAxes:
    """Follows values from where they enter partly manual regions to where they leave them.

    Args:
        block: a program's equations.
        mesh: the devices.
    """
    inside: dict[Value, _Atoms] = {}
    if any(e.rule is not None and e.rule.manual is not None for e in block.walk()):
        _follow(block, inside, mesh)
    return ManualAxes(mesh, inside)


def _follow(block: Block, inside: dict[Value, _Atoms], mesh: Mesh) -> None:
    for e in block.equations:
        here = _NONE.union(*(inside.get(x, _NONE) for x in e.inputs if isinstance(x, Value)))
        if e.blocks:
            here = _region(e, here, inside, mesh)
        elif e.rule is not None and e.rule.manual is not None:
            own = _named(e, mesh)
            here = here - own if e.rule.manual.step == "leave" else here | own
        for v in e.outputs:
            if here:
                inside[v] = here


def _named(e: Equation, mesh: Mesh) -> _Atoms:
    assert e.rule is not None
    assert e.rule.manual is not None
    try:
        return e.rule.manual.atoms(mesh)
    except ShardingError as reason:  # its mesh is another one
        raise ShardingError(reason.what, e.line or None, reason.got, reason.hint) from None


def _region(e: Equation, here: _Atoms, inside: dict[Value, _Atoms], mesh: Mesh) -> _Atoms:
    """All that a loop or branch carries is manual over what any of it is: what goes on inside decides over the rest."""
    while True:
        for block in e.blocks:
            if here:
                inside.update(dict.fromkeys(block.inputs, here))
            _follow(block, inside, mesh)
        results = (inside.get(x, _NONE) for block in e.blocks for x in block.outputs if isinstance(x, Value))
        found = here.union(*results)
        if found == here:
            return here
        here = found
