"""Finds the branches and loops that not all devices run.

Inside a partly manual ``shard_map``, a value may differ between positions along the manual axes: arrays that are split
along them, and the position itself. A sum or a gather along the axes is equal at all positions. If a value that differs
decides a branch or a loop, devices at some positions run it and others do not.
"""

from __future__ import annotations

from collections.abc import Iterable

from gshard.core.manual_axes import ManualAxes, manual_axes
from gshard.core.mesh import Mesh
from gshard.core.program import Block, Constant, Equation, Value
from gshard.language.region import REGIONS

_Atoms = frozenset[str]
_NONE: _Atoms = frozenset()


def diverging(block: Block, mesh: Mesh) -> frozenset[Equation]:
    """The branches and loops of a program that some devices run, or run more often than others."""
    manual = manual_axes(block, mesh)
    if not manual.inside:
        return frozenset()
    found = _Varying(manual)
    found.run(block)
    return frozenset(e for e in block.walk() if e.blocks and found.of(REGIONS[e.name].decided(e)))


class _Varying:
    """For each value, the manual atoms along which it differs; grows until nothing changes."""

    def __init__(self, manual: ManualAxes):
        self._manual, self._along = manual, dict[Value, _Atoms]()

    def of(self, values: Iterable[Value | Constant]) -> _Atoms:
        return _NONE.union(*(self._along.get(v, _NONE) for v in values if isinstance(v, Value)))

    def run(self, block: Block) -> bool:
        """Visits a block once. True if anything changed."""
        changed = False
        for e in block.equations:
            changed |= self._region(e) if e.blocks else self._add(e.outputs, self._atoms_of(e))
        return changed

    def _atoms_of(self, e: Equation) -> _Atoms:
        here, mesh = self.of(e.inputs), self._manual.mesh
        if "callback" in e.name:
            return here | self._manual.at(e)  # each position makes its own call
        if e.rule is None or (manual := e.rule.manual) is None:
            return here
        here = (here | manual.differ(mesh)) - manual.equal(mesh)
        return here - manual.atoms(mesh) if manual.step == "leave" else here

    def _region(self, e: Equation) -> bool:
        changed, changed_now = False, True
        while changed_now:
            changed_now = self._add(e.outputs, self.of(REGIONS[e.name].decided(e)))
            for edge in e.edges:
                changed_now |= self._add([edge.inner], self.of([edge.outer]))
                if edge.outer not in e.inputs:  # an output, or a value passed to the next iteration
                    changed_now |= self._add([edge.outer], self.of([edge.inner]))
            for body in e.blocks:
                changed_now |= self.run(body)
            changed |= changed_now
        return changed

    def _add(self, values: Iterable[Value], atoms: _Atoms) -> bool:
        new = [v for v in values if atoms - self._along.get(v, _NONE)]
        for v in new:
            self._along[v] = self._along.get(v, _NONE) | atoms
        return bool(new)
