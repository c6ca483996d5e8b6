"""Moves by a table of steps cost what steps cost that are found for the very shape, one by one."""

import heapq
import itertools

import numpy as np
import pytest

from gshard.comm.reshard import axes_of, step_cost
from gshard.comm.steps import ALL_SLICE, ALL_TO_ALL, REDUCE_SCATTER, Step, aligned, is_of_tiles, moved
from gshard.core.mesh import Mesh
from gshard.device.machine import Machine
from gshard.lowering.seconds import seconds_on
from gshard.planning.objective import bytes_on
from gshard.planning.strategies import shardings
from laws.test_reshard_any import can_move_in_tiles

SHAPES = [((8, 16), 4), ((6, 5), 2), ((1, 3), 4), ((0, 8), 4), ((7,), 8), ((), 4), ((4, 1, 6), 1), ((12, 9, 2), 4)]
MORE = {"a": 2, "b": 2, "c": 2}, {"a": 4, "b": 2, "c": 2}
MESHES = [{"a": 2, "b": 2}, {"a": 2, "b": 3}, *(pytest.param(axes, marks=pytest.mark.slow) for axes in MORE)]


def objective(mesh, machine):
    axes = axes_of(mesh)
    return seconds_on(Machine.of(machine, mesh.size))(mesh, axes) if machine else bytes_on(mesh, axes)


def is_possible(step, shape, mesh):
    """Whether the parts of an array of this very shape line up."""
    before, after = ([mesh.count(dim) for dim in s.dims] for s in (step.before, step.after))
    if is_of_tiles(step):
        return all(n % p == n % q == 0 for n, p, q in zip(shape, before, after, strict=True))
    g, d, e = mesh.count(step.atoms), step.dim, step.to
    if step.kind == ALL_TO_ALL:
        return aligned(shape[d], after[d], g) and aligned(shape[e], before[e], g)
    return step.kind not in (ALL_SLICE, REDUCE_SCATTER) or aligned(shape[d], before[d], g)


def one_by_one(moves, source, monoids, shape, itemsize):
    """The shortest ways from a sharding (Dijkstra), by steps that are priced for this shape, each alone."""
    mesh, atoms_of = moves._steps.coarse, moves._steps.atoms_of
    places = moves._steps.table(len(shape), monoids).places

    def priced(here, before):
        """The steps from a sharding. The first one, and one after a reduce-scatter, may be an all-to-all of tiles."""
        steps = moves._steps.of(here, monoids)
        if before is None or (before.kind == REDUCE_SCATTER and before.before == source):
            others = (s for s in places if can_move_in_tiles(here, s, shape, mesh))
            steps = [*steps, *(Step(ALL_TO_ALL, moved(here.dims, s.dims), here, s) for s in others)]
        for step in steps:
            if is_possible(step, shape, mesh):
                atoms = tuple(a for name in step.atoms for a in atoms_of[name])
                yield step, step_cost(step, shape, itemsize, mesh, moves.mesh, atoms)

    found = {}
    queue, order = [(0.0, 0, source, None)], itertools.count(1)
    scatters = [(price, next(order), s.after, s) for s, price in priced(source, None) if s.kind == REDUCE_SCATTER]
    for price, _, here, scatter in scatters:
        queue += [(price + more, next(order), step.after, step) for step, more in priced(here, scatter)]
    heapq.heapify(queue)
    while queue:
        cost, _, here, last = heapq.heappop(queue)
        if here in found:
            continue
        found[here] = cost
        for step, price in priced(here, last):
            heapq.heappush(queue, (cost + price, next(order), step.after, step))
    return found


@pytest.mark.parametrize("machine", ["", "h100", "v3"])
@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.one_in(2)
def test_moves_cost_what_their_steps_cost(axes, machine):
    mesh = Mesh.abstract(**axes)
    if machine == "v3" and mesh.size & (mesh.size - 1):
        pytest.skip("no torus of six")
    moves, generator = objective(mesh, machine), np.random.default_rng(0)
    for (shape, itemsize), monoid in itertools.product(SHAPES, ("", "add", "max")):
        states = shardings(shape, mesh, moves.axes, unreduced=monoid)
        table = moves.table(states, states, shape, itemsize)
        for i in generator.permutation(len(states))[:3].tolist():
            here = moves.in_axes(states[i])
            expected = one_by_one(moves, here, (monoid,) if monoid else (), shape, itemsize)
            for j, target in enumerate(states):
                there = moves.in_axes(target)
                if there in expected:
                    assert table[i, j] == pytest.approx(expected[there], rel=1e-12, abs=1e-18), (states[i], target)
