"""A search for a number of devices tries meshes of three axes, near the best plans on meshes of two."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from gshard.core.planning_tables import tables
from gshard.core.time_budget import TimeBudget
from gshard.device.machine import Machine
from gshard.search.find import MeshSearch, cut_in_two, on_finer

RNG = np.random.default_rng(4)
ROWS, LENGTH, UNITS, HEADS, HIDDEN = 8, 8, 32, 4, 64


def normal(*shape):
    return (RNG.standard_normal(shape) / 4).astype(np.float32)


def layer(x, w):
    q, k, v = (jnp.einsum("bsm,mhd->bhsd", x, w[name]) for name in "qkv")
    mixed = jax.nn.softmax(jnp.einsum("bhsd,bhtd->bhst", q, k)) @ v
    x = x + jnp.einsum("bhsd,hdm->bsm", mixed, w["o"])
    return x + jax.nn.relu(x @ w["up"]) @ w["down"]


def step(weights, x):
    def loss(weights):
        y = x
        for w in weights:
            y = layer(y, w)
        return (y**2).mean()

    value, gradient = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradient), value


def weights_of(units, hidden, make):
    heads = units, HEADS, units // HEADS
    shapes = {"q": heads, "k": heads, "v": heads, "o": (HEADS, units // HEADS, units)}
    return [{name: make(*s) for name, s in {**shapes, "up": (units, hidden), "down": (hidden, units)}.items()}] * 2


ARGUMENTS = weights_of(UNITS, HIDDEN, normal), normal(ROWS, LENGTH, UNITS)


def search_on(mesh, near=None):
    lowered = gshard.jit(step, mesh=mesh, donate_argnums=0).lower_for_search(ARGUMENTS, {})
    program = lowered.program if near is None else near.program
    one = MeshSearch(
        program, mesh, Machine.read("h100:2x4", mesh.size), donated=lowered.donated, budget=TimeBudget.of(None, False),
        near=None if near is None else near.solved_plan,
    )  # fmt: skip
    one.solve()
    return one


@pytest.fixture(scope="module")
def coarse():
    with tables():
        one = search_on(gshard.Mesh.of({"data": 4, "model": 2}))
        assert one.price_solution() is not None
        return one


@pytest.fixture(scope="module")
def near(coarse):
    (mesh,) = cut_in_two(coarse.mesh)
    return search_on(mesh, coarse)


def test_cuts_keep_the_devices_and_their_order(coarse):
    (finer,) = cut_in_two(coarse.mesh)
    assert (dict(finer.axes), finer.devices) == ({"data": 2, "model": 2, "inner": 2}, coarse.mesh.devices)
    meshes = [tuple(size for _, size in mesh.axes) for mesh in cut_in_two(gshard.Mesh.abstract(data=8, model=4))]
    assert meshes == [(2, 4, 4), (4, 2, 4), (8, 2, 2)]


def test_a_plan_is_the_same_on_a_finer_mesh(coarse):
    (mesh,) = cut_in_two(coarse.mesh)
    plan = coarse.chosen.plan
    finer = on_finer(plan, mesh)
    for v, sharding in plan.shardings.items():
        assert finer.shardings[v].local_shape(mesh, v.shape) == sharding.local_shape(coarse.mesh, v.shape)
    counts = [
        [{f: one.mesh.count(atoms) for f, atoms in split.items()} for split in one.splits.values()]
        for one in (plan, finer)
    ]
    assert counts[0] == counts[1]


def test_the_known_plan_is_among_those_compared(coarse, near):
    assert near.rank[2] <= coarse.rank[2] * (1 + 1e-6)


def test_plans_run(near):
    near.price_solutions()
    run = gshard.jit(step, mesh=near.mesh, plan=near.chosen.plan, donate_argnums=0)
    weights, expected = (jax.tree.map(jnp.asarray, ARGUMENTS[0]) for _ in range(2))
    for _ in range(3):
        weights, value = run(weights, ARGUMENTS[1])
        expected, expected_value = jax.jit(step)(expected, ARGUMENTS[1])
        np.testing.assert_allclose(value, expected_value, rtol=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), weights, expected)


def language_step(state, tokens, targets):
    def loss(state):
        y = state["table"][tokens]
        for w in state["layers"]:
            y = layer(y, w)
        found = jax.nn.log_softmax(y @ state["table"].T)
        return -jnp.mean(jnp.take_along_axis(found, targets[..., None], -1))

    return jax.tree.map(lambda w, g: w - 0.1 * g, state, jax.grad(loss)(state))


@pytest.mark.slow
def test_three_axes_are_found_where_they_are_faster():
    shape = jax.ShapeDtypeStruct
    state = {"table": shape((50304, 1024), "float32"), "layers": weights_of(1024, 4096, lambda *s: shape(s, "float32"))}
    arguments = state, shape((32, 1024), "int32"), shape((32, 1024), "int32")
    step = jax.jit(language_step, donate_argnums=0)
    found = gshard.search(step, *arguments, mesh=64, machine="h100:8x8", progress=False)
    assert [name for name, _ in found.mesh.axes] == ["data", "model", "inner"]
    two_axes = gshard.search(step, *arguments, mesh=[found.best.near], machine="h100:8x8", progress=False)
    assert found.cost.seconds < 0.99 * two_axes.cost.seconds
    assert "differ in one axis from the one found on mesh" in str(found)
