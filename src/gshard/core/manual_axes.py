"""Determines the atoms that cannot split a value inside a partly manual ``shard_map``.

Tracing opens such a region: equations at its boundary convert whole arrays to parts and parts to whole arrays
(``Rule.manual``), and the equations of the body stand between them. A value of the body is distributed over the devices
with one position along the manual axes. Devices at different positions along the manual axes hold different values, so
a plan must not split or gather the value over these axes. Over all other axes it is planned like any value. Values that
depend on no operands, or on whole arrays only, are equal on all devices, so no axes are manual for them.
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
    """The manual atoms of the values and equations of a program."""

    mesh: Mesh  # the mesh of the program
    inside: Mapping[Value, _Atoms]  # for each value of a partly manual region, the atoms that cannot split it

    def of(self, value: Value | Constant) -> _Atoms:
        """The atoms that cannot split a value."""
        return self.inside.get(value, _NONE) if isinstance(value, Value) and self.inside else _NONE

    def at(self, e: Equation) -> _Atoms:
        """The atoms that cannot split factors of an equation, except the pinned factors."""
        manual = None if e.rule is None else e.rule.manual
        if not self.inside and manual is None:
            return _NONE
        of_values = _NONE.union(*map(self.of, (*e.inputs, *e.outputs)))
        return of_values if manual is None else of_values | manual.atoms(self.mesh)

    def of_any(self, values: Iterable[Value | Constant]) -> _Atoms:
        """The atoms that cannot split at least one of some values."""
        return _NONE.union(*map(self.of, values)) if self.inside else _NONE

    def pinned(self, e: Equation) -> Split:
        """The split of the factors that the boundary of a region fixes, if the equation is at a boundary."""
        return {} if e.rule is None or e.rule.manual is None else e.rule.manual.pinned(self.mesh)

    def mesh_without(self, atoms: _Atoms) -> Mesh:
        """The mesh of the devices with one position along these atoms."""
        return _without(self.mesh, atoms) if atoms else self.mesh


@tabulated(64)
def _without(mesh: Mesh, atoms: _Atoms) -> Mesh:
    return mesh.without(atoms)


def before_any(cut: Atoms, atoms: _Atoms) -> Atoms:
    """The atoms of ``cut`` before the first one that is in ``atoms``.

    >>> before_any(("x", "y", "z"), frozenset({"y"}))
    ('x',)
    """
    return cut[: next((i for i, a in enumerate(cut) if a in atoms), len(cut))] if atoms else cut


def axes_without(axes: tuple[Atoms, ...], atoms: _Atoms) -> tuple[Atoms, ...]:
    """The axes without some atoms; axes that have no other atoms are omitted.

    >>> axes_without((("x.0", "x.1"), ("y",)), frozenset({"x.0", "y"}))
    (('x.1',),)
    """
    if not atoms:
        return axes
    return tuple(rest for axis in axes if (rest := tuple(a for a in axis if a not in atoms)))


@tabulated(64)
def manual_axes(block: Block, mesh: Mesh) -> ManualAxes:
    """Determines the manual atoms by following values from the entries of partly manual regions to the exits."""
    inside: dict[Value, _Atoms] = {}
    if any(e.rule is not None and e.rule.manual is not None for e in block.walk()):
        _follow(block, inside, mesh)
    return ManualAxes(mesh, inside)


def _follow(block: Block, inside: dict[Value, _Atoms], mesh: Mesh) -> None:
    for e in block.equations:
        manual = _NONE.union(*(inside.get(x, _NONE) for x in e.inputs if isinstance(x, Value)))
        if e.blocks:
            manual = _region(e, manual, inside, mesh)
        elif e.rule is not None and e.rule.manual is not None:
            atoms_of_boundary = _atoms_of_boundary(e, mesh)
            if e.rule.manual.step == "leave":
                manual = manual - atoms_of_boundary
            else:
                manual = manual | atoms_of_boundary
        for v in e.outputs:
            if manual:
                inside[v] = manual


def _atoms_of_boundary(e: Equation, mesh: Mesh) -> _Atoms:
    assert e.rule is not None
    assert e.rule.manual is not None
    try:
        return e.rule.manual.atoms(mesh)
    except ShardingError as reason:  # the shard_map has another mesh
        raise ShardingError(reason.what, e.line or None, reason.got, reason.hint) from None


def _region(e: Equation, manual: _Atoms, inside: dict[Value, _Atoms], mesh: Mesh) -> _Atoms:
    """The manual atoms of a loop or branch: the union over all its operands and results, to a fixed point."""
    while True:
        for block in e.blocks:
            if manual:
                inside.update(dict.fromkeys(block.inputs, manual))
            _follow(block, inside, mesh)
        results = (inside.get(x, _NONE) for block in e.blocks for x in block.outputs if isinstance(x, Value))
        with_results = manual.union(*results)
        if with_results == manual:
            return manual
        manual = with_results
