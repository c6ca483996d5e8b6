"""Seconds: what moves and work take on a machine, by the figures by which ``analysis.cost`` prices a program."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Iterator

from gshard.analysis.machine import Machine
from gshard.analysis.network import permutation_seconds, seconds
from gshard.comm.reshard import plan_reshard, single_steps
from gshard.comm.steps import ALL_GATHER, ONE_OWNER, PERMUTE, SILENT, Step, bytes_sent, permutation
from gshard.core.mesh import Atoms, Mesh
from gshard.core.program import Equation, short_dtype
from gshard.core.sharding import Sharding
from gshard.core.split import Split
from gshard.search.emitted import Emitted, emitted_alone, has_own_way

# A collective may make two kernels of one. Of equal ways this takes the one with fewer.
_SPLITS = 0.1
# What is gathered or cut along a dimension that is not the first may have to be copied into place, which compilers
# spare now and then. Of equal ways this takes the one that need not.
_COPIES = 0.1


class Seconds:
    """Seconds on one machine; what was asked before is known.

    Args:
        mesh: the devices.
        machine: as many.
    """

    def __init__(self, mesh: Mesh, machine: Machine):
        self.mesh, self.machine = mesh, machine
        # Whole axes move, and so they need not be factored: from one sharding there are a few steps to others.
        self._coarse = dataclasses.replace(mesh, factored=False, devices=None)
        self._axes: dict[Sharding, Sharding] = {}
        self._steps: dict[tuple[Sharding, tuple[int, ...], int], list[tuple[Sharding, float]]] = {}
        self._reached: dict[tuple[Sharding, tuple[int, ...], int], dict[Sharding, float]] = {}
        self._others: dict[tuple[Sharding, Sharding, tuple[int, ...], int], float] = {}
        self._permutations: dict[tuple[Sharding, Sharding], tuple[float, float]] = {}
        self._own_ways: dict[object, Emitted] = {}

    def move(self, source: Sharding, target: Sharding, shape: tuple[int, ...], itemsize: int) -> float:
        """Of bringing an array of this global shape from one sharding to another."""
        if source == target:
            return 0.0
        here, there = self._in_axes(source), self._in_axes(target)
        if here is not None and there is not None:
            known = self._from(here, shape, itemsize).get(there)
            if known is not None:
                return known
        key = source, target, shape, itemsize
        if key not in self._others:
            steps = plan_reshard(source, target, shape, itemsize, self.mesh)
            self._others[key] = sum(self._step(step, shape, itemsize, self.mesh) for step in steps)
        return self._others[key]

    def _from(self, source: Sharding, shape: tuple[int, ...], itemsize: int) -> dict[Sharding, float]:
        """Of bringing it from one sharding to any other that moves of whole axes lead to (Dijkstra)."""
        key = source, shape, itemsize
        if key in self._reached:
            return self._reached[key]
        reached: dict[Sharding, float] = {}
        order = itertools.count()
        queue: list[tuple[float, int, Sharding]] = [(0.0, next(order), source)]
        while queue:
            spent, _, here = heapq.heappop(queue)
            if here in reached:
                continue
            reached[here] = spent
            for after, more in self._steps_from(here, shape, itemsize):
                if after not in reached:
                    heapq.heappush(queue, (spent + more, next(order), after))
        self._reached[key] = reached
        return reached

    def _steps_from(self, here: Sharding, shape: tuple[int, ...], itemsize: int) -> list[tuple[Sharding, float]]:
        key = here, shape, itemsize
        if key not in self._steps:
            mesh, names = self._coarse, self._coarse.atoms
            # Axes that move in one message: a sum over two of them is cut over both at once.
            blocks = tuple(b for k in range(1, len(names) + 1) for b in itertools.combinations(names, k))
            steps = [step for step, _ in single_steps(here, frozenset(), blocks, shape, itemsize, mesh)]
            free = [name for name in mesh.atoms if name not in here.atoms]
            for name in free:
                after = here.with_unreduced({**dict(here.unreduced), name: "add"})
                steps.append(Step(ONE_OWNER, (name,), here, after))
            for swapped in self._swapped(here):
                steps.append(Step(PERMUTE, mesh.atoms, here, swapped))
            self._steps[key] = [(step.after, self._step(step, shape, itemsize, mesh)) for step in steps]
        return self._steps[key]

    def _swapped(self, here: Sharding) -> Iterator[Sharding]:
        """The same cuts over other axes of the same size."""
        sizes = self._coarse.atom_sizes
        for a, b in itertools.combinations(sizes, 2):
            if sizes[a] == sizes[b] and {a, b} & {x for dim in here.dims for x in dim}:
                if {a, b} & set(dict(here.unreduced)):
                    continue
                other = {a: b, b: a}
                yield Sharding(tuple(tuple(other.get(x, x) for x in dim) for dim in here.dims), here.unreduced)

    def _in_axes(self, sharding: Sharding) -> Sharding | None:
        """A sharding over the axes as wholes; None if it takes a part of one."""
        known = self._axes.get(sharding)
        if known is None:
            dims = tuple(self._names(atoms) for atoms in sharding.dims)
            monoids = dict(sharding.unreduced)
            waiting = self._names(tuple(a for a in self.mesh.atoms if a in monoids))
            if any(own is None for own in (*dims, waiting)):
                return None
            unreduced = {name: monoids[self.mesh.atoms_of[name][0]] for name in waiting or ()}
            known = self._axes[sharding] = Sharding(tuple(own or () for own in dims)).with_unreduced(unreduced)
        return known

    def _names(self, atoms: Atoms) -> Atoms | None:
        names = [name for name in self.mesh.format_atoms(atoms).split(",") if name]
        return tuple(names) if all(name in self.mesh.atoms_of for name in names) else None

    def _step(self, step: Step, shape: tuple[int, ...], itemsize: int, mesh: Mesh) -> float:
        if step.kind in SILENT:
            return self.machine.launch
        taken = self._sent(step, shape, itemsize, mesh) + _SPLITS * self.machine.launch
        if step.dim > 0 and step.to < 0:
            whole, parts = (step.after, step.before) if step.kind == ALL_GATHER else (step.before, step.after)
            if any(n > 1 for n in parts.local_shape(mesh, shape)[: step.dim]):
                size = math.prod(whole.local_shape(mesh, shape)) * itemsize
                taken += _COPIES * 2 * size / self.machine.memory_bandwidth
        return taken

    def _sent(self, step: Step, shape: tuple[int, ...], itemsize: int, mesh: Mesh) -> float:
        local = math.prod(step.before.local_shape(mesh, shape)) * itemsize
        if step.kind == PERMUTE:
            latency, a_byte = self._permuting(step.before, step.after, mesh)
            return latency + a_byte * bytes_sent(step, shape, itemsize, mesh)
        atoms = tuple(a for name in step.atoms for a in self.mesh.atoms_of.get(name, (name,)))
        return seconds(step.kind, local, self.mesh, self.machine, atoms)

    def _permuting(self, before: Sharding, after: Sharding, mesh: Mesh) -> tuple[float, float]:
        """What a permutation takes, and what a byte of it takes more: whatever the array."""
        key = before, after
        if key not in self._permutations:
            pairs = permutation(before, after, mesh)
            none, many = (permutation_seconds(sent, pairs, self.machine) for sent in (0, 1 << 30))
            self._permutations[key] = none, (many - none) / (1 << 30)
        return self._permutations[key]

    def own_way(self, e: Equation, split: Split, products: float, others: float, moved: float) -> float:
        """What an equation takes more than its device's share, where it runs on shards in a way of its own.

        Args:
            e, split: which.
            products, others, moved: as for ``work``, of this equation alone.
        """
        found = self.own(e, split)
        return 0.0 if found is None else found.seconds - self.work(e, products, others, moved)

    def own(self, e: Equation, split: Split) -> Emitted | None:
        """What is emitted for an equation that runs on shards in a way of its own; None for others."""
        rule = e.rule
        assert rule is not None
        if not has_own_way(rule, split):
            return None
        key = rule, tuple(sorted(split.items())), tuple((v.shape, short_dtype(v.dtype)) for v in e.inputs)
        if key not in self._own_ways:
            self._own_ways[key] = emitted_alone(e, split, self.mesh, self.machine)
        return self._own_ways[key]

    def work(self, e: Equation, products: float, others: float, moved: float) -> float:
        """Of one kernel on one device.

        Args:
            e: its equation.
            products: operations of products, of the device's share.
            others: all other operations.
            moved: bytes that it reads and writes.
        """
        dtype = short_dtype(e.inputs[0].dtype) if e.inputs else "f32"
        computing = products / self.machine.rate(dtype) + others / self.machine.vector_flops
        return max(computing, moved / self.machine.memory_bandwidth) + self.machine.starting(moved)
