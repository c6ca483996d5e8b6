"""What follows from the marks, and what they leave undecided: arguments are chosen for only where arrays disagree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gshard
from families import CASES
from gshard.core.mesh import Mesh
from gshard.planning.propagate import propagate
from gshard.planning.settled import settled
from gshard.tracing.trace import trace

GRID = Mesh.abstract(x=4, y=2)


def step(c, a, b):
    """One of ``a`` and ``b`` has to be moved, and nothing says to which of both ``c`` belongs."""

    def loss(c):
        return jnp.sum(jnp.sin(c) * (gshard.split(a, 0, "x") + gshard.split(b, 1, "x")))

    return c - jax.grad(loss)(c)


def shapes(*own):
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in own]


def test_equations_whose_arrays_disagree_leave_their_arguments_undecided():
    propagated = settled(trace(step, *shapes((16, 8), (16, 8), (16, 8))), GRID)
    c, a, b = propagated.program.block.inputs
    x = frozenset(GRID.atoms_of["x"])
    assert not propagated.shardings[c].atoms
    assert propagated.could(c) == {0: x, 1: x}
    assert not propagated.could(a)
    assert not propagated.could(b)


def test_what_no_array_disagrees_about_is_as_propagation_says():
    """Weights of a data-parallel step stay whole, and an axis that nobody names is given to no argument."""

    def loss(w, v, x):
        return jnp.sum(jnp.tanh(gshard.split(x, 0, "x") @ w) @ v)

    propagated = settled(trace(jax.grad(loss, (0, 1)), *shapes((64, 32), (32, 16), (8, 64))), GRID)
    assert propagated.undecided == {}


@pytest.mark.parametrize("donated", [(), (0,)])
@pytest.mark.parametrize("shape", [(16, 8), (24, 40), (12, 9)])
@pytest.mark.one_in(3)
def test_a_state_that_is_undecided_stays_in_parts(shape, donated):
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    rng = np.random.default_rng(7)
    arrays = [rng.standard_normal(shape).astype(np.float32) for _ in range(3)]
    partitioned = gshard.jit(step, mesh=mesh, donate_argnums=donated)
    lowered = partitioned.lower(*arrays)
    kinds = [c.kind for c in lowered.spmd.collectives]
    assert "all_gather" not in kinds, "the state would be gathered in every step"
    come, leave = lowered.spmd.in_shardings[0], lowered.spmd.out_shardings[0]
    assert come.atoms
    assert leave.atoms
    assert come == leave or not donated
    expected = jax.jit(step)(*arrays)
    state = partitioned(jnp.asarray(arrays[0]), *arrays[1:])
    np.testing.assert_allclose(state, expected, rtol=1e-6, atol=1e-6)
    again = partitioned.lower(state, *arrays[1:])
    assert again.spmd.out_shardings == lowered.spmd.out_shardings
    np.testing.assert_allclose(partitioned(state, *arrays[1:]), jax.jit(step)(expected, *arrays[1:]), atol=1e-6)


def test_a_mark_on_an_undecided_argument_decides_it():
    def marked(c, a, b):
        return step(gshard.shard(c, P(None, "y")), a, b)

    propagated = settled(trace(marked, *shapes((16, 8), (16, 8), (16, 8))), GRID)
    c = propagated.program.block.inputs[0]
    plan = propagate(trace(marked, *shapes((16, 8), (16, 8), (16, 8))), GRID)
    assert propagated.shardings[c].dims == ((), GRID.atoms_of["y"])
    assert plan.entry[0].dims[1][:1] == GRID.atoms_of["y"]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.one_in(6)
def test_arguments_come_as_propagation_says(name):
    """Beyond that they are split only where arrays disagree, and over what these disagree about."""
    case = CASES[name]
    lowered = gshard.jit(case.function, mesh=case.jax_mesh).lower(*case.arguments)
    propagated = settled(lowered.program, lowered.plan.mesh)
    for v, planned in zip(propagated.program.block.inputs, lowered.plan.program.block.inputs, strict=True):
        assert propagated.allow(v, lowered.plan.shardings[planned])
