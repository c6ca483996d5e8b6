"""Diverging: finds the branches and loops that not all devices run.

Inside a partly manual ``shard_map`` a value may differ from one position along the manual axes to another: what was cut
along them, and the position itself. What was added up, or gathered, along them is the same again. A branch or loop that
is decided by a value that differs is run by the devices of some positions, and not by those of others.
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
    """The branches and loops of a program that devices may run, or run so often, while others do not."""
    manual = manual_axes(block, mesh)
    if not manual.inside:
        return frozenset()
    found = _Varying(manual)
    found.run(block)
    return frozenset(e for e in block.walk() if e.blocks and found.of(REGIONS[e.name].decided(e)))


class _Varying:
    """Along which manual atoms values differ; grows until nothing changes."""

    def __init__(self, manual: ManualAxes):
        self._manual, self._along = manual, dict[Value, _Atoms]()

    def of(self, values: Iterable[Value | Constant]) -> _Atoms:
        return _NONE.union(*(self._along.get(v, _NONE) for v in values if isinstance(v, Value)))

    def run(self, block: Block) -> bool:
        """Goes through a block once; whether anything was new."""
        news = False
        for e in block.equations:
            news |= self._region(e) if e.blocks else self._add(e.outputs, self._made(e))
        return news

    def _made(self, e: Equation) -> _Atoms:
        here, mesh = self.of(e.inputs), self._manual.mesh
        if "callback" in e.name:
            return here | self._manual.at(e)  # each position calls for itself
        if e.rule is None or (manual := e.rule.manual) is None:
            return here
        here = (here | manual.differ(mesh)) - manual.equal(mesh)
        return here - manual.atoms(mesh) if manual.step == "leave" else here

    def _region(self, e: Equation) -> bool:
        news, again = False, True
        while again:
            again = self._add(e.outputs, self.of(REGIONS[e.name].decided(e)))
            for edge in e.edges:
                again |= self._add([edge.inner], self.of([edge.outer]))
                if edge.outer not in e.inputs:  # what leaves, or goes round
                    again |= self._add([edge.outer], self.of([edge.inner]))
            for body in e.blocks:
                again |= self.run(body)
            news |= again
        return news

    def _add(self, values: Iterable[Value], atoms: _Atoms) -> bool:
        new = [v for v in values if atoms - self._along.get(v, _NONE)]
        for v in new:
            self._along[v] = self._along.get(v, _NONE) | atoms
        return bool(new)
