"""Decides which contractions run as collective matmuls, among those that can (``Ring``)."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from gshard.comm.reshard import plan_reshard, reshard_bytes
from gshard.comm.route import pairs
from gshard.comm.steps import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, aligned
from gshard.core.errors import PlanError
from gshard.core.mesh import Atoms, Mesh
from gshard.core.plan import Plan, Ring, entering, leaving, local_bytes
from gshard.core.planning_tables import tabulated, with_tables
from gshard.core.program import Block, Equation, Value, itemsize
from gshard.core.rule import operand_sharding, parts, result_sharding
from gshard.core.sharding import Sharding
from gshard.device.async_overlap import gather_stalls, local_sizes, product_seconds
from gshard.device.machine import PERMUTE, Machine
from gshard.device.network import coordinates, goes_one_way, permuting, seconds
from gshard.device.roofline import kernel_roofline
from gshard.language.region import REGIONS

# Finds the contractions of a plan that can run as collective matmuls.


@dataclasses.dataclass(frozen=True, slots=True)
class Offer:
    """A possible ring of a contraction."""

    ring: Ring  # the ring
    bytes: int  # bytes of the array on each device without the ring
    # whether other equations need the whole array too. Each contraction in which it rotates then sends it again.
    shared: bool = False
    # whether every device needs the sums, so that gshard gathers them afterwards (the second half of an all-reduce)
    whole: bool = False


Needs = dict[Value, dict[Sharding, list[tuple[Equation, int] | None]]]
"""For each value and sharding, the readers that need it: an equation and the operand's index, or None for others."""


@with_tables
def windowed(plan: Plan, policy: CollectiveMatmul | None) -> Plan:
    """The plan with the rings that a policy chooses.

    An array does not rotate at all if one of its readers cannot use it in parts: then gshard gathers it for all.
    """
    if policy is None:
        return plan
    rings: dict[Equation, Ring] = {}
    machine = None if policy.machine is None else Machine.read(policy.machine, plan.mesh.size)
    shardings, chooser = dict(plan.shardings), Chooser(policy, plan, machine)
    for block in plan.program.block.blocks():
        needs = _needs(block, plan)
        block_rings = _rings_of_block(block, plan, chooser, needs)
        shardings.update(
            {v: _target(v, plan, needs) for e, ring in block_rings.items() if ring.operand is None for v in e.outputs}
        )
        rings.update(block_rings)
    return dataclasses.replace(plan, shardings=shardings, rings=rings)


def _rings_of_block(block: Block, plan: Plan, chooser: Chooser, needs: Needs) -> dict[Equation, Ring]:
    """The rings of a block, chosen again without operands that would be gathered for another reader all the same."""
    banned: set[tuple[Equation, int]] = set()
    while True:
        rings: dict[Equation, Ring] = {}
        for e in block.equations:
            offers = tuple(_offers(e, plan, needs, banned))
            ring = chooser.chosen(e, offers) if offers else None
            if ring is not None:
                rings[e] = ring
        rotating = {(e, ring.operand) for e, ring in rings.items() if ring.operand is not None}
        gathered_anyway = {(e, i) for e, i in rotating if not rotating.issuperset(_users(e, i, plan, needs))}
        if not gathered_anyway:
            return rings
        banned |= gathered_anyway


def _needs(block: Block, plan: Plan) -> Needs:
    """The shardings in which the equations and the outputs of a block need their values."""
    needs: Needs = {}
    for e in block.equations:
        if e.rule is None:
            wanted = REGIONS[e.name].entry(e, plan.sharding)
        else:
            wanted = [operand_sharding(e.rule, i, plan.splits[e]) for i in range(len(e.inputs))]
        for i, (v, sharding) in enumerate(zip(e.inputs, wanted, strict=True)):
            if isinstance(v, Value):
                needs.setdefault(v, {}).setdefault(sharding, []).append((e, i) if e.rule is not None else None)
    for v in block.outputs:
        if isinstance(v, Value):
            needs.setdefault(v, {}).setdefault(plan.sharding(v), []).append(None)
    return needs


def _target(v: Value, plan: Plan, needs: Needs) -> Sharding:
    """The first sharding to which a result is moved: its own, or the one that all its readers need."""
    wanted = list(needs.get(v, ()))
    return wanted[0] if len(wanted) == 1 else plan.sharding(v)


def _users(e: Equation, i: int, plan: Plan, needs: Needs) -> list[tuple[Equation, int] | None]:
    """The readers that need operand ``i`` in the sharding in which this equation reads it, this equation included."""
    value = e.inputs[i]
    assert isinstance(value, Value)
    return needs[value][operand_sharding(e.operator_rule, i, plan.splits[e])]


def _offers(e: Equation, plan: Plan, needs: Needs, banned: set[tuple[Equation, int]]) -> Iterator[Offer]:
    """The possible rings. None under ``compute_on``, because a ring communicates in the equation."""
    if e.rule is None or e.rule.part is None or e.context.compute_type is not None:
        return
    if not all(math.prod(v.shape) for v in (*e.inputs, *e.outputs)):
        return
    for i, v in enumerate(e.inputs):
        if isinstance(v, Value) and (e, i) not in banned:
            shared = len(_users(e, i, plan, needs)) > 1
            offers = [
                Offer(ring, local_bytes(v, operand_sharding(e.rule, i, plan.splits[e]), plan.mesh), shared)
                for ring in _gathers(e, i, plan)
            ]
            yield from offers[-1:]
    yield from _scatters(e, plan, needs)


def _gathers(e: Equation, i: int, plan: Plan) -> Iterator[Ring]:
    """Rings for the gathers of an operand along one factor."""
    v, mesh, split = e.inputs[i], plan.mesh, plan.splits[e]
    assert isinstance(v, Value)
    source, target = plan.sharding(v), operand_sharding(e.operator_rule, i, split)
    steps = plan_reshard(source, target, v.shape, itemsize(v.dtype), mesh)
    for step in steps:
        if step.kind != ALL_GATHER or mesh.count(step.atoms) < 2 or len(e.operator_rule.operands[i][step.dim]) != 1:
            continue
        (f,), atoms = e.operator_rule.operands[i][step.dim], step.atoms
        if set(atoms) & {*target.atoms, *(a for a, _ in target.unreduced)}:
            continue
        if not aligned(v.shape[step.dim], mesh.count(target.dims[step.dim]), mesh.count(atoms)):
            continue
        ring = Ring(f, i, atoms)
        parts = entering(e.operator_rule, split, ring, i)
        sent = reshard_bytes(source, parts, v.shape, itemsize(v.dtype), mesh)
        sent += (mesh.count(atoms) - 1) * local_bytes(v, parts, mesh)
        if sent <= reshard_bytes(source, target, v.shape, itemsize(v.dtype), mesh):
            yield ring


def _scatters(e: Equation, plan: Plan, needs: Needs) -> Iterator[Offer]:
    """Rings for a result that is reduce-scattered, or all-reduced: then its first possible dimension is scattered."""
    (v,) = e.outputs
    source, target = result_sharding(e.operator_rule, 0, plan.splits[e]), _target(v, plan, needs)
    steps = plan_reshard(source, target, v.shape, itemsize(v.dtype), plan.mesh)
    if steps and steps[0].kind == REDUCE_SCATTER and len(e.operator_rule.results[0][steps[0].dim]) == 1:
        (f,) = e.operator_rule.results[0][steps[0].dim]
        yield Offer(Ring(f, None, steps[0].atoms), local_bytes(v, source, plan.mesh))
    if [step.kind for step in steps] == [ALL_REDUCE]:
        count = plan.mesh.count(steps[0].atoms)
        for n, atoms, factors in zip(v.shape, source.dims, e.operator_rule.results[0], strict=True):
            if len(factors) == 1 and n >= count * plan.mesh.count(atoms) and aligned(n, plan.mesh.count(atoms), count):
                ring = Ring(factors[0], None, steps[0].atoms)
                yield Offer(ring, local_bytes(v, source, plan.mesh), whole=True)
                return


@dataclasses.dataclass(frozen=True, slots=True)
class CollectiveMatmul:
    """Selects contractions that run as collective matmuls: part by part, instead of after a gather or before a scatter.

    With neither ``above`` nor ``machine``, it selects all contractions that send no more bytes as a ring.

    Attributes:
        above: bytes. Selects contractions for which a device would hold a larger gathered operand, or a larger result
            before its scatter: the largest such array rotates. An array that several contractions need is sent for
            each of them, instead of once for all.
        machine: as in ``explain(...).cost``. Selects contractions that are faster as a ring by the machine's roofline,
            and send no more bytes. If nothing is known about async overlap (GPU), sends overlap with computation.
    """

    above: float | None = None
    machine: str | Machine | None = None

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
                hint="Write True, False, a number of bytes (larger arrays: parts), or gshard.stages.CollectiveMatmul.",
            )
        if selected.machine is not None:
            Machine.read(selected.machine, mesh.size)
        return selected


@dataclasses.dataclass(frozen=True)
class Chooser:
    """Chooses the rings of the equations of a plan."""

    options: CollectiveMatmul
    plan: Plan
    machine: Machine | None

    def chosen(self, equation: Equation, offers: tuple[Offer, ...]) -> Ring | None:
        """The ring of an equation: of the largest array above the limit, or else the one that saves the most time."""
        above = self.options.above
        if self.machine is None:
            # Every device holds the result of an all-reduce whole in any case.
            offers = tuple(offer for offer in offers if not offer.whole)
        free = [offer for offer in offers if not offer.shared]
        if above is not None:
            large = [offer for offer in offers if offer.bytes > above]
        else:
            large = free if self.machine is None else []
        if large:
            return self._layouts(max(large, key=lambda offer: offer.bytes).ring)[0]
        if self.machine is None:
            return None
        rings = [(ring, offer.whole) for offer in free for ring in self._layouts(offer.ring)]
        gains = [self._gain(ring, equation, whole) for ring, whole in rings]
        return rings[gains.index(max(gains))][0] if max(gains, default=0.0) > 0 else None

    def _layouts(self, ring: Ring) -> list[Ring]:
        """The ring in each order of its parts on the machine, both ways if the other direction is free, and one way.

        On a machine, one iteration of the loop runs two steps if an operand rotates, so that no part is copied
        (``Ring.two_steps``).
        """
        mesh, machine = self.plan.mesh, self.machine
        if machine is None:
            return [ring]
        layouts = []
        for order in _orders(ring.atoms, mesh, machine):
            is_free = ring.steps(mesh) > 2 and _links(ring.atoms, order, mesh, machine).free
            for both_ways in (True, False) if is_free else (False,):
                layouts.append(Ring(ring.factor, ring.operand, ring.atoms, both_ways, ring.operand is not None, order))
        return layouts

    @functools.cached_property
    def _stalls(self) -> dict[tuple[Equation, int], float]:
        assert self.machine is not None
        return gather_stalls(self.plan, self.machine)

    def _gain(self, ring: Ring, e: Equation, whole: bool) -> float:
        """The seconds that a ring saves, by the roofline.

        If the result is scattered instead of all-reduced (``whole``), it is gathered afterwards.
        """
        plan, machine = self.plan, self.machine
        assert machine is not None
        mesh, split, steps = plan.mesh, plan.splits[e], ring.steps(plan.mesh)
        (result,) = e.outputs
        sizes = local_sizes(e, plan)
        result_bytes = local_bytes(result, leaving(e.operator_rule, split, ring, 0), mesh)
        if ring.operand is None:
            sent = result_bytes
            waited = seconds("all_reduce" if whole else "reduce_scatter", sizes[-1], mesh, machine, ring.atoms)
            waited -= seconds("all_gather", sent, mesh, machine, ring.atoms) if whole else 0.0
        else:
            parts_of_operand = entering(e.operator_rule, split, ring, ring.operand)
            sent = local_bytes(e.inputs[ring.operand], parts_of_operand, mesh)
            waited = self._stalls.get((e, ring.operand), 0.0)
        compute = self._step_compute(ring, e, sizes)
        links = _links(ring.atoms, ring.order, mesh, machine)
        send = (1 + (ring.operand is None)) * links.latency + sent * links.a_byte / (1 + ring.both_ways)
        overlaps = machine.compiler.hides is None or PERMUTE in machine.compiler.hides
        step = max(compute, send) if overlaps else compute + send
        # Readers of the result are no longer fused with the product: they read and write it once more.
        epilogue = kernel_roofline(machine, e, moved=2 * result_bytes).memory
        return product_seconds(e, plan, machine) + waited - ((steps - 1) * step + compute + epilogue)

    def _step_compute(self, ring: Ring, e: Equation, sizes: Sequence[float]) -> float:
        """The seconds in which a device computes one step of a ring, whose arrays have these bytes without it."""
        machine, mesh, steps = self.machine, self.plan.mesh, ring.steps(self.plan.mesh)
        assert machine is not None
        # The bytes that a step reads and writes: parts of arrays with the factor; whole arrays without it, for each
        # direction and turn. Sums are read as well.
        lanes = (1 + (ring.operand is None)) * (1 + ring.both_ways)
        moved = [
            size / steps if any(ring.factor in f for f in dims) else size * lanes
            for size, dims in zip(sizes, (*e.operator_rule.operands, *e.operator_rule.results), strict=True)
        ]
        is_summed = not any(ring.factor in f for f in e.operator_rule.results[0])
        if is_summed:  # sums of low precision are accumulated in float32
            moved[-1] *= max(1.0, itemsize(jnp.float32) / itemsize(e.outputs[0].dtype))
        moved[-1] *= 2 if is_summed or ring.operand is None else 1
        flops = e.operator_rule.flops / parts(self.plan.splits[e], mesh)
        return kernel_roofline(machine, e, flops / steps, moved=sum(moved)).work + lanes * machine.launch


@dataclasses.dataclass(frozen=True, slots=True)
class _Links:
    """The links around a ring: seconds of a message and of every byte, and whether the other direction is free."""

    latency: float
    a_byte: float
    free: bool


@tabulated(256)
def _links(atoms: Atoms, order: tuple[int, ...], mesh: Mesh, machine: Machine) -> _Links:
    """The links around a ring, whose slowest one counts."""
    places = order or range(mesh.count(atoms))
    moves = [(places[(r + 1) % len(places)], places[r]) for r in range(len(places))]
    devices = np.asarray(mesh.order or range(mesh.size), np.intp)
    sources, targets = devices[np.asarray(pairs(moves, atoms, mesh), np.intp).reshape(-1, 2).T]
    return _Links(*permuting(sources, targets, machine), goes_one_way(sources, targets, machine))


@tabulated(256)
def _orders(atoms: Atoms, mesh: Mesh, machine: Machine) -> list[tuple[int, ...]]:
    """Orders of the parts around a ring: as they are numbered, and along a cycle of the grid on which they lie."""
    orders: list[tuple[int, ...]] = [()]
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
