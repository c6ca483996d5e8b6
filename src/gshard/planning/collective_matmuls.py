"""Collective matmuls: decides which contractions should be some (``planning.rings`` finds those that can be).

    jit(f, mesh=8, collective_matmul=2**28)                     # what would be larger than 256 MiB when gathered
    jit(f, mesh=mesh, collective_matmul=CollectiveMatmul(machine="v4:4x4x4"))  # where a step hides the next part's way

A contraction that waits for a gather takes the sum of both times. As a collective matmul it takes the longer of both
for each part, and one step more. But each step launches a kernel and reads again the operands that do not come in
parts, and elementwise work on the result is not part of the product any more. Where the compiler hides gathers, only
the stall that it leaves counts (``gather_stalls``). Where it hides no permutation, there is nothing to win.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np

from gshard.comm.route import pairs
from gshard.core.errors import PlanError
from gshard.core.mesh import Atoms, Mesh
from gshard.core.plan import Plan
from gshard.core.planning_tables import tabulated
from gshard.core.program import Equation, itemsize
from gshard.core.ring import Ring, entering, leaving
from gshard.core.split import parts
from gshard.device.gather_stalls import bytes_of, gather_stalls, local_sizes, product_seconds
from gshard.device.machine import Machine
from gshard.device.machine_kinds import PERMUTE
from gshard.device.network import coordinates, goes_one_way, permuting, seconds
from gshard.device.roofline import dtype_of, roofline
from gshard.planning.rings import Offer, together


@dataclasses.dataclass(frozen=True, slots=True)
class CollectiveMatmul:
    """Contractions that run as collective matmuls: part by part, instead of after a gather or before a scatter.

    With neither a number nor a machine these are all that send no more bytes so.

    Attributes:
        above: those for which a device would hold a gathered operand, or a result still to be scattered, of more bytes
            than this. Where two such arrays are split along the same dimension both rotate: Cannon's algorithm, whose
            skew sends one more part of each. An array that several contractions need is sent for each of them,
            instead of once for all.
        machine: as for ``explain(...).cost``: those that its roofline expects to be faster so, and that send no more.
            Where it is not known what the compiler hides (GPU), it is taken to send while it computes.
        both_ways: whether half of every part rotates in each direction, which rings of links make use of. None leaves
            that to the machine's network; without a machine all rotate in one.
    """

    above: float | None = None
    machine: str | Machine | None = None
    both_ways: bool | None = None

    @staticmethod
    def of(given: Any, mesh: Mesh, machine: Machine | None = None) -> CollectiveMatmul | None:
        """What ``collective_matmul=`` asks for; None leaves it to the machine, if its compiler hides permutations.

        Raises:
            PlanError: it is not a truth value, a number of bytes or a ``CollectiveMatmul``.
            MachineError: there is no such machine, or it has another number of devices than the mesh.

        >>> mesh = Mesh.abstract(devices=8)
        >>> CollectiveMatmul.of(True, mesh) == CollectiveMatmul(), CollectiveMatmul.of(2**28, mesh).above
        (True, 268435456)
        """
        if given is None and machine is not None and PERMUTE in (machine.compiler.hides or ()):
            return CollectiveMatmul(machine=machine)
        if given is None or given is False:
            return None
        asked = CollectiveMatmul() if given is True else given
        if isinstance(asked, int | float):
            asked = CollectiveMatmul(above=asked)
        if not isinstance(asked, CollectiveMatmul) or (asked.above is not None and not asked.above >= 0):
            raise PlanError(
                f"collective_matmul={given!r} says nothing.",
                hint="Write True, False, the bytes above which arrays come in parts, or gshard.CollectiveMatmul(...).",
            )
        if asked.machine is not None:
            _machine(asked.machine, mesh.size)
        return asked

    def on(self, plan: Plan) -> Chooser:
        """What decides for the equations of one plan."""
        return Chooser(self, plan, None if self.machine is None else _machine(self.machine, plan.mesh.size))


@dataclasses.dataclass(frozen=True)
class Chooser:
    """Decides for the equations of a plan; a ``planning.rings.Policy``."""

    asked: CollectiveMatmul
    plan: Plan
    machine: Machine | None

    def chosen(self, equation: Equation, offers: tuple[Offer, ...]) -> Ring | None:
        """The ring of an equation: of what is too large the two that can rotate together, or the largest."""
        above = self.asked.above
        if self.machine is None:
            offers = tuple(x for x in offers if not x.whole)  # what an all-reduce makes is held whole in any case
        ring = self._of_large(equation, [x for x in offers if above is not None and x.bytes > above])
        if ring is not None:
            return self._layouts(ring)[0]
        free = [x for x in offers if not x.shared]
        if self.machine is not None:
            ways = [(ring, offer.whole) for offer in free for ring in self._layouts(offer.ring)]
            gains, rings = [self._gain(ring, equation, whole) for ring, whole in ways], [ring for ring, _ in ways]
            return rings[gains.index(max(gains))] if max(gains, default=0.0) > 0 else None
        if above is None and free:
            return self._layouts(max(free, key=lambda offer: offer.bytes).ring)[0]
        return None

    def _of_large(self, equation: Equation, large: list[Offer]) -> Ring | None:
        plan = self.plan
        pairs = [(a, b) for a, b in itertools.combinations(large, 2) if together(a.ring, b.ring, equation, plan)]
        if pairs:
            a, b = max(pairs, key=lambda pair: pair[0].bytes + pair[1].bytes)
            return together(a.ring, b.ring, equation, plan)
        return max(large, key=lambda offer: offer.bytes).ring if large else None

    def _layouts(self, ring: Ring) -> list[Ring]:
        """The ring in each order in which its parts may stand on the machine, one way and, if that is free, both ways.

        On a machine time counts, so that parts of operands go to and fro between two places.
        """
        mesh, asked, machine = self.plan.mesh, self.asked.both_ways, self.machine
        if machine is None:
            return [dataclasses.replace(ring, both_ways=bool(asked) and ring.steps(mesh) > 2)]
        found = []
        for order in _orders(ring.rotating, mesh, machine):
            free = ring.steps(mesh) > 2 and _way(ring.rotating, order, mesh, machine).free
            ways = ([True, False] if free else [False]) if asked is None else [asked and ring.steps(mesh) > 2]
            found += [
                dataclasses.replace(ring, both_ways=both, two_steps=bool(ring.operands), order=order) for both in ways
            ]
        return found

    @functools.cached_property
    def _stalls(self) -> dict[tuple[Equation, int], float]:
        assert self.machine is not None
        return gather_stalls(self.plan, self.machine)

    def _gain(self, ring: Ring, e: Equation, whole: bool) -> float:
        """Seconds that a ring with one array that rotates spares, if the roofline is right.

        What is scattered instead of all-reduced (``whole``) is gathered again.
        """
        plan, machine = self.plan, self.machine
        assert e.rule is not None
        assert machine is not None
        mesh, split, steps = plan.mesh, plan.splits[e], ring.steps(plan.mesh)
        values, count = [*e.inputs, *e.outputs], len(e.inputs)
        taken = [entering(e.rule, split, ring, i) for i in range(count)] + [leaving(e.rule, split, ring, 0)]
        sizes = local_sizes(e, plan)
        # What a step reads and writes: parts of what the factor is in, all of what it is not in for each direction and
        # turn; sums are read as well.
        lanes = (1 + bool(ring.result)) * (1 + ring.both_ways)
        moved = [
            size / steps if any(ring.factor in f for f in dims) else size * lanes
            for size, dims in zip(sizes, (*e.rule.operands, *e.rule.results), strict=True)
        ]
        summed = not any(ring.factor in f for f in e.rule.results[0])
        if summed:  # sums of low precision stay in float32
            moved[count] *= max(1.0, itemsize(jnp.float32) / itemsize(values[count].dtype))
        moved[count] *= 2 if summed or ring.result else 1
        flops = e.rule.flops / parts(split, mesh)
        one = roofline(machine, dtype_of(e), flops / steps, moved=sum(moved)).work + lanes * machine.launch
        (atoms,) = ring.rotating
        if ring.result:
            sent = bytes_of(values[count], taken[count], mesh)
            waited = seconds("all_reduce" if whole else "reduce_scatter", sizes[count], mesh, machine, atoms)
            waited -= seconds("all_gather", sent, mesh, machine, atoms) if whole else 0.0
        else:
            i = ring.operands[0][0]
            sent, waited = bytes_of(values[i], taken[i], mesh), self._stalls.get((e, i), 0.0)
        way = _way(ring.rotating, ring.order, mesh, machine)
        sending = (1 + bool(ring.result)) * way.latency + sent * way.a_byte / (1 + ring.both_ways)
        hides = machine.compiler.hides is None or PERMUTE in machine.compiler.hides
        step = max(one, sending) if hides else one + sending
        left = bytes_of(values[count], taken[count], mesh)
        again = roofline(
            machine, dtype_of(e), moved=2 * left
        ).memory  # what reads the result is not part of the product any more
        return product_seconds(e, plan, machine) + waited - ((steps - 1) * step + one + again)


@dataclasses.dataclass(frozen=True, slots=True)
class _Way:
    """From each device around a ring to the next: seconds of a message, of every byte, and whether back is free."""

    latency: float
    a_byte: float
    free: bool


@tabulated(256)
def _way(rotating: tuple[Atoms, ...], order: tuple[int, ...], mesh: Mesh, machine: Machine) -> _Way:
    """The longest way of what rotates."""
    found = []
    for atoms in rotating:
        places = order or range(mesh.count(atoms))
        moves = [(places[(r + 1) % len(places)], places[r]) for r in range(len(places))]
        devices = np.asarray(mesh.order or range(mesh.size), np.intp)
        sources, targets = devices[np.asarray(pairs(moves, atoms, mesh), np.intp).reshape(-1, 2).T]
        found.append((*permuting(sources, targets, machine), goes_one_way(sources, targets, machine)))
    latencies, a_byte, free = zip(*found, strict=True)
    return _Way(max(latencies), max(a_byte), all(free))


@tabulated(256)
def _orders(rotating: tuple[Atoms, ...], mesh: Mesh, machine: Machine) -> list[tuple[int, ...]]:
    """Orders of the parts around a ring: as they are counted, and along a cycle of a grid that they lie on."""
    found: list[tuple[int, ...]] = [()]
    if len(rotating) > 1:
        return found
    (atoms,) = rotating
    size = mesh.count(atoms)
    strides = dict(zip(mesh.atoms, np.cumprod([1, *[n for n in mesh.atom_sizes.values()][:0:-1]])[::-1], strict=True))
    digits = np.unravel_index(np.arange(size), [mesh.atom_sizes[a] for a in atoms])
    devices = sum(digit * strides[a] for digit, a in zip(digits, atoms, strict=True))
    at = {coordinates(mesh.order[d] if mesh.order else int(d), machine): i for i, d in enumerate(devices)}
    varies = [k for k in range(len(machine.network)) if len({place[k] for place in at}) > 1]
    if len(varies) != 2:
        return found
    for across, along in (varies, varies[::-1]):
        rows, columns = (sorted({place[k] for place in at}) for k in (across, along))
        if len(rows) % 2 or len(rows) * len(columns) != size:
            continue
        cells = [(r, c) for k, r in enumerate(rows) for c in (columns[1:], columns[:0:-1])[k % 2]]
        cells += [(r, columns[0]) for r in reversed(rows)]
        parts_at = {(place[across], place[along]): i for place, i in at.items()}
        found.append(tuple(parts_at[cell] for cell in cells))
    return found


@tabulated(64)
def _machine(machine: str | Machine, devices: int) -> Machine:
    return Machine.read(machine, devices)
