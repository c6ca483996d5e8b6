"""Traces the sharding of each value of a plan back to a mark or argument."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator, Mapping

from gshard.core.mesh import Atoms
from gshard.core.plan import Reason
from gshard.core.program import Equation, Program, Value
from gshard.core.sharding import Sharding
from gshard.planning.propagated import Propagated


class Reasons(Mapping[tuple[Value, int], Reason]):
    """The reason for each split dimension, computed at the first access by ``reasons_of``."""

    def __init__(self, program: Program, shardings: Mapping[Value, Sharding], propagated: Propagated):
        self._of = program, shardings, propagated

    @functools.cached_property
    def _found(self) -> dict[tuple[Value, int], Reason]:
        return reasons_of(*self._of)

    def __getitem__(self, at: tuple[Value, int]) -> Reason:
        return self._found[at]

    def __iter__(self) -> Iterator[tuple[Value, int]]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


def reasons_of(
    program: Program, shardings: Mapping[Value, Sharding], propagated: Propagated
) -> dict[tuple[Value, int], Reason]:
    """Why each dimension is split: the equation through which its atoms came, and the value from which they came.

    Reasons begin at marks and arguments and pass from array to array as far as these share atoms. They follow the steps
    of propagation where values have their propagated shardings, and otherwise any equation at which the arrays meet.
    """
    followers: dict[Value, list[tuple[Value, int]]] = {}
    reasons: dict[tuple[Value, int], Reason] = {}
    for (v, d), reason in propagated.reasons.items():
        if shardings[v].dims != propagated.shardings[v].dims:
            continue
        if reason.source is None:
            reasons[v, d] = reason
        else:
            followers.setdefault(reason.source, []).append((v, d))
    neighbours = _neighbours(program)
    # For each value, the split dimensions without a reason so far.
    missing = {
        v: [d for d, atoms in enumerate(s.dims) if atoms and (v, d) not in reasons] for v, s in shardings.items()
    }
    missing = {v: dims for v, dims in missing.items() if dims}
    queues: tuple[deque[Value], ...] = tuple(deque() for _ in range(4))
    queues[0].extend(dict.fromkeys(v for v, _ in reasons))
    while (level := next((i for i, queue in enumerate(queues) if queue), None)) is not None:
        source = queues[level].popleft()
        reached = []
        if level == 0:
            reached = [(v, d, propagated.reasons[v, d]) for v, d in followers.get(source, ())]
        else:
            source_atoms = {
                a for d, atoms in enumerate(shardings[source].dims) if (source, d) in reasons for a in atoms
            }
            for v, e in neighbours.get(source, ()) if source_atoms else ():
                for d in missing.get(v, ()):
                    if _comes_from(shardings[v].dims[d], source_atoms, level):
                        reached.append((v, d, Reason("cost", e.line, e.name, source)))
        for v, d, reason in reached:
            if (v, d) not in reasons:
                reasons[v, d] = reason
                queues[0].append(v)
                missing[v] = [other for other in missing[v] if other != d]
        if level + 1 < len(queues):
            queues[level + 1].append(source)
    for e in program.block.walk():
        for v in e.outputs:
            for d, atoms in enumerate(shardings[v].dims):
                if atoms:
                    reasons.setdefault((v, d), Reason("cost", e.line, e.name))
    return reasons


def _comes_from(atoms: Atoms, source_atoms: set[str], level: int) -> bool:
    """Whether atoms come from an array with ``source_atoms``: at level 1 all of them, at 2 the major one, at 3 any."""
    if level == 1:
        return bool(atoms) and source_atoms.issuperset(atoms)
    return bool(source_atoms & set(atoms[:1] if level == 2 else atoms))


def _neighbours(program: Program) -> dict[Value, list[tuple[Value, Equation]]]:
    """For each value, the other arrays at its equations and at the boundaries of its regions."""
    around: dict[Value, list[tuple[Value, Equation]]] = {}
    for e in program.block.walk():
        arrays = dict.fromkeys(v for v in (*e.inputs, *e.outputs) if isinstance(v, Value) and e.rule is not None)
        pairs = [(v, x) for v in arrays for x in arrays if v is not x]
        pairs += [pair for a in e.edges for pair in ((a.outer, a.inner), (a.inner, a.outer))]
        for v, x in pairs:
            around.setdefault(v, []).append((x, e))
    return around
