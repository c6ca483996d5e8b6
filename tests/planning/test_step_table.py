"""Moves by a table of steps cost what steps cost that are found for the very shape, one by one."""

import heapq
import itertools

import numpy as np
import pytest

from gshard.comm.reshard import single_steps
from gshard.comm.steps import PERMUTE, TO_PARTIAL, Step
from gshard.core.mesh import Mesh
from gshard.core.sharding import Sharding
from gshard.device.machine import Machine
from gshard.planning.objective import bytes_on
from gshard.planning.reshard_costs import axes_of, swapped
from gshard.planning.strategies import shardings
from gshard.search.seconds import Seconds, seconds_on

SHAPES = [((8, 16), 4), ((6, 5), 2), ((1, 3), 4), ((0, 8), 4), ((7,), 8), ((), 4), ((4, 1, 6), 1), ((12, 9, 2), 4)]
MORE = {"a": 2, "b": 2, "c": 2}, {"a": 4, "b": 2, "c": 2}
MESHES = [{"a": 2, "b": 2}, {"a": 2, "b": 3}, *(pytest.param(axes, marks=pytest.mark.slow) for axes in MORE)]


def objective(mesh, machine):
    axes = axes_of(mesh)
    return seconds_on(Machine.of(machine, mesh.size))(mesh, axes) if machine else bytes_on(mesh, axes)


def one_by_one(moves, source, monoids, shape, itemsize):
    """The shortest ways from a sharding (Dijkstra), by steps that are found and priced for this shape."""
    mesh, names = moves._coarse, moves._coarse.atoms
    found = {}
    queue, order = [(0.0, 0, source)], itertools.count(1)
    while queue:
        cost, _, here = heapq.heappop(queue)
        if here in found:
            continue
        found[here] = cost
        steps = [step for step, _ in single_steps(here, frozenset(), moves._steps.blocks, shape, itemsize, mesh)]
        for name, monoid in itertools.product((name for name in names if name not in here.atoms), monoids):
            after = here.with_unreduced({**dict(here.unreduced), name: monoid})
            steps.append(Step(TO_PARTIAL, (name,), here, after, monoid=monoid))
        steps += (Step(PERMUTE, names, here, after) for after in swapped(here, shape, mesh))
        for step in steps:
            heapq.heappush(queue, (cost + moves.step(step, shape, itemsize, mesh), next(order), step.after))
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
            here = moves._in_axes(states[i])
            expected = one_by_one(moves, here, (monoid,) if monoid else (), shape, itemsize)
            for j, target in enumerate(states):
                there = moves._in_axes(target)
                if there in expected:
                    assert table[i, j] == pytest.approx(expected[there], rel=1e-12, abs=1e-18), (states[i], target)


@pytest.mark.parametrize("machine", ["", "h100:1x8", "h100:2x4", "v5e"])
@pytest.mark.parametrize("axes", [{"a": 2, "b": 2, "c": 2}, {"a": 4, "b": 2}, {"a": 8}], ids=str)
def test_steps_of_one_group_have_one_price_class(axes, machine):
    mesh = Mesh.abstract(**axes)
    cuts = [Sharding(((mesh.atoms_of["a"][0],),))] if "a" in axes else []
    named = Machine.of(machine) if ":" in machine else Machine.of(machine, mesh.size) if machine else None
    moves = Seconds(mesh, named, axes_of(mesh, cuts)) if named else bytes_on(mesh, axes_of(mesh, cuts))
    steps, classes = moves._steps, dict[object, set[object]]()
    for rank in (2, 3):
        table = steps.table(rank, ("add",))
        table.add([Sharding.replicated(rank)])
        for step in table._steps:
            classes.setdefault(steps.group(step), set()).add(moves.price_class(step))
    assert len(classes) > 5
    assert all(len(found) == 1 for found in classes.values())
