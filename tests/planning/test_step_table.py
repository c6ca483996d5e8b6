"""Moves by a table of steps cost what steps cost that are found for the very shape, one by one."""

from __future__ import annotations

import heapq
import itertools
from typing import Any

import numpy as np
import pytest

from gshard.comm.reshard import single_steps
from gshard.comm.steps import PERMUTE, TO_PARTIAL, Step
from gshard.core.mesh import Mesh
from gshard.core.planning_tables import tables
from gshard.core.sharding import Sharding
from gshard.device.machine import Machine
from gshard.planning import reshard_costs as axis_steps
from gshard.planning.objective import bytes_on
from gshard.planning.reshard_costs import Moves, StepTable, axes_of, swapped
from gshard.planning.strategies import shardings
from gshard.search.seconds import Seconds, on_machine, seconds_on

SHAPES = [((8, 16), 4), ((6, 5), 2), ((1, 3), 4), ((0, 8), 4), ((7,), 8), ((), 4), ((4, 1, 6), 1), ((12, 9, 2), 4)]
MESHES = [
    {"a": 2, "b": 2},
    {"a": 2, "b": 3},
    pytest.param({"a": 2, "b": 2, "c": 2}, marks=pytest.mark.slow),
    pytest.param({"a": 4, "b": 2, "c": 2}, marks=pytest.mark.slow),
]


def objective(mesh: Mesh, machine: str) -> Moves:
    axes = axes_of(mesh)
    return seconds_on(Machine.of(machine, mesh.size))(mesh, axes) if machine else bytes_on(mesh, axes)


def one_by_one(moves: Moves, source: Sharding, monoids: tuple[str, ...], shape: Any, itemsize: int) -> dict[Any, float]:
    """The shortest ways from a sharding (Dijkstra), by steps that are found and priced for this shape."""
    mesh, names = moves._coarse, moves._coarse.atoms
    found: dict[Sharding, float] = {}
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
def test_moves_cost_what_their_steps_cost(axes: dict[str, int], machine: str) -> None:
    mesh = Mesh.abstract(**axes)
    if machine == "v3" and mesh.size & (mesh.size - 1):
        pytest.skip("no torus of six")
    moves, generator = objective(mesh, machine), np.random.default_rng(0)
    for (shape, itemsize), monoid in itertools.product(SHAPES, ("", "add", "max")):
        states = shardings(shape, mesh, moves.axes, unreduced=monoid)
        table = moves.table(states, states, shape, itemsize)
        for i in generator.permutation(len(states))[:3].tolist():
            here = moves._in_axes(states[i])
            assert here is not None
            expected = one_by_one(moves, here, (monoid,) if monoid else (), shape, itemsize)
            for j, target in enumerate(states):
                there = moves._in_axes(target)
                if there in expected:
                    assert table[i, j] == pytest.approx(expected[there], rel=1e-12, abs=1e-18), (states[i], target)


def test_steps_are_found_once_for_all_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of one rank share them, whatever their shapes, their items and what may be summed."""
    found: list[Sharding] = []
    original = axis_steps.steps_from

    def counted(here: Sharding, *rest: Any) -> list[Step]:
        found.append(here)
        return original(here, *rest)

    monkeypatch.setattr(axis_steps, "steps_from", counted)
    mesh = Mesh.abstract(a=2, b=2, c=2)
    moves = bytes_on(mesh, axes_of(mesh))
    for n, itemsize, monoid in itertools.product((4, 8, 12, 24), (2, 4), ("", "add", "max")):
        states = shardings((n, 8, 16), mesh, moves.axes, unreduced=monoid)
        moves.table(states, states, (n, 8, 16), itemsize)
    assert found
    assert len(found) == len(set(found))


def test_steps_are_found_once_for_all_objectives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes, and seconds of messages alone and joined, share them; what they cost differs, as if each had its own."""
    found: list[Sharding] = []
    original = axis_steps.even_steps

    def counted(here: Sharding, *rest: Any) -> Any:
        found.append(here)
        return original(here, *rest)

    monkeypatch.setattr(axis_steps, "even_steps", counted)
    possible = StepTable._found
    shapes: list[tuple[int, ...]] = []

    def noted(self: StepTable, shape: tuple[int, ...]) -> Any:
        shapes.append(shape)
        return possible(self, shape)

    monkeypatch.setattr(StepTable, "_found", noted)
    mesh, machine = Mesh.abstract(a=2, b=2, c=2), Machine.of("h100", 8)
    axes, shape = axes_of(mesh), (8, 12, 16)
    states = shardings(shape, mesh, axes, unreduced="add")
    with tables():
        sent = bytes_on(on_machine(mesh, machine), axes)
        alone, joined = (
            seconds_on(machine, joined=both)(on_machine(mesh, machine, joined=both), axes) for both in (False, True)
        )
        costs = [objective.table(states, states, shape, 4) for objective in (sent, alone, joined)]
        assert len(found) == len(set(found))
        assert shapes == [shape]
    own = bytes_on(mesh, axes), Seconds(mesh, machine, axes), Seconds(mesh, machine, axes, joined=True)
    for cost, objective in zip(costs, own, strict=True):
        assert np.array_equal(cost, objective.table(states, states, shape, 4))
    assert (costs[2] < costs[1]).any()


def counting_steps(monkeypatch: pytest.MonkeyPatch, moves: Moves) -> list[Step]:
    """Notes each step that an objective prices."""
    priced, original = list[Step](), moves.step

    def counted(step: Step, *rest: Any) -> float:
        priced.append(step)
        return original(step, *rest)

    monkeypatch.setattr(moves, "step", counted)
    return priced


def test_steps_are_priced_once_for_an_array(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many times moves from other shardings are asked for, as long as they lead over the same ones."""
    mesh = Mesh.abstract(a=2, b=2, c=2)
    moves = bytes_on(mesh, axes_of(mesh))
    priced = counting_steps(monkeypatch, moves)
    states = shardings((8, 12, 16), mesh, moves.axes)
    one_by_one = np.vstack([moves.table((state,), states, (8, 12, 16), 4) for state in states])
    assert len(priced) == len({(step.kind, step.before, step.after) for step in priced})
    first = len(priced)
    assert np.array_equal(one_by_one, bytes_on(mesh, axes_of(mesh)).table(states, states, (8, 12, 16), 4))
    moves.table(states, states, (8, 12, 16), 4)
    assert len(priced) == first


@pytest.mark.parametrize("machine", ["", "h100"])
def test_arrays_of_all_shapes_share_prices(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step costs the same wherever its parts have the same sizes, and is priced once for all of these arrays."""
    mesh = Mesh.abstract(a=2, b=2)
    moves = objective(mesh, machine)
    priced = counting_steps(monkeypatch, moves)
    counts = []
    for shape in [(8, 16), (16, 8), (8, 4, 4), (4, 4, 8), (2, 8, 8), (4, 2, 2, 8)]:
        states = shardings(shape, mesh, moves.axes, unreduced="add")
        before = len(priced)
        shared = moves.table(states, states, shape, 4)
        counts.append(len(priced) - before)
        assert np.array_equal(shared, objective(mesh, machine).table(states, states, shape, 4)), shape
    assert counts[0] > 0
    assert counts[1] == 0, "the same parts, in another order"
    assert sum(counts) < 2.5 * counts[0]


@pytest.mark.parametrize("machine", ["", "h100:1x8", "h100:2x4", "v5e"])
@pytest.mark.parametrize("axes", [{"a": 2, "b": 2, "c": 2}, {"a": 4, "b": 2}, {"a": 8}], ids=str)
def test_steps_of_one_group_have_one_price_class(axes: dict[str, int], machine: str) -> None:
    """So an objective classifies one step of each group (``AxisSteps.group``)."""
    mesh = Mesh.abstract(**axes)
    cuts = [Sharding(((mesh.atoms_of["a"][0],),))] if "a" in axes else []
    named = Machine.of(machine) if ":" in machine else Machine.of(machine, mesh.size) if machine else None
    moves: Moves = Seconds(mesh, named, axes_of(mesh, cuts)) if named else bytes_on(mesh, axes_of(mesh, cuts))
    steps, classes = moves._steps, dict[object, set[object]]()
    for rank in (2, 3):
        table = steps.table(rank, ("add",))
        table.add([Sharding.replicated(rank)])
        for step in table._steps:
            classes.setdefault(steps.group(step), set()).add(moves.price_class(step))
    assert len(classes) > 5
    assert all(len(found) == 1 for found in classes.values())
