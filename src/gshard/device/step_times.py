"""Prices each step of a reshard in seconds on a machine."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Mapping

import numpy as np

from gshard.comm.exchange import exchange
from gshard.comm.runs import is_turned, laid_out
from gshard.comm.steps import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    LOCAL,
    PERMUTE,
    Step,
    bytes_sent,
    is_exchange,
    is_of_tiles,
    rounds,
    targets,
)
from gshard.comm.tiles import turns
from gshard.core.mesh import Atoms, Mesh
from gshard.core.planning_tables import tabulated
from gshard.core.sharding import Sharding
from gshard.device.machine import Machine
from gshard.device.network import least_gather_seconds, permuting, seconds
from gshard.device.roofline import copy_seconds, roofline

# The share of a launch for a collective, which may split a kernel in two: it favours fewer collectives.
_SPLITS = 0.1
# The share of a copy for a gather or cut along a dimension that is not the first, on machines that are not known to
# copy: it favours steps without a copy.
_COPIES = 0.1
# Operations for each float to convert it to an integer of the same order and back (``comm.steps``).
_ORDERED = 14


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """The times of steps on a machine (``comm.steps.Times``)."""

    machine: Machine  # the machine
    # whether a collective that the compiler may put into a message with others (``combiner``) costs only the time that
    # it adds to such a message
    joined: bool = False

    def seconds(
        self,
        step: Step,
        shape: tuple[int, ...],
        itemsize: int,
        mesh: Mesh,
        *,
        among: tuple[Mesh, Atoms] | None = None,
    ) -> float:
        """Seconds of one step."""
        if step.kind in LOCAL:
            # Includes a launch even for a few numbers, unlike ``cost``: of eight training steps planned for h100
            # without it, two took 0.3 % longer and one 0.1 % less.
            moved = 2 * math.prod(step.after.local_shape(mesh, shape)) * itemsize
            return roofline(self.machine, "f32", moved=moved).work + self.machine.launch
        total = self._sent(step, shape, itemsize, mesh, among or (mesh, step.atoms)) + _SPLITS * self.machine.launch
        copied_bytes = self._copied(step, shape, itemsize, mesh)
        if step.kind == ALL_REDUCE and copied_bytes:
            total += _ORDERED * sum(copied_bytes) / itemsize / self.machine.vector_flops
        return total + sum(copy_seconds(self.machine, array) for array in copied_bytes)

    def price_class(self, step: Step, mesh: Mesh, places: Mapping[str, tuple[int, ...]]) -> Hashable:
        """A key: steps with equal keys take the same time if their parts have the same sizes before and after."""
        if step.kind in LOCAL:
            return ()
        if is_exchange(step, mesh):
            return step.kind, rounds(step, mesh), _exchanging(step.before, step.after, mesh, self.machine)
        if step.kind == PERMUTE:
            return step.kind, _permuting(step.before, step.after, mesh, self.machine)
        return step.kind, tuple(map(sum, zip(*(places[a] for a in step.atoms), strict=True))), step.monoid

    def _copied(self, step: Step, shape: tuple[int, ...], itemsize: int, mesh: Mesh) -> list[float]:
        """Bytes of the arrays that are copied.

        These are: copies into another layout (``layout_copies``), even if an elementwise kernel beside the step could
        avoid them; the tiles of an exchange, cut and put in their places; and, for a maximum of floats, integers of the
        same order.
        """
        if step.kind == ALL_REDUCE and step.monoid in ("max", "min"):
            return [math.prod(step.before.local_shape(mesh, shape)) * itemsize]
        if is_exchange(step, mesh):
            whole, tiles = math.prod(step.after.local_shape(mesh, shape)) * itemsize, rounds(step, mesh)
            return [whole / 2, *2 * tiles * [whole / tiles]]  # the empty array before them is only written
        return [*self._laid_out(step, shape, itemsize, mesh), *self._cut_to_size(step, shape, itemsize, mesh)]

    def _cut_to_size(self, step: Step, shape: tuple[int, ...], itemsize: int, mesh: Mesh) -> list[float]:
        """Bytes of arrays that are padded before an exchange makes uneven parts, or cut after uneven parts are joined.

        The product before a reduce-scatter mostly writes its padding.
        """
        if step.kind not in (ALL_GATHER, ALL_TO_ALL):
            return []
        before, after = (
            {d for d, atoms in enumerate(s.dims) if atoms and shape[d] % mesh.count(atoms)}
            for s in (step.before, step.after)
        )
        padded, cut = (
            math.prod(s.local_shape(mesh, shape)) * itemsize * bool(more)
            for s, more in ((step.before, after - before), (step.after, before - after))
        )
        return [float(n) for n in (padded, cut) if n]

    def _laid_out(self, step: Step, shape: tuple[int, ...], itemsize: int, mesh: Mesh) -> list[float]:
        if step.kind != ALL_TO_ALL:
            compiler, arrays = self.machine.compiler, list(laid_out(step, shape, mesh))
            share = 1.0 if compiler.copies_for_collectives else _COPIES
            copied = [min(arrays)] if arrays and compiler.products_take_layouts else arrays
            return [share * elements * itemsize for elements in copied]
        before, after = (s.local_shape(mesh, shape) for s in (step.before, step.after))
        if is_of_tiles(step):
            turned = turns(before, step.before.dims, step.after.dims, mesh)
            return [math.prod(after) * itemsize for _ in range(sum(turned))]
        part = tuple(map(min, before, after))
        return [math.prod(after) * itemsize] if is_turned(part, step.to, step.dim) else []

    def least(self, held: int, wanted: int) -> float:
        """A lower bound in seconds of one or more steps from ``held`` bytes on each device to ``wanted`` bytes.

        A step has a launch or a message. To enlarge the bytes, they are gathered over all links.
        """
        message = _SPLITS * self.machine.launch
        if wanted and not self.joined:
            message += min((d.latency for d in self.machine.network if d.size > 1), default=0.0)
        if wanted <= held:
            return min(message, self.machine.launch)
        return message + least_gather_seconds(held, wanted, self.machine)

    def _sent(self, step: Step, shape: tuple[int, ...], itemsize: int, mesh: Mesh, among: tuple[Mesh, Atoms]) -> float:
        if is_exchange(step, mesh):
            latency, a_byte = _exchanging(step.before, step.after, mesh, self.machine)
            messages = rounds(step, mesh)
            return messages * latency + a_byte * bytes_sent(step, shape, itemsize, mesh) / messages
        if step.kind == PERMUTE:
            latency, a_byte = _permuting(step.before, step.after, mesh, self.machine)
            return latency + a_byte * bytes_sent(step, shape, itemsize, mesh)
        network_mesh, atoms = among
        sent_sharding = step.after if is_of_tiles(step) else step.before  # local cuts come before anything is sent
        local = math.prod(sent_sharding.local_shape(mesh, shape)) * itemsize
        # A message of a byte has no length, only a latency.
        bytes_before = 1 if self.joined and step.kind in self.machine.compiler.combines else 0
        seconds_before = seconds(step.kind, bytes_before, network_mesh, self.machine, atoms)
        return seconds(step.kind, bytes_before + local, network_mesh, self.machine, atoms) - seconds_before


@tabulated(4096)
def _exchanging(before: Sharding, after: Sharding, mesh: Mesh, machine: Machine) -> tuple[float, float]:
    """The latency of a message of an exchange, and the seconds of a byte of each tile, over all messages."""
    return permuting(*exchange(before.dims, after.dims, mesh).ends(mesh), machine)


@tabulated(4096)
def _permuting(before: Sharding, after: Sharding, mesh: Mesh, machine: Machine) -> tuple[float, float]:
    """The latency of a permutation, and the seconds of a byte, for any array."""
    return permuting(np.arange(mesh.size), targets(before, after, mesh), machine)
