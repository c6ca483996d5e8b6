"""Prices collectives, and the steps of a reshard, on the network of a machine, by the links that they use."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from gshard.comm.route import numbered
from gshard.comm.steps import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    LOCAL,
    PERMUTE,
    Step,
    bytes_sent,
    is_of_tiles,
    is_turned,
    laid_out,
    targets,
)
from gshard.core.mesh import Atoms, Mesh
from gshard.core.planning_tables import tabulated
from gshard.core.sharding import Sharding
from gshard.device.machine import DIRECT, LINE, RING, SWITCH, Dimension, Machine, MachineError
from gshard.device.roofline import copy_seconds, roofline


@dataclasses.dataclass(frozen=True, slots=True)
class Extent:
    """The places of a group along one dimension of the network."""

    of: Dimension  # the dimension
    members: int  # the number of different places of the group
    step: int  # the distance from one place to the next
    kind: str  # the kind of the dimension; ``ring`` only if the group goes all the way around


def extents(mesh: Mesh, machine: Machine, atoms: Atoms) -> tuple[tuple[Extent, ...], ...]:
    """The dimensions of the network over which groups of these atoms spread, major to minor, for each kind of group.

    All groups are of one kind unless the mesh has its own order of devices.
    """
    if machine.size != mesh.size:
        raise MachineError(
            f"{machine.name} has {machine.size} devices, and the mesh has {mesh.size}.", got=f"mesh: {mesh}"
        )
    return _extents(mesh, machine.network, atoms)


@tabulated(1024)
def _extents(mesh: Mesh, network: tuple[Dimension, ...], atoms: Atoms) -> tuple[tuple[Extent, ...], ...]:
    if not mesh.order:
        return (_spread(members(mesh, atoms), network),)
    return tuple(dict.fromkeys(_spread(group, network) for group in groups(mesh, atoms)))


def _spread(group: Sequence[int], network: tuple[Dimension, ...]) -> tuple[Extent, ...]:
    found = []
    stride = math.prod(dimension.size for dimension in network)
    for dimension in network:
        stride //= dimension.size
        places = sorted({device // stride % dimension.size for device in group})
        if len(places) < 2:
            continue
        step = min(b - a for a, b in itertools.pairwise(places))
        closes = step * len(places) == dimension.size and dimension.size > 2
        kind = LINE if dimension.kind == RING and not closes else dimension.kind
        found.append(Extent(dimension, len(places), step, kind))
    return tuple(found)


def members(mesh: Mesh, atoms: Atoms, of: int = 0) -> tuple[int, ...]:
    """The positions of the mesh in the group of position ``of`` over these atoms, itself included."""
    numbers, offsets = numbered(mesh, atoms)
    return tuple(sorted((of - offsets[numbers[of]] + offsets).tolist()))


def atoms_among(mesh: Mesh, all_groups: Sequence[Sequence[int]]) -> Atoms | None:
    """The atoms over which groups of positions run; None if some group does not lie along atoms, or along others."""
    first = next((group for group in all_groups if 0 in group), ())
    stride, found = mesh.size, []
    for atom, size in mesh.atom_sizes.items():
        stride //= size
        found += [atom] if stride in first else []
    atoms = tuple(found)
    return atoms if all(members(mesh, atoms, group[0]) == tuple(group) for group in all_groups) else None


@tabulated(64)
def interchangeable(mesh: Mesh, machine: Machine) -> tuple[Atoms, ...]:
    """Classes of atoms that can be exchanged in a program without changing any time.

    They have one size, and lie along one dimension of the network in which every device is one hop from any other.

    >>> from gshard.core.mesh import Mesh
    >>> interchangeable(Mesh.abstract(a=2, b=4, c=2), Machine.of("h100:2x8"))
    (('a',), ('b.0', 'b.1', 'c'))
    >>> interchangeable(Mesh.abstract(a=2, b=2), Machine.of("v3:2x1"))
    (('a',), ('b',))
    """
    classes: dict[tuple[object, int], Atoms] = {}
    stride = mesh.size
    for atom, size in mesh.atom_sizes.items():
        stride //= size
        key_of_dimension: object = atom
        step = machine.size
        for k, dimension in enumerate(machine.network if not mesh.order and machine.size == mesh.size else ()):
            outer_step, step = step, step // dimension.size
            if dimension.is_one_hop and step <= stride and stride * size <= outer_step:
                key_of_dimension = k
        classes[key_of_dimension, size] = (*classes.get((key_of_dimension, size), ()), atom)
    return tuple(classes.values())


def groups(mesh: Mesh, atoms: Atoms) -> tuple[tuple[int, ...], ...]:
    """All groups of devices over these atoms, in order of their first position."""
    numbers, offsets = numbered(mesh, atoms)
    all_groups = np.flatnonzero(numbers == 0)[:, None] + np.sort(offsets)
    positions = np.asarray(mesh.order or range(mesh.size))
    return tuple(dict.fromkeys(map(tuple, positions[all_groups].tolist())))


def seconds(kind: str, operand: int, mesh: Mesh, machine: Machine, atoms: Atoms) -> float:
    """Seconds of one collective.

    >>> from gshard.core.mesh import Mesh
    >>> times = []
    >>> for n in (8, 32):
    ...     mesh, torus = Mesh.abstract(d=2 * n * n), Machine.of(f"v3:{n}x{n}")
    ...     times += [seconds("all_to_all", 8 << 20, mesh, torus, mesh.atoms) * 1e3]
    >>> [f"{t:.2f} ms" for t in times]
    ['0.60 ms', '2.37 ms']
    """
    spread = extents(mesh, machine, atoms)
    return max(_seconds(kind, operand, where, machine) for where in spread) if operand else 0.0


def latency(kind: str, mesh: Mesh, machine: Machine, atoms: Atoms) -> float:
    """The latency of a collective: the seconds until its first byte arrives everywhere."""
    return max(_rounds(kind) * _hops(where) for where in extents(mesh, machine, atoms))


def seconds_among(kind: str, operand: int, group: Sequence[int], machine: Machine) -> float:
    """Seconds of one collective among some devices of a machine, while all other groups like it run theirs."""
    return _seconds(kind, operand, _spread(group, machine.network), machine) if operand else 0.0


def _seconds(kind: str, operand: int, where: tuple[Extent, ...], machine: Machine) -> float:
    if not where:
        return 0.0
    hops = _hops(where)
    if kind == "all_to_all":
        return hops + max(_all_to_all(operand, e, machine.compiler.exchanges_in_turn) for e in where)
    size = math.prod(e.members for e in where)
    whole = operand * size if kind == "all_gather" else operand
    rounds = _rounds(kind)
    return rounds * hops + _in_rings(whole, rounds, where)


def _rounds(kind: str) -> int:
    """How often data goes to all devices: an all-reduce is a reduce-scatter and an all-gather."""
    return 2 if kind == "all_reduce" else 1


def _hops(where: tuple[Extent, ...]) -> float:
    """Seconds until a message without bytes arrives everywhere."""
    return sum(
        e.of.latency * (1 if e.of.is_one_hop else e.members * e.step / (2 if e.kind == RING else 1)) for e in where
    )


def _all_to_all(operand: int, e: Extent, in_turn: bool) -> float:
    """Seconds of the busiest link of a dimension.

    Of n n messages an eighth cross it on a ring and a quarter on a line. In turn, all devices send k places ahead at
    the same time, for k = 1, 2, ... On a ring these messages go around in one direction, and min(k, n - k) of them
    cross a link: a quarter of all messages. On a line as many cross it, in each direction.
    """
    if e.of.is_one_hop:
        return operand * (e.members - 1) / e.members / e.of.sent_among(e.members)
    share = e.members / (8 if e.kind == RING and not in_turn else 4)
    return operand * share * e.step * e.of.shared_by / e.of.bandwidth


def _in_rings(whole: int, rounds: int, where: tuple[Extent, ...]) -> float:
    """Seconds of reduce-scatters and all-gathers of ``whole`` bytes, dimension by dimension from the nearest.

    Data that was scattered over a switch is that much smaller beyond it. Direct links are used all at once. The
    dimensions of a torus are used together, each with a share of the data.
    """
    total, bytes_left = 0.0, float(whole)
    torus = [e for e in where if not e.of.is_one_hop]
    for e in reversed([e for e in where if e.of.is_one_hop]):
        total += rounds * bytes_left * (e.members - 1) / e.members / e.of.sent_among(e.members)
        bytes_left /= e.members
    if torus:
        size = math.prod(e.members for e in torus)
        # Both directions of a ring carry half each. On a line, the last device has one link; only an all-reduce, which
        # sends sums both ways at once, loses no bandwidth.
        injected = sum(
            e.of.bandwidth * (1 if e.kind == LINE and rounds == 1 else 2) / (e.step * e.of.shared_by) for e in torus
        )
        total += rounds * bytes_left * (size - 1) / size / injected
    return total


def permutation_seconds(sent: int, pairs: Sequence[tuple[int, int]], machine: Machine) -> float:
    """Seconds until each source has sent ``sent`` bytes to its target: O(1) between neighbours."""
    sources, targets = np.asarray(pairs, np.intp).reshape(-1, 2).T
    latency, a_byte = permuting(sources, targets, machine)
    return latency + sent * a_byte


def permuting(sources: NDArray[np.intp], targets: NDArray[np.intp], machine: Machine) -> tuple[float, float]:
    """The latency of messages from each source to its target, and the seconds of each byte.

    A byte takes the time of the busiest link.
    """
    a_byte, latencies = 0.0, np.zeros(len(sources))
    stride = machine.size
    for d, loads in zip(machine.network, link_loads(sources, targets, machine), strict=True):
        stride //= d.size
        distance = np.abs(sources // stride % d.size - targets // stride % d.size)
        hops = distance > 0 if d.is_one_hop else np.minimum(distance, d.size - distance) if d.kind == RING else distance
        a_byte = max(a_byte, float(loads.max(initial=0)) / d.bandwidth)
        latencies += d.latency * hops
    return float(latencies.max(initial=0.0)), a_byte


def link_loads(sources: NDArray[np.intp], targets: NDArray[np.intp], machine: Machine) -> list[NDArray[np.intp]]:
    """The number of messages over each link: for each dimension of the network, int [direction, link].

    Each message goes along one dimension after the other, the last one first, and the shorter way around a ring. Along
    a switch each device has its own link; along a direct dimension, each pair of devices has one.
    """
    found = []
    stride = machine.size
    for d in machine.network:
        stride //= d.size
        at, to = sources // stride % d.size, targets // stride % d.size
        beside = machine.network[-1].size if d.shared_by > 1 else 1  # devices whose messages go over the same link
        lines = machine.size // d.size // beside
        line = (sources // (stride * d.size) * stride + targets % stride) // beside
        if d.kind == SWITCH:
            moving = at != to
            out, into = (np.bincount(line[moving] * d.size + end[moving]) for end in (at, to))
            size = max(len(out), len(into))
            found.append(np.array([np.pad(x, (0, size - len(x))) for x in (out, into)]))
            continue
        if d.kind == DIRECT:
            link = (line * d.size + np.minimum(at, to)) * d.size + np.maximum(at, to)
            found.append(np.array([np.bincount(link[way], minlength=lines * d.size**2) for way in (at < to, at > to)]))
            continue
        ahead = (to - at) % d.size if d.kind == RING else to - at
        forwards = np.where(2 * ahead <= d.size, ahead, 0) if d.kind == RING else np.maximum(ahead, 0)
        back = np.where(2 * ahead > d.size, d.size - ahead, 0) if d.kind == RING else np.maximum(-ahead, 0)
        both = []
        for first, hops in ((at, forwards), ((at - back) % d.size, back)):
            moving, room = hops > 0, 2 * d.size + 1
            start = (line * room + first)[moving]
            starts, ends = (np.bincount(x, minlength=lines * room) for x in (start, start + hops[moving]))
            passed = (starts - ends).reshape(lines, room).cumsum(1)
            both.append((passed[:, : d.size] + passed[:, d.size : -1]).ravel())
        found.append(np.array(both))
    return found


def coordinates(device: int, machine: Machine) -> tuple[int, ...]:
    """The coordinates of a device along the dimensions of the network."""
    return tuple(int(i) for i in np.unravel_index(device, [d.size for d in machine.network]))


def goes_one_way(sources: NDArray[np.intp], targets: NDArray[np.intp], machine: Machine) -> bool:
    """Whether messages use no link in both directions, so that the reverse messages can run at the same time."""
    return all(
        d.kind != SWITCH and not (loads[0] * loads[1]).any()
        for d, loads in zip(machine.network, link_loads(sources, targets, machine), strict=True)
        if loads.any()
    )


# Prices each step of a reshard in seconds on a machine.

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

    def price_class(self, step: Step, mesh: Mesh, whole: Mesh, atoms: Atoms) -> Hashable:
        """A key: steps with equal keys take the same time if their parts have the same sizes before and after.

        The step is over axes ``mesh``, whose atoms are ``atoms`` of the mesh ``whole``.
        """
        if step.kind in LOCAL:
            return ()
        if step.kind == PERMUTE:
            return step.kind, _permuting(step.before, step.after, mesh, self.machine)
        classes = interchangeable(dataclasses.replace(whole, times=None), self.machine)
        return step.kind, tuple(sum(a in alike for a in atoms) for alike in classes), step.monoid, is_of_tiles(step)

    def _copied(self, step: Step, shape: tuple[int, ...], itemsize: int, mesh: Mesh) -> list[float]:
        """Bytes of the arrays that are copied.

        These are: copies into another layout (``layout_copies``), even if an elementwise kernel beside the step could
        avoid them; and, for a maximum of floats, integers of the same order.
        """
        if step.kind == ALL_REDUCE and step.monoid in ("max", "min"):
            return [math.prod(step.before.local_shape(mesh, shape)) * itemsize]
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
            return 2 * [float(math.prod(after) * itemsize)]  # transposed before and after the message
        part = tuple(map(min, before, after))
        return [math.prod(after) * itemsize] if is_turned(part, step.to, step.dim) else []

    def _sent(self, step: Step, shape: tuple[int, ...], itemsize: int, mesh: Mesh, among: tuple[Mesh, Atoms]) -> float:
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
def _permuting(before: Sharding, after: Sharding, mesh: Mesh, machine: Machine) -> tuple[float, float]:
    """The latency of a permutation, and the seconds of a byte, for any array."""
    return permuting(np.arange(mesh.size), targets(before, after, mesh), machine)
