"""Overlap: which contractions are worth being collective matmuls (``passes.windowed``).

    gshard.jit(f, mesh=8, windowed=2**28)                              # what would be larger than 256 MiB when gathered
    gshard.jit(f, mesh=mesh, windowed=Windowed(machine="v4:4x4x4"))    # where a step hides the next part's way

On a machine a contraction that waits for a gather takes the sum of both; as a collective matmul it takes the longer of
both, once for each part, and a step more. But each step starts anew, and reads again what does not come in parts.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any

from gshard.analysis.machine import RING, Machine
from gshard.analysis.network import extents, permutation_seconds, seconds
from gshard.comm.route import pairs
from gshard.core.errors import PlanError
from gshard.core.mesh import Mesh
from gshard.core.plan import Plan
from gshard.core.program import Equation, Value, itemsize, short_dtype
from gshard.core.ring import Ring, entering, leaving
from gshard.core.sharding import Sharding
from gshard.core.split import operand_sharding, parts, result_sharding
from gshard.passes.windowed import Offer, together


@dataclasses.dataclass(frozen=True, slots=True)
class Windowed:
    """Contractions that run as collective matmuls: part by part, instead of after a gather or before a scatter.

    With neither a number nor a machine these are all that send no more bytes so.

    Attributes:
        above: those for which a device would hold a gathered operand, or a result still to be scattered, of more bytes
            than this. Where two such arrays are split along the same dimension both rotate: Cannon's algorithm, whose
            skew sends one more part of each. An array that several contractions need is sent for each of them,
            instead of once for all.
        machine: as for ``explain(...).cost``: those that its roofline expects to be faster so, and that send no more.
        both_ways: whether half of every part rotates in each direction, which rings of links make use of. None leaves
            that to the machine's network; without a machine all rotate in one.
    """

    above: float | None = None
    machine: str | None = None
    both_ways: bool | None = None

    @staticmethod
    def of(given: Any, mesh: Mesh) -> Windowed | None:
        """What ``windowed=`` asks for.

        Raises:
            PlanError: it is not a truth value, a number of bytes or a ``Windowed``.
            MachineError: there is no such machine, or it has another number of devices than the mesh.

        >>> mesh = Mesh.abstract(devices=8)
        >>> Windowed.of(False, mesh), Windowed.of(True, mesh) == Windowed(), Windowed.of(2**28, mesh).above
        (None, True, 268435456)
        """
        if given is None or given is False:
            return None
        asked = Windowed() if given is True else given
        if isinstance(asked, int | float):
            asked = Windowed(above=asked)
        if not isinstance(asked, Windowed) or (asked.above is not None and not asked.above >= 0):
            raise PlanError(
                f"windowed={given!r} says nothing.",
                hint="Write True, False, the bytes above which arrays come in parts, or gshard.Windowed(...).",
            )
        if asked.machine is not None:
            _machine(asked.machine, mesh.size)
        return asked

    def chosen(self, plan: Plan, equation: Equation, offers: tuple[Offer, ...]) -> Ring | None:
        """The ring of an equation: of what is too large the two that can rotate together, or the largest."""
        ring = self._of_large(plan, equation, [x for x in offers if self.above is not None and x.bytes > self.above])
        free = [] if ring is not None else [x for x in offers if not x.shared]
        if ring is None and self.machine is not None:
            machine = _machine(self.machine, plan.mesh.size)
            gains = [_gain(offer.ring, plan, equation, machine) for offer in free]
            if max(gains, default=0.0) > 0:
                ring = free[gains.index(max(gains))].ring
        elif ring is None and self.above is None and free:
            ring = max(free, key=lambda offer: offer.bytes).ring
        return None if ring is None else dataclasses.replace(ring, both_ways=self._both_ways(ring, plan.mesh))

    def _of_large(self, plan: Plan, equation: Equation, large: list[Offer]) -> Ring | None:
        pairs = [(a, b) for a, b in itertools.combinations(large, 2) if together(a.ring, b.ring, equation, plan)]
        if pairs:
            a, b = max(pairs, key=lambda pair: pair[0].bytes + pair[1].bytes)
            return together(a.ring, b.ring, equation, plan)
        return max(large, key=lambda offer: offer.bytes).ring if large else None

    def _both_ways(self, ring: Ring, mesh: Mesh) -> bool:
        if self.both_ways is not None or self.machine is None:
            return bool(self.both_ways) and ring.steps(mesh) > 2
        return _closes(ring, mesh, _machine(self.machine, mesh.size))


@functools.lru_cache(maxsize=64)
def _machine(text: str, devices: int) -> Machine:
    return Machine.of(text, devices)


def _closes(ring: Ring, mesh: Mesh, machine: Machine) -> bool:
    """Whether what rotates goes around rings of links, each of which has two directions."""
    found = [e for atoms in ring.rotating for spread in extents(mesh, machine, atoms) for e in spread]
    return ring.steps(mesh) > 2 and all(e.kind == RING for e in found)


def _gain(ring: Ring, plan: Plan, e: Equation, machine: Machine) -> float:
    """Seconds that a ring with one array that rotates spares, if the roofline is right."""
    assert e.rule is not None
    mesh, split, steps = plan.mesh, plan.splits[e], ring.steps(plan.mesh)
    values = [*e.inputs, *e.outputs]
    count = len(e.inputs)
    whole = [operand_sharding(e.rule, i, split) for i in range(count)] + [result_sharding(e.rule, 0, split)]
    taken = [entering(e.rule, split, ring, i) for i in range(count)] + [leaving(e.rule, split, ring, 0)]
    sizes = [_bytes(v, s, mesh) for v, s in zip(values, whole, strict=True)]
    # What a step reads and writes: parts of what the factor is in, all of what it is not in; sums are read as well.
    moved = [
        size / steps if any(ring.factor in f for f in dims) else size
        for size, dims in zip(sizes, (*e.rule.operands, *e.rule.results), strict=True)
    ]
    adds = bool(ring.result) or not any(ring.factor in f for f in e.rule.results[0])
    moved[count] *= 2 if adds else 1
    rate = machine.rate(short_dtype(e.inputs[0].dtype))
    flops = e.rule.flops / parts(split, mesh)
    at_once = max(flops / rate, sum(sizes) / machine.memory_bandwidth) + machine.launch
    one = max(flops / steps / rate, sum(moved) / machine.memory_bandwidth) + machine.launch
    (atoms,) = ring.rotating
    if ring.result:
        sent, waited = (
            _bytes(values[count], taken[count], mesh),
            seconds("reduce_scatter", sizes[count], mesh, machine, atoms),
        )
    else:
        i = ring.operands[0][0]
        sent = _bytes(values[i], taken[i], mesh)
        waited = seconds("all_gather", sent, mesh, machine, atoms)
    neighbours = pairs([((a + 1) % steps, a) for a in range(steps)], atoms, mesh)
    way = permutation_seconds(sent // 2 if _closes(ring, mesh, machine) else sent, neighbours, machine)
    return at_once + waited - ((steps - 1) * max(one, way) + one)


def _bytes(v: Any, sharding: Sharding, mesh: Mesh) -> int:
    shape = sharding.local_shape(mesh, v.shape) if isinstance(v, Value) else v.shape
    return math.prod(shape) * itemsize(v.dtype)
