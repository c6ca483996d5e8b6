"""Nearby: of large programs on three axes few choices are compared, and the plans are as good."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from families import SMALL
from gshard.core.mesh import Mesh
from gshard.core.program import Program
from gshard.core.sharding import Sharding
from gshard.device.machine import Machine
from gshard.planning import strategies as nearby
from gshard.planning.choices import graph_of
from gshard.planning.graph import Graph
from gshard.planning.objective import bytes_on
from gshard.planning.propagate import choose
from gshard.planning.reshard_costs import axes_of, axis_steps
from gshard.planning.settled import settled
from gshard.planning.strategies import estimated_entries, is_limited, places_for, places_of, runs_of, shardings
from gshard.search.seconds import seconds_on
from gshard.tracing.trace import trace

CUBE = Mesh.abstract(x=2, y=2, z=2)


def layers(depth: int) -> Program:
    """Dense layers, of which the first one is marked."""

    def f(x: Any, w: Any) -> Any:
        x = gshard.split(x, 0, ("x", "y"))
        w = gshard.split(w, 2, "z")
        for k in range(depth):
            x = jnp.tanh(jnp.einsum("bsm,mn->bsn", x, w[k]))
        return x

    return trace(f, jax.ShapeDtypeStruct((8, 8, 16), jnp.float32), jax.ShapeDtypeStruct((depth, 16, 16), jnp.float32))


def problem(program: Program) -> Graph:
    return graph_of(program, bytes_on(CUBE, axes_of(CUBE)), propagated=settled(program, CUBE))


def test_it_depends_on_the_axes_and_the_size() -> None:
    program = layers(4)
    per_layer = estimated_entries(layers(8), CUBE, axes_of(CUBE)) - estimated_entries(program, CUBE, axes_of(CUBE))
    assert per_layer > 0
    assert not is_limited(program, CUBE, axes_of(CUBE))
    large = layers(4 * (1 + int(nearby.LARGE / per_layer)))
    assert estimated_entries(large, CUBE, axes_of(CUBE)) > nearby.LARGE
    assert is_limited(large, CUBE, axes_of(CUBE))
    two, four = Mesh.abstract(x=2, y=4), Mesh.abstract(a=2, b=2, c=2, d=2)
    assert not any(is_limited(some, two, axes_of(two)) for some in (program, large))
    assert all(is_limited(some, four, axes_of(four)) for some in (program, large))


def test_axes_of_one_device_do_not_count() -> None:
    ones = Mesh.abstract(x=2, a=1, y=2, b=1, z=2, c=1, d=1)
    program = layers(4)
    assert not is_limited(program, ones, axes_of(ones))
    assert estimated_entries(program, ones, axes_of(ones)) == estimated_entries(program, CUBE, axes_of(CUBE))


def test_one_axis_is_elsewhere_than_expected() -> None:
    given = axes_of(CUBE)
    found = {*places_for([None, 0, 1, 2], CUBE, given, [(0, 0, 1)], ())}
    assert found == {
        own
        for own in places_for([None, 0, 1, 2], CUBE, given)
        if min(sum(a != b for a, b in zip(own, base, strict=True)) for base in ((0, 0, 1), (None,) * 3)) <= 1
    }


def test_axes_in_a_row_are_elsewhere_together() -> None:
    """Axes that a known sharding has in a row go to one place, from no place too."""
    given = axes_of(CUBE)
    runs = runs_of(given, [Sharding((("x", "y"), (), ("z",)))])
    assert runs == (("x", "y"),)
    found = {*places_for([None, 0, 1, 2], CUBE, given, [(0, 0, 2)], runs)}
    alone = {*places_for([None, 0, 1, 2], CUBE, given, [(0, 0, 2)], ())}
    together = {(p, p, z) for p in (None, 0, 1, 2) for z in (None, 0, 1, 2)}
    assert found == alone | together
    assert (1, 1, 2) not in alone


def test_parts_of_an_axis_are_elsewhere_together() -> None:
    """Of an axis in three parts, of which two are expected along dimension 0."""
    mesh = Mesh.abstract(x=8)
    given, expected = tuple((atom,) for atom in mesh.atoms), (0, 0, None)
    every = {*places_for([None, 0, 1, 2], mesh, given)}
    found = {*places_for([None, 0, 1, 2], mesh, given, [expected], ())}
    assert {expected, (None,) * 3, (1, 1, 1), (1, 1, None), (0, 0, 1), (None, 2, 2)} <= found < every
    assert {(1, 1, 2), (2, 1, 1)} <= every - found
    assert is_limited(layers(400), mesh, given)
    assert not is_limited(layers(4), mesh, given)
    assert not is_limited(layers(400), mesh, axes_of(mesh))


def changes(places: Any, base: Any) -> int:
    """How many axes are elsewhere. x and y, which a mark has in a row, count once if they have one place."""
    elsewhere = [a != b for a, b in zip(places, base, strict=True)]
    return sum(elsewhere) - (elsewhere[0] and elsewhere[1] and places[0] == places[1])


def test_states_of_a_large_program_are_near_the_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the marks say is among them, and much less than all."""
    program = layers(4)
    every = problem(program)
    monkeypatch.setattr(nearby, "LARGE", 0)
    few, known = problem(program), settled(program, CUBE)
    assert 3 * sum(table.size for table in few.problem.tables) < sum(table.size for table in every.problem.tables)
    axes = axes_of(CUBE)
    for group, states, all_states in zip(few.groups.members, few.states, every.states, strict=True):
        assert {known.shardings[v] for v in group} <= {*states} <= {*all_states}
        bases = [(None,) * 3, *(places_of(dict(enumerate(known.shardings[v].dims)), axes) for v in group)]
        places = [places_of(dict(enumerate(s.dims)), axes) for s in states if not s.unreduced]
        far = [s for s in places if min(changes(s, base) for base in bases) > 1]
        assert 4 * len(far) <= len(places), "few more, in which equations make or take it"


@pytest.mark.parametrize(
    "name",
    [
        "layers",
        *(pytest.param(f"small/{own}_on_cube_step", marks=pytest.mark.slow) for own in ("diffusion", "protein")),
    ],
)
def test_plans_near_the_marks_are_as_good(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a millionth of what is found among all choices, or better than that."""
    case = SMALL.get(name)
    program = layers(4) if case is None else trace(case.function, *case.arguments)
    cost = {}
    for large in (0.0, float("inf")):
        monkeypatch.setattr(nearby, "LARGE", large)
        found = choose(settled(program, CUBE))
        assert found is not None
        cost[large] = found.cost
    assert cost[0.0] <= cost[float("inf")] * (1 + 2e-6)


@pytest.mark.parametrize("machine", ["", "h100"])
def test_reshards_pass_through_some_shardings(machine: str) -> None:
    """Steps lead to no other shardings than those given, and the objective itself stays as it was."""
    axes, shape = axes_of(CUBE), (8, 24, 16)
    moves = seconds_on(Machine.of(machine, CUBE.size))(CUBE, axes) if machine else bytes_on(CUBE, axes)
    states = shardings(shape, CUBE, axes, unreduced="add")
    ends = [states[k] for k in (1, 9, 30, 50)]
    through_all = moves.table(ends, ends, shape, 4)
    assert np.isfinite(through_all).all()
    few = moves.through(ends)
    assert np.isfinite(few.table(ends, ends, shape, 4)).all()  # a reshard that they do not allow has its own steps
    assert not np.array_equal(few.table(ends, ends, shape, 4), through_all)
    assert np.array_equal(moves.table(ends, ends, shape, 4), through_all)
    places = [s for s in few._all_in_axes(ends) if s is not None]
    dims = frozenset(s.dims for s in places)
    table = axis_steps(CUBE, axes, dims).table(3, ("add",))
    table.add(places)
    assert {s.dims for s in table._places} == dims
