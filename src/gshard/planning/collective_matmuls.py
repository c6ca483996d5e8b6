"""Decides which contractions run as collective matmuls, among those that ``planning.rings`` finds.

    jit(f, mesh=8, collective_matmul=2**28)                     # arrays of more than 256 MiB when gathered
    jit(f, mesh=mesh, collective_matmul=CollectiveMatmul(machine="v4:4x4x4"))  # where the machine's roofline gains

A contraction that waits for a gather takes the sum of both times. As a collective matmul, it takes the longer of both
for each part, and one step more. But each step launches a kernel and reads the operands that do not rotate again, and
elementwise work on the result is no longer fused with the product. If the compiler hides gathers, only the remaining
stall counts (``gather_stalls``). If it hides no permutation, a ring gains nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
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
from gshard.device.roofline import kernel_roofline
from gshard.planning.rings import Offer, together


@dataclasses.dataclass(frozen=True, slots=True)
class CollectiveMatmul:
    """Selects contractions that run as collective matmuls: part by part, instead of after a gather or before a scatter.

    With neither ``above`` nor ``machine``, it selects all contractions that send no more bytes as a ring.

    Attributes:
        above: bytes. Selects contractions for which a device would hold a larger gathered operand, or a larger result
            before its scatter. If two such arrays are split along the same dimension, both rotate: Cannon's algorithm,
            whose skew sends one more part of each. An array that several contractions need is sent for each of them,
            instead of once for all.
        machine: as in ``explain(...).cost``. Selects contractions that are faster as a ring by the machine's roofline,
            and send no more bytes. If nothing is known about async overlap (GPU), sends overlap with computation.
        both_ways: whether half of every part rotates in each direction, which uses both directions of a ring of links.
            None lets the machine's network decide; without a machine, all parts rotate in one direction.
    """

    above: float | None = None
    machine: str | Machine | None = None
    both_ways: bool | None = None

    @staticmethod
    def of(given: Any, mesh: Mesh, machine: Machine | None = None) -> CollectiveMatmul | None:
        """Reads the option ``collective_matmul=``; None selects by the machine, if its compiler hides permutations.

        Raises:
            PlanError: the option is not a truth value, a number of bytes or a ``CollectiveMatmul``.
            MachineError: there is no such machine, or it has another number of devices than the mesh.

        >>> mesh = Mesh.abstract(devices=8)
        >>> CollectiveMatmul.of(True, mesh) == CollectiveMatmul(), CollectiveMatmul.of(2**28, mesh).above
        (True, 268435456)
        """
        if given is None and machine is not None and PERMUTE in (machine.compiler.hides or ()):
            return CollectiveMatmul(machine=machine)
        if given is None or given is False:
            return None
        selected = CollectiveMatmul() if given is True else given
        if isinstance(selected, int | float):
            selected = CollectiveMatmul(above=selected)
        if not isinstance(selected, CollectiveMatmul) or (selected.above is not None and not selected.above >= 0):
            raise PlanError(
                f"collective_matmul={given!r} says nothing.",
                hint="Write True, False, the bytes above which arrays come in parts, or gshard.CollectiveMatmul(...).",
            )
        if selected.machine is not None:
            _machine(selected.machine, mesh.size)
        return selected

    def on(self, plan: Plan) -> Chooser:
        """The chooser for the equations of one plan."""
        return Chooser(self, plan, None if self.machine is None else _machine(self.machine, plan.mesh.size))


@dataclasses.dataclass(frozen=True)
class Chooser:
    """Chooses the rings of the equations of a plan (a ``planning.rings.Chooser``)."""

    options: CollectiveMatmul
    plan: Plan
    machine: Machine | None

    def chosen(self, equation: Equation, offers: tuple[Offer, ...]) -> Ring | None:
        """The ring of an equation: of arrays above the limit, two that can rotate together, or else the largest."""
        above = self.options.above
        if self.machine is None:
            # Every device holds the result of an all-reduce whole in any case.
            offers = tuple(offer for offer in offers if not offer.whole)
        ring = self._of_large(equation, [offer for offer in offers if above is not None and offer.bytes > above])
        if ring is not None:
            return self._layouts(ring)[0]
        free = [offer for offer in offers if not offer.shared]
        if self.machine is not None:
            rings = [(ring, offer.whole) for offer in free for ring in self._layouts(offer.ring)]
            gains = [self._gain(ring, equation, whole) for ring, whole in rings]
            if max(gains, default=0.0) <= 0:
                return None
            return rings[gains.index(max(gains))][0]
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
        """The ring in each order of its parts on the machine, one way and, if the other direction is free, both ways.

        On a machine, one iteration of the loop runs two steps if operands rotate, so that no part is copied
        (``Ring.two_steps``).
        """
        mesh, machine = self.plan.mesh, self.machine
        requested = self.options.both_ways
        is_long = ring.steps(mesh) > 2
        if machine is None:
            return [dataclasses.replace(ring, both_ways=bool(requested) and is_long)]
        layouts = []
        for order in _orders(ring.rotating, mesh, machine):
            if requested is not None:
                directions = [requested and is_long]
            elif is_long and _links(ring.rotating, order, mesh, machine).free:
                directions = [True, False]
            else:
                directions = [False]
            for both_ways in directions:
                layouts.append(
                    dataclasses.replace(ring, both_ways=both_ways, two_steps=bool(ring.operands), order=order)
                )
        return layouts

    @functools.cached_property
    def _stalls(self) -> dict[tuple[Equation, int], float]:
        assert self.machine is not None
        return gather_stalls(self.plan, self.machine)

    def _gain(self, ring: Ring, e: Equation, whole: bool) -> float:
        """The seconds that a ring with one rotating array saves, by the roofline.

        If the result is scattered instead of all-reduced (``whole``), it is gathered afterwards.
        """
        plan, machine = self.plan, self.machine
        assert e.rule is not None
        assert machine is not None
        mesh, split, steps = plan.mesh, plan.splits[e], ring.steps(plan.mesh)
        (result,) = e.outputs
        sizes = local_sizes(e, plan)
        result_bytes = bytes_of(result, leaving(e.rule, split, ring, 0), mesh)
        (atoms,) = ring.rotating
        if ring.result:
            sent = result_bytes
            waited = seconds("all_reduce" if whole else "reduce_scatter", sizes[-1], mesh, machine, atoms)
            waited -= seconds("all_gather", sent, mesh, machine, atoms) if whole else 0.0
        else:
            i = ring.operands[0][0]
            sent = bytes_of(e.inputs[i], entering(e.rule, split, ring, i), mesh)
            waited = self._stalls.get((e, i), 0.0)
        compute = self._step_compute(ring, e, sizes)
        links = _links(ring.rotating, ring.order, mesh, machine)
        send = (1 + bool(ring.result)) * links.latency + sent * links.a_byte / (1 + ring.both_ways)
        overlaps = machine.compiler.hides is None or PERMUTE in machine.compiler.hides
        step = max(compute, send) if overlaps else compute + send
        # Readers of the result are no longer fused with the product: they read and write it once more.
        epilogue = kernel_roofline(machine, e, moved=2 * result_bytes).memory
        return product_seconds(e, plan, machine) + waited - ((steps - 1) * step + compute + epilogue)

    def _step_compute(self, ring: Ring, e: Equation, sizes: Sequence[float]) -> float:
        """The seconds in which a device computes one step of a ring, whose arrays have these bytes without it."""
        machine, mesh, steps = self.machine, self.plan.mesh, ring.steps(self.plan.mesh)
        assert e.rule is not None
        assert machine is not None
        # The bytes that a step reads and writes: parts of arrays with the factor; whole arrays without it, for each
        # direction and turn. Sums are read as well.
        lanes = (1 + bool(ring.result)) * (1 + ring.both_ways)
        moved = [
            size / steps if any(ring.factor in f for f in dims) else size * lanes
            for size, dims in zip(sizes, (*e.rule.operands, *e.rule.results), strict=True)
        ]
        is_summed = not any(ring.factor in f for f in e.rule.results[0])
        if is_summed:  # sums of low precision are accumulated in float32
            moved[-1] *= max(1.0, itemsize(jnp.float32) / itemsize(e.outputs[0].dtype))
        moved[-1] *= 2 if is_summed or ring.result else 1
        flops = e.rule.flops / parts(self.plan.splits[e], mesh)
        return kernel_roofline(machine, e, flops / steps, moved=sum(moved)).work + lanes * machine.launch


@dataclasses.dataclass(frozen=True, slots=True)
class _Links:
    """The links around a ring: seconds of a message and of every byte, and whether the other direction is free."""

    latency: float
    a_byte: float
    free: bool


@tabulated(256)
def _links(rotating: tuple[Atoms, ...], order: tuple[int, ...], mesh: Mesh, machine: Machine) -> _Links:
    """The slowest links of the rotating arrays."""
    found = []
    for atoms in rotating:
        places = order or range(mesh.count(atoms))
        moves = [(places[(r + 1) % len(places)], places[r]) for r in range(len(places))]
        devices = np.asarray(mesh.order or range(mesh.size), np.intp)
        sources, targets = devices[np.asarray(pairs(moves, atoms, mesh), np.intp).reshape(-1, 2).T]
        found.append((*permuting(sources, targets, machine), goes_one_way(sources, targets, machine)))
    latencies, a_byte, free = zip(*found, strict=True)
    return _Links(max(latencies), max(a_byte), all(free))


@tabulated(256)
def _orders(rotating: tuple[Atoms, ...], mesh: Mesh, machine: Machine) -> list[tuple[int, ...]]:
    """Orders of the parts around a ring: as they are numbered, and along a cycle of the grid on which they lie."""
    orders: list[tuple[int, ...]] = [()]
    if len(rotating) > 1:
        return orders
    (atoms,) = rotating
    size = mesh.count(atoms)
    strides = dict(zip(mesh.atoms, np.cumprod([1, *[n for n in mesh.atom_sizes.values()][:0:-1]])[::-1], strict=True))
    digits = np.unravel_index(np.arange(size), [mesh.atom_sizes[a] for a in atoms])
    devices = sum(digit * strides[a] for digit, a in zip(digits, atoms, strict=True))
    part_at = {coordinates(mesh.order[d] if mesh.order else int(d), machine): i for i, d in enumerate(devices)}
    varying = [k for k in range(len(machine.network)) if len({place[k] for place in part_at}) > 1]
    if len(varying) != 2:
        return orders
    for across, along in (varying, varying[::-1]):
        rows, columns = (sorted({place[k] for place in part_at}) for k in (across, along))
        if len(rows) % 2 or len(rows) * len(columns) != size:
            continue
        cells = [(r, c) for k, r in enumerate(rows) for c in (columns[1:], columns[:0:-1])[k % 2]]
        cells += [(r, columns[0]) for r in reversed(rows)]
        parts_at = {(place[across], place[along]): i for place, i in part_at.items()}
        orders.append(tuple(parts_at[cell] for cell in cells))
    return orders


@tabulated(64)
def _machine(machine: str | Machine, devices: int) -> Machine:
    return Machine.read(machine, devices)
