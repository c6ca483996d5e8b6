"""Step times: the time of each step of a reshard on a machine."""

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
from gshard.device.network import gathered_at_least, permuting, seconds
from gshard.device.roofline import copy_seconds, roofline

# A collective may make two kernels of one. Of equal ways this takes the one with fewer.
_SPLITS = 0.1
# What is gathered or cut along a dimension that is not the first may have to be copied into place also where machines
# are not known for it. Of equal ways this takes the one that need not.
_COPIES = 0.1
# Operations for each float by which it becomes an integer in the same order, and a float again (``comm.steps``).
_ORDERED = 14


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """What steps take on a machine (``comm.steps.Times``).

    Attributes:
        machine: which.
        joined: whether each collective that the compiler may put into a message with others (``combiner``) takes what
            it makes that message longer, as if there were one.
    """

    machine: Machine
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
        """One step.

        Args:
            step: which, over atoms of ``mesh``.
            shape, itemsize: of the array, which is global.
            mesh: the devices.
            among: the mesh and the atoms that the network knows, where ``mesh`` is a coarser one.
        """
        if step.kind in LOCAL:
            # With a launch also of a few numbers, which ``cost`` leaves out: of eight training steps planned for h100
            # without it, two took 0.3 % longer and one 0.1 % less.
            moved = 2 * math.prod(step.after.local_shape(mesh, shape)) * itemsize
            return roofline(self.machine, "f32", moved=moved).work + self.machine.launch
        taken = self._sent(step, shape, itemsize, mesh, among or (mesh, step.atoms)) + _SPLITS * self.machine.launch
        copied = self._copied(step, shape, itemsize, mesh)
        if step.kind == ALL_REDUCE and copied:
            taken += _ORDERED * sum(copied) / itemsize / self.machine.vector_flops
        return taken + sum(copy_seconds(self.machine, array) for array in copied)

    def price_class(self, step: Step, mesh: Mesh, places: Mapping[str, tuple[int, ...]]) -> Hashable:
        """Steps of one class take the same where their parts have the same sizes, before and after.

        Args:
            step: over atoms of ``mesh``.
            mesh: the devices.
            places: for each atom how many it is of each kind that the network tells apart.
        """
        if step.kind in LOCAL:
            return ()
        if is_exchange(step, mesh):
            return step.kind, rounds(step, mesh), _exchanging(step.before, step.after, mesh, self.machine)
        if step.kind == PERMUTE:
            return step.kind, _permuting(step.before, step.after, mesh, self.machine)
        return step.kind, tuple(map(sum, zip(*(places[a] for a in step.atoms), strict=True))), step.monoid

    def _copied(self, step: Step, shape: tuple[int, ...], itemsize: int, mesh: Mesh) -> list[float]:
        """Bytes of the arrays that are copied.

        Into another layout (``layout_copies``), as if no elementwise kernel beside it spared that; the tiles of an
        exchange, cut and put in their places; or, for a maximum of floats, integers in the same order.
        """
        if step.kind == ALL_REDUCE and step.monoid in ("max", "min"):
            return [math.prod(step.before.local_shape(mesh, shape)) * itemsize]
        if is_exchange(step, mesh):
            whole, tiles = math.prod(step.after.local_shape(mesh, shape)) * itemsize, rounds(step, mesh)
            return [whole / 2, *2 * tiles * [whole / tiles]]  # the empty array before them is only written
        return [*self._laid_out(step, shape, itemsize, mesh), *self._cut_to_size(step, shape, itemsize, mesh)]

    def _cut_to_size(self, step: Step, shape: tuple[int, ...], itemsize: int, mesh: Mesh) -> list[float]:
        """Bytes of what is padded before an exchange makes uneven parts, and of what is cut after uneven parts meet.

        What a reduce-scatter pads is mostly written by the product before it.
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
        """What it takes at least to come from ``held`` bytes on each device to ``wanted``: gathered over all links."""
        return gathered_at_least(held, wanted, self.machine)

    def _sent(self, step: Step, shape: tuple[int, ...], itemsize: int, mesh: Mesh, among: tuple[Mesh, Atoms]) -> float:
        if is_exchange(step, mesh):
            latency, a_byte = _exchanging(step.before, step.after, mesh, self.machine)
            messages = rounds(step, mesh)
            return messages * latency + a_byte * bytes_sent(step, shape, itemsize, mesh) / messages
        if step.kind == PERMUTE:
            latency, a_byte = _permuting(step.before, step.after, mesh, self.machine)
            return latency + a_byte * bytes_sent(step, shape, itemsize, mesh)
        known, atoms = among
        kept = step.after if is_of_tiles(step) else step.before  # what is free is cut before anything is sent
        local = math.prod(kept.local_shape(mesh, shape)) * itemsize
        # A message of a byte has no length, only a latency.
        others = 1 if self.joined and step.kind in self.machine.compiler.combines else 0
        before = seconds(step.kind, others, known, self.machine, atoms)
        return seconds(step.kind, others + local, known, self.machine, atoms) - before


@tabulated(4096)
def _exchanging(before: Sharding, after: Sharding, mesh: Mesh, machine: Machine) -> tuple[float, float]:
    """What a message of an exchange takes, and what a byte of each tile takes more, over all messages."""
    return permuting(*exchange(before.dims, after.dims, mesh).ends(mesh), machine)


@tabulated(4096)
def _permuting(before: Sharding, after: Sharding, mesh: Mesh, machine: Machine) -> tuple[float, float]:
    """What a permutation takes, and what a byte of it takes more: whatever the array."""
    return permuting(np.arange(mesh.size), targets(before, after, mesh), machine)
