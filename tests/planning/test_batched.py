"""Batches of equal functions: the numbers of every call, what devices send and compute, and plans that are saved."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gshard
from checked_calls import near
from gshard.core.mesh import Mesh
from gshard.planning.batched import batched
from gshard.planning.settled import settled
from placed import mesh_of, three_calls

NAME = "batch_equal_functions"
MACHINE = "h100:1x8"
RNG = np.random.default_rng(5)


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def orthogonal(x):
    x = x / (jnp.linalg.norm(x) + 1e-7)
    for _ in range(3):
        product = x @ x.T
        x = 2 * x - 1.5 * product @ x + 0.5 * product @ product @ x
    return x


def inverse_root(x):
    values, vectors = jnp.linalg.eigh(x @ x.T + 0.1 * jnp.eye(x.shape[0]))
    return (vectors * values**-0.25) @ vectors.T @ x


def square_root(x):
    """A loop that ends sooner for some arrays than for others."""
    a = x @ x.T / jnp.trace(x @ x.T) + 0.05 * jnp.eye(x.shape[0])

    def step(state):
        y, z, _ = state
        t = 1.5 * jnp.eye(a.shape[0]) - 0.5 * z @ y
        return y @ t, t @ z, jnp.abs(y @ y - a).max()

    y, _, _ = jax.lax.while_loop(lambda state: state[2] > 1e-3, step, (a, jnp.eye(a.shape[0]), jnp.inf))
    return y


FUNCTIONS = {
    "unrolled": orthogonal,
    "decomposition": inverse_root,
    "while": square_root,
    "fori": lambda x: jax.lax.fori_loop(0, 3, lambda _, x: 1.5 * x - 0.5 * (x @ x.T) @ x, x / jnp.linalg.norm(x)),
    "integers": lambda x: ((q := jnp.round(x * 8).astype(jnp.int32)) @ q.T) @ q,
    "several results": lambda x: jnp.linalg.cholesky(x @ x.T + jnp.eye(x.shape[0])) @ x + jnp.linalg.norm(x),
}


def update_of(function, dim=0):
    def update(weights, momenta, gradients):
        weights, momenta = (jax.tree.map(lambda x: gshard.split(x, dim, "data"), t) for t in (weights, momenta))
        momenta = jax.tree.map(lambda m, g: 0.9 * m + g, momenta, gradients)
        return jax.tree.map(lambda w, m: w - 0.1 * function(m), weights, momenta), momenta

    return update


def batches_of(program):
    return [fired.rewrite for fired in program.fired].count(NAME)


@pytest.mark.parametrize(("count", "axes"), [(2, {"data": 8}), (5, {"data": 8}), (9, {"data": 2, "model": 4})])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.one_in(3)
def test_numbers_of_the_batched_program_in_every_call(name, count, axes):
    update = update_of(FUNCTIONS[name])
    n = 12 if count == 5 else 16  # 12 rows over 8 devices are uneven
    trees = [[normal(n, n) for _ in range(count)] for _ in range(3)]
    jax_mesh = mesh_of(**axes)
    mesh = Mesh.of(jax_mesh)
    program = settled(gshard.stages.trace(update, *trees), mesh).program
    changed = batched(program, mesh)
    assert batches_of(changed) == 1
    assert batched(changed, mesh) is changed, "once"
    assert batched(program, mesh).block is changed.block, "values are compared by identity"
    f = gshard.jit(update, mesh=jax_mesh, plan=gshard.stages.propagate(changed, mesh))
    wanted = jax.jit(update)(*trees)
    for got in three_calls(f, jax_mesh, *trees):
        near(got, wanted, 1e-3)


def test_integers_and_what_is_not_finite():
    def f(xs):
        return [(x @ x) @ x for x in (gshard.split(x, 0, "data") for x in xs)]

    mesh = mesh_of(data=8)
    integers = [RNG.integers(-(2**31), 2**31 - 1, (16, 16), dtype=np.int32) for _ in range(5)]
    floats = [normal(16, 16) for _ in range(5)]
    floats[1][3, 3], floats[2][0, 1], floats[4][5, 5] = np.nan, np.inf, -np.inf
    for xs in (integers, floats):
        program = batched(settled(gshard.stages.trace(f, xs), Mesh.of(mesh)).program, Mesh.of(mesh))
        assert batches_of(program) == 1
        got = gshard.jit(f, mesh=mesh, plan=gshard.stages.propagate(program, Mesh.of(mesh)))(xs)
        for a, b in zip(got, jax.jit(f)(xs), strict=True):
            np.testing.assert_allclose(a, b, rtol=0 if a.dtype == np.int32 else 1e-4)  # equal infinities and NaNs


def stacked(weights, momenta, gradients):
    """The update as one writes it by hand for one array of all matrices."""
    weights, momenta, gradients = (gshard.split(x, 1, "data") for x in (weights, momenta, gradients))
    momenta = 0.9 * momenta + gradients
    return weights - 0.1 * jax.vmap(orthogonal)(momenta), momenta


def donating(f):
    return jax.jit(f, donate_argnums=(0, 1))


@pytest.mark.parametrize(("machine", "most"), [("h100:1x8", 1.2), ("v5e:2x4", 1.0)])
def test_separate_matrices_cost_what_a_stack_costs(machine, most):
    """On H100 the launches of the kernels for each weight remain, which the stack does not have."""
    count, n = 16, 1024
    mesh, one = gshard.Mesh.abstract(data=8), jax.ShapeDtypeStruct((n, n), "float32")
    options = {"mesh": mesh, "machine": machine}
    separate = gshard.explain(donating(update_of(orthogonal)), *[[one] * count] * 3, **options)
    stack = gshard.explain(donating(stacked), *[jax.ShapeDtypeStruct((count, n, n), "float32")] * 3, **options)
    assert batches_of(separate.plan.program) == 1
    assert separate.cost().seconds <= most * stack.cost().seconds
    assert separate.cost().flops <= 1.01 * stack.cost().flops
    assert separate.cost().sent <= stack.cost().sent
    assert separate.cost().peak <= stack.cost().peak
    assert set(separate.bytes_by_kind) == {"all_to_all"}


@pytest.mark.parametrize("case", ["no marks", "one device", "one matrix"])
def test_there_are_no_batches_without_use(case):
    one = jax.ShapeDtypeStruct((512, 512), "float32")

    def unmarked(weights, momenta, gradients):
        return [w - orthogonal(m + g) for w, m, g in zip(weights, momenta, gradients, strict=True)]

    f = unmarked if case == "no marks" else update_of(orthogonal)
    trees = [[one] * (1 if case == "one matrix" else 4)] * 3
    size = 1 if case == "one device" else 8
    found = gshard.explain(f, *trees, mesh=gshard.Mesh.abstract(data=size), machine=MACHINE if size > 1 else None)
    assert batches_of(found.plan.program) == 0


def test_a_training_step_with_muon():
    optimizer = optax.contrib.muon(1e-2)

    def loss(params, x):
        for layer in params:
            x = jnp.tanh(x @ layer["w"] + layer["b"])
        return jnp.mean(x**2)

    def step(params, state, x):
        params = jax.tree.map(lambda p: gshard.split(p, 0, "data"), params)
        value, gradients = jax.value_and_grad(loss)(params, gshard.split(x, 0, "data"))
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    params = [{"w": normal(64, 64), "b": normal(64)} for _ in range(5)]
    x, mesh = normal(16, 64), mesh_of(data=8)
    ours = theirs = params, optimizer.init(params)
    f, g = gshard.jit(step, mesh=mesh, machine=MACHINE), jax.jit(step)
    assert batches_of(f.lower(*ours, x).plan.program) == 1
    for _ in range(3):
        *ours, our_loss = f(*ours, x)
        *theirs, their_loss = g(*theirs, x)
        near((our_loss, ours), (their_loss, theirs), 1e-3)


def test_steps_in_a_loop():
    def steps(weights, gradients):
        weights = [gshard.split(w, 0, "data") for w in weights]

        def step(weights, gradients):
            return [w - 0.1 * orthogonal(w + g) for w, g in zip(weights, gradients, strict=True)], None

        return jax.lax.scan(step, weights, gradients)[0]

    weights, gradients = [normal(16, 16) for _ in range(4)], [normal(4, 16, 16) for _ in range(4)]
    mesh = mesh_of(data=4, model=2)
    program = batched(settled(gshard.stages.trace(steps, weights, gradients), Mesh.of(mesh)).program, Mesh.of(mesh))
    assert batches_of(program) == 1
    f = gshard.jit(steps, mesh=mesh, plan=gshard.stages.propagate(program, Mesh.of(mesh)))
    for got in three_calls(f, mesh, weights, gradients):
        near(got, jax.jit(steps)(weights, gradients), 1e-3)


def test_a_plan_with_batches_is_saved_and_loaded(tmp_path):
    update = update_of(orthogonal)
    trees = [[normal(256, 256) for _ in range(8)] for _ in range(3)]
    mesh = mesh_of(data=8)
    lowered = gshard.jit(update, mesh=mesh, machine=MACHINE).lower(*trees)
    assert batches_of(lowered.plan.program) == 1
    gshard.SavedPlan.of(lowered.plan).save(tmp_path / "plan.json")
    saved = gshard.SavedPlan.load(tmp_path / "plan.json")
    f, wanted = gshard.jit(update, mesh=mesh, plan=saved), jax.jit(update)(*trees)
    for got in three_calls(f, mesh, *trees):
        near(got, wanted, 1e-3)
    other = [tree[:7] for tree in trees]
    with pytest.raises(gshard.PlanError, match="not the program that the plan was made for"):
        gshard.jit(update, mesh=mesh, plan=saved)(*other)


def test_search_deals_matrices_out_without_marks():
    def update(weights, momenta, gradients):
        momenta = [0.9 * m + g for m, g in zip(momenta, gradients, strict=True)]
        return [w - 0.1 * orthogonal(m) for w, m in zip(weights, momenta, strict=True)], momenta

    trees = [[normal(256, 256) for _ in range(8)] for _ in range(3)]
    mesh = mesh_of(data=8)
    found = gshard.search(donating(update), *trees, mesh=mesh, machine=MACHINE, progress=False)
    assert batches_of(found.plan.program) == 1
    marked = gshard.explain(donating(update_of(orthogonal)), *trees, mesh=mesh, machine=MACHINE)
    assert found.cost.seconds <= 1.01 * marked.cost().seconds
    assert "stack" in str(marked)
    f, wanted = gshard.jit(update, mesh=mesh, plan=found.plan), jax.jit(update)(*trees)
    for got in three_calls(f, mesh, *trees):
        near(got, wanted, 1e-3)
