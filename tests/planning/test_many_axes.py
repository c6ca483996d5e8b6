"""Meshes of many axes: plans consider few of them away from what propagation says, and compute the same."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from families import SMALL
from gshard.comm.reshard import axes_of, joined
from gshard.core.mesh import Mesh
from gshard.core.sharding import Sharding
from gshard.device.machine import Machine
from gshard.lowering.seconds import seconds_on
from gshard.planning import strategies as nearby
from gshard.planning.choices import graph_of
from gshard.planning.objective import Bytes, bytes_on
from gshard.planning.propagate import _chosen, propagate
from gshard.planning.settled import settled
from gshard.planning.strategies import is_limited, places_for, places_of, runs_of, shardings
from gshard.search.find import in_two
from gshard.testing.rule_checks import emit
from gshard.tracing.trace import trace
from laws.test_propagate_laws import assert_right


@pytest.mark.parametrize("axes", [4, 5, 6])
def test_ways_are_near_what_is_expected(axes):
    """Of 3 places and none for each axis there would be 4 to the power of axes."""
    mesh = Mesh.abstract(**{f"axis{i}": 2 for i in range(axes)})
    given = tuple(mesh.atoms_of.values())
    expected = Sharding((given[0], given[1], given[2]))
    found = shardings((64, 64, 64), mesh, given, near=(expected,), runs=())
    assert found[0] == Sharding(((), (), ()))
    assert expected in found
    assert len(found) <= 2 * (1 + 3 * axes + 9 * axes * (axes - 1) // 2)
    assert {*found} < {*shardings((64, 64, 64), mesh, given)}


def test_axes_that_are_one_move_as_several():
    """Those that nobody names stand apart in the mesh."""
    mesh = Mesh.abstract(a=2, b=3, c=2, d=5)
    apart = axes_of(mesh)
    together = joined(mesh, apart, [Sharding((("b",), ("d",)))])
    assert together == (("b",), ("d",), ("a", "c"))
    partial = Sharding(((), ("d",))).with_unreduced(dict.fromkeys("abc", "add"))
    for target in (Sharding(((), ())), Sharding((("a", "c"), ("d",))), Sharding((("b",), ("d",)))):
        one, several = (Bytes(mesh, axes).move(partial, target, (240, 60), 4) for axes in (together, apart))
        assert one == several


@pytest.mark.parametrize(("marked", "found"), [
    ((), ("ab", "cd")), (("c",), ("c", "ab", "d")), (("c", "a"), ("a", "c", "bd")),
])  # fmt: skip
def test_axes_without_a_mark_are_searched_as_two(marked, found):
    mesh = Mesh.abstract(a=2, b=3, c=2, d=5)
    said = [Sharding(((name,), ())) for name in marked]
    assert in_two(mesh, axes_of(mesh), said) == tuple(map(tuple, found))


# An axis of the mesh that marks part in many: plans stay small, and compute the same.
SHAPES = ((16, 6), (2, 12), (4, 6), (8, 5))


def step(devices, weights, x):
    def loss(weights):
        return sum(jnp.sum(jnp.tanh(x[:, : w.shape[0]] @ w) ** 2) for w in weights)

    gradients = jax.grad(loss)(weights)
    parts = [math.gcd(g.shape[0], devices) for g in gradients]
    return [w - 0.1 * gshard.split(g, 0, n) for w, g, n in zip(weights, gradients, parts, strict=True)]


@pytest.mark.parametrize("times", [1, 128])
def test_gradients_in_many_parts(times, rng):
    """On 16 devices and on 2,048: each gradient is split as is said, and what leaves is right."""
    mesh = Mesh.abstract(devices=16 * times)
    weights = [rng.standard_normal((n * times, m)).astype(np.float32) / 9 for n, m in SHAPES]
    x = rng.standard_normal((6, 16 * times)).astype(np.float32)
    program = trace(functools.partial(step, mesh.size), weights, x)
    plan = propagate(program, mesh)
    said = [plan.shardings[e.outputs[0]] for e in plan.program.block.walk() if e.mark is not None]
    assert [mesh.count(s.dims[0]) for s in said] == [16 * times, 2 * times, 4 * times, 8 * times]
    assert len(axes_of(mesh, said)) == 4
    if times == 1:
        assert_right(emit(plan), functools.partial(step, 16), (weights, x))


# Nearby: of large programs on three axes few choices are compared, and the plans are as good.
CUBE = Mesh.abstract(x=2, y=2, z=2)


def layers(depth):
    def f(x, w):
        x = gshard.split(x, 0, ("x", "y"))
        w = gshard.split(w, 2, "z")
        for k in range(depth):
            x = jnp.tanh(jnp.einsum("bsm,mn->bsn", x, w[k]))
        return x

    return trace(f, jax.ShapeDtypeStruct((8, 8, 16), jnp.float32), jax.ShapeDtypeStruct((depth, 16, 16), jnp.float32))


def problem(program):
    return graph_of(program, bytes_on(CUBE, axes_of(CUBE)), propagated=settled(program, CUBE))


def changes(places, base):
    """How many axes are elsewhere. x and y, which a mark has in a row, count once if they have one place."""
    elsewhere = [a != b for a, b in zip(places, base, strict=True)]
    return sum(elsewhere) - (elsewhere[0] and elsewhere[1] and places[0] == places[1])


def test_states_of_a_large_program_are_near_the_marks(monkeypatch):
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


@pytest.mark.parametrize("name", [
    "layers",
    *(pytest.param(f"small/{own}_on_cube_step", marks=pytest.mark.slow) for own in ("diffusion", "protein")),
])  # fmt: skip
def test_plans_near_the_marks_are_as_good(name, monkeypatch):
    case = SMALL.get(name)
    program = layers(4) if case is None else trace(case.function, *case.arguments)
    cost = {}
    for large in (0.0, float("inf")):
        monkeypatch.setattr(nearby, "LARGE", large)
        propagated = settled(program, CUBE)
        objective = bytes_on(CUBE, axes_of(CUBE))
        graph, states, _ = _chosen(graph_of(propagated.program, objective, propagated=propagated), propagated)
        cost[large] = graph.problem.value(states)
    assert cost[0.0] <= cost[float("inf")] * (1 + 2e-6)


@pytest.mark.parametrize("machine", ["", "h100"])
def test_reshards_pass_through_some_shardings(machine):
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
    table = few._steps.table(3, ("add",))
    assert {s.dims for s in table.places} == {few.in_axes(s).dims for s in ends}


def test_axes_in_a_row_are_elsewhere_together():
    """Axes that a known sharding has in a row go to one place, from no place too."""
    given = axes_of(CUBE)
    runs = runs_of(given, [Sharding((("x", "y"), (), ("z",)))])
    assert runs == (("x", "y"),)
    found = {*places_for([None, 0, 1, 2], CUBE, given, [(0, 0, 2)], runs)}
    alone = {*places_for([None, 0, 1, 2], CUBE, given, [(0, 0, 2)], ())}
    together = {(p, p, z) for p in (None, 0, 1, 2) for z in (None, 0, 1, 2)}
    assert found == alone | together
    assert (1, 1, 2) not in alone


def test_parts_of_an_axis_are_elsewhere_together():
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
