"""Functions that frameworks jit are explained as those of ``jax.jit``, with the names and the lines of the user."""

import functools
import itertools

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gshard

MESH = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
SPLIT = NamedSharding(MESH, P("data"))
OPTIMIZER = optax.adam(1e-2)


class MLP(nnx.Module):
    """Two layers, and a counter of keys, which is no weight."""

    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 32, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.down(self.dropout(nnx.gelu(self.up(x))))


def nnx_step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - x) ** 2))(model)
    optimizer.update(model, grads)
    return loss


def eqx_step(model, state, x, kind):
    loss, grads = eqx.filter_value_and_grad(lambda model: jnp.mean((jax.vmap(model)(x) - x) ** 2))(model)
    updates, state = OPTIMIZER.update(grads, state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), state, loss, kind


def placed(tree):
    """The arrays of a pytree: matrices cut over the mesh, others on every device."""
    where = lambda x: SPLIT if np.ndim(x) == 2 else NamedSharding(MESH, P())  # noqa: E731
    return jax.tree.map(lambda x: jax.device_put(x, where(x)) if isinstance(x, jax.Array) else x, tree)


def of_nnx():
    model = MLP(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)
    nnx.update((model, optimizer), placed(nnx.state((model, optimizer))))
    arguments = model, optimizer, placed(jnp.ones((64, 32)))
    return nnx.jit(nnx_step, donate_argnames=("model", "optimizer")), arguments, {"up/kernel", "down/kernel"}


def of_equinox():
    model = eqx.nn.MLP(32, 32, 64, 1, key=jax.random.key(0))  # its activation function is a leaf too
    state = OPTIMIZER.init(eqx.filter(model, eqx.is_array))
    arguments = placed(model), placed(state), placed(jnp.ones((64, 32))), "train"
    return eqx.filter_jit(eqx_step, donate="all"), arguments, {"layers/0/weight", "layers/1/weight"}


FRAMEWORKS = {"nnx": of_nnx, "equinox": of_equinox}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_it_is_explained_with_the_names_of_the_user(framework):
    f, arguments, weights = FRAMEWORKS[framework]()
    found = gshard.explain(f, *arguments)
    assert isinstance(found, gshard.stages.CompiledExplanation)
    assert found.attributed == 1
    assert {row.line.partition(":")[0] for row in found.collectives} == {"test_framework_jit.py"}
    rows = {row.array for row in found.collectives}
    names = [a.short.text.removesuffix("/value") for a in found.arguments]
    for weight in weights:
        assert f"model/{weight}" in names
    assert rows & {f"model/{weight}{value}" for weight in weights for value in ("", "/value")}
    assert any("gradient of" in array for array in rows)
    assert not any("states" in name or "first" in name for name in names)
    lowered = f.lower(*arguments)
    for stage in lowered, lowered.compile():
        assert gshard.explain(stage).bytes_by_kind == found.bytes_by_kind


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_gshard_partitions_it_where_it_is_told_to(framework):
    f, arguments, weights = FRAMEWORKS[framework]()
    for options in ({"partitioner": "gshard"}, {"mesh": MESH, "machine": "h100"}, {"memory_limit": "1GiB"}):
        found = gshard.explain(f, *arguments, **options)
        assert isinstance(found, gshard.stages.Explanation)
        assert found.total_bytes > 0
        names = [row.array for row in found.collectives]
        assert any(any(weight in name for weight in weights) for name in names), names
    with pytest.raises(gshard.ArgumentError, match="takes donate_argnums for a function of arrays only"):
        gshard.explain(f, *arguments, donate_argnums=0, partitioner="gshard")
    with pytest.raises(gshard.MeshError, match="is left to XLA: its arguments are on devices"):
        gshard.explain(f, *arguments, mesh=4)


def test_a_wrapper_that_lowers_is_explained_as_xla_compiles_it():
    class Wrapper:  # as of scalax: neither a function of JAX's, nor of a framework's that it wraps
        def __init__(self, f):
            self.jitted = jax.jit(f, out_shardings=NamedSharding(MESH, P()))

        def __call__(self, x):
            return self.jitted(x)

        def lower(self, x):
            return self.jitted.lower(x)

    step, x = Wrapper(lambda x: jnp.tanh(x)), placed(jnp.ones((64, 32)))
    found = gshard.explain(step, x)
    assert isinstance(found, gshard.stages.CompiledExplanation)
    assert found.total_bytes == gshard.explain(step.jitted, x).total_bytes > 0
    assert isinstance(gshard.explain(step, x, partitioner="gshard", mesh=MESH), gshard.stages.Explanation)


def test_in_a_block_a_function_of_jax_is_explained_as_gshard_partitions_it():
    f, x = jax.jit(lambda x: x.sum()), jax.ShapeDtypeStruct((64, 32), "float32", sharding=SPLIT)
    with gshard.instead_of_jit(mesh=MESH):
        assert isinstance(gshard.explain(f, x), gshard.stages.Explanation)
        assert isinstance(gshard.explain(f, x, partitioner="xla"), gshard.stages.CompiledExplanation)


def fresh(framework):
    """The function and its arguments, which are on no mesh."""
    f, arguments, _ = FRAMEWORKS[framework]()
    on_one = lambda x: jnp.asarray(np.asarray(x)) if isinstance(x, jax.Array) and x.ndim else x  # noqa: E731
    if framework == "nnx":
        nnx.update(arguments[:2], jax.tree.map(on_one, nnx.state(arguments[:2])))
        return f, [*arguments[:2], on_one(arguments[2])]
    return f, jax.tree.map(on_one, list(arguments))


def losses(framework, f, arguments):
    """The losses of four steps. The batch is on one device, on the mesh, split otherwise, and on the host."""
    found = []
    x = np.asarray(arguments[2])
    for batch in (
        jnp.asarray(x), placed(jnp.asarray(x)), jax.device_put(x, NamedSharding(MESH, P(None, "data"))), x
    ):  # fmt: skip
        arguments[2] = jnp.asarray(batch)
        out = f(*arguments)
        if framework == "equinox":
            arguments[:2] = out[:2]
        found.append(float(out if framework == "nnx" else out[2]))
    return found


@pytest.mark.parametrize("framework", ["nnx", pytest.param("equinox", marks=pytest.mark.slow)])
def test_a_searched_plan_runs_in_a_block(framework, tmp_path):
    """All calls run the plan, wherever the arguments are; also one that was read from a file."""
    f, arguments = fresh(framework)
    expected = losses(framework, *fresh(framework))
    found = gshard.search(f, *arguments, mesh={"data": 8}, machine="h100:1x8", memory_limit=40_000, progress=False)
    assert any("kernel" in line or "weight" in line for line in str(found).splitlines() if "@data" in line)
    found.save(tmp_path / "plan.json")
    plan = found.plan if framework == "nnx" else gshard.SavedPlan.load(tmp_path / "plan.json")
    with gshard.instead_of_jit(mesh=found.mesh, plan=plan):
        np.testing.assert_allclose(losses(framework, f, arguments), expected, rtol=1e-4)
        lowered = f.lower(*arguments)
    weights = [x for x in jax.tree.leaves(arguments[:2]) if np.shape(x) in {(32, 64), (64, 32)}]
    assert len(weights) == 6, "two weights with two moments each"
    assert not all(x.sharding.is_fully_replicated for x in weights)
    assert "chosen by search" in gshard.explain(lowered).format(tensors=12)


def test_a_plan_is_for_the_function_with_its_name():
    f, arguments = fresh("nnx")
    found = gshard.search(f, *arguments, mesh={"data": 8}, machine="h100:1x8", progress=False)

    @nnx.jit
    def evaluate(model, x):
        return model.up(x)

    expected = evaluate(arguments[0], arguments[2])
    with gshard.instead_of_jit(mesh=found.mesh, plan=found.plan):
        np.testing.assert_allclose(evaluate(arguments[0], arguments[2]), expected, rtol=1e-5, atol=1e-6)
        with pytest.raises(gshard.PlanError, match="nnx_step is not the program that the plan was made for"):
            f(*arguments[:2], arguments[2][:16])
    with pytest.raises(gshard.PlanError, match="plan= takes a plan, not a str"):
        gshard.instead_of_jit(mesh=found.mesh, plan="plan.json")


def test_what_a_framework_takes_apart_is_refused_with_the_way_out():
    f, arguments = fresh("nnx")
    with pytest.raises(
        gshard.ArgumentError, match=r"gshard\.search takes donate_argnums for a function of arrays only"
    ):
        gshard.search(f, *arguments, mesh=8, machine="h100:1x8", donate_argnums=0)
    found = gshard.search(f, *arguments, mesh={"data": 8}, machine="h100:1x8", memory_limit=40_000, progress=False)
    for use in (lambda: found.in_shardings, lambda: gshard.stages.export_plan(found)):
        with pytest.raises(gshard.ArgumentError, match=r"takes its arguments apart(.|\n)*gshard\.instead_of_jit\(mesh"):
            use()
    patch = found.patch()
    assert 'marks have an effect in: with gshard.instead_of_jit(mesh={"data": 8}, machine="h100:1x8", mem' in patch
    assert "in_shardings" not in patch
    assert found.marks.marks


def test_the_mesh_of_its_arguments_is_searched():
    f, arguments, _ = of_nnx()
    found = gshard.search(f, *arguments, machine="h100:1x8", progress=False)
    assert found.mesh.axes == (("data", 8),)
    kept = [row for row in str(found).splitlines() if "@data" in row]
    assert kept, "shardings of arguments are kept"


# Steps that frameworks jit are partitioned in a block of instead_of_jit: equal losses, state as it came.


X = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)


class WithStatistics(nnx.Module):
    """Two layers, with state of all kinds: weights, statistics, a counter of keys."""

    def __init__(self, rngs):
        self.first, self.second = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 32, rngs=rngs)
        self.norm, self.dropout = nnx.BatchNorm(64, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.second(self.dropout(self.norm(nnx.gelu(self.first(x)))))


# As most programs have it: decorated when the module is imported, far from any block.
jitted_nnx_step = functools.partial(nnx.jit, donate_argnames=("model", "optimizer"))(nnx_step)


def train_nnx(step, place):
    model = WithStatistics(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    if place:  # FSDP: weights and moments of Adam are split where they divide
        state = nnx.state((model, optimizer))
        placed = jax.tree.map(lambda x: jax.device_put(x, SPLIT) if np.ndim(x) and x.shape[0] % 8 == 0 else x, state)
        nnx.update((model, optimizer), placed)
    losses = [float(step(model, optimizer, jax.device_put(X, SPLIT) if place else X)) for _ in range(3)]
    return losses, model.first.kernel[...]


def loss_of(model, x):
    return jnp.mean((jax.vmap(model)(x) - x) ** 2)


def checked_eqx_step(model, state, x, kind):
    assert kind == "train"
    loss, grads = eqx.filter_value_and_grad(loss_of)(model, x)
    updates, state = OPTIMIZER.update(grads, state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), state, loss, kind


jitted_eqx_step = eqx.filter_jit(checked_eqx_step, donate="all-except-first")


def train_eqx(step, place):
    model = eqx.nn.MLP(32, 32, 64, 1, key=jax.random.key(0))  # its activation function is a leaf too
    state = OPTIMIZER.init(eqx.filter(model, eqx.is_array))
    losses = []
    for _ in range(3):
        x = jax.device_put(X, SPLIT) if place else jnp.asarray(X)
        model, state, loss, kind = step(model, state, gshard.split(x, 0, 8) if not place else x, "train")
        assert kind == "train"
        assert model.activation is not None
        losses.append(float(loss))
    return losses, model.layers[0].weight


class Linen(nn.Module):
    """The same in Flax Linen."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(32)(nn.gelu(nn.Dense(64)(x)))


def linen_step(state, x):
    loss, grads = jax.value_and_grad(lambda p: jnp.mean((state.apply_fn({"params": p}, x) - x) ** 2))(state.params)
    return state.apply_gradients(grads=grads), loss


jitted_linen_step = jax.jit(linen_step, donate_argnums=0)


def train_linen(step, place):
    model = Linen()
    params = model.init(jax.random.key(0), X)["params"]
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=OPTIMIZER)
    losses = []
    for _ in range(3):
        state, loss = step(state, jax.device_put(X, SPLIT) if place else X)
        losses.append(float(loss))
    return losses, state.params["Dense_0"]["kernel"]


STEPS = {
    "nnx": (train_nnx, jitted_nnx_step, lambda: nnx.jit(nnx_step)),
    "equinox": (train_eqx, jitted_eqx_step, lambda: eqx.filter_jit(checked_eqx_step)),
    "linen": (train_linen, jitted_linen_step, lambda: jax.jit(linen_step)),
}
FAST = {("nnx", True, "before")}


@pytest.mark.parametrize(
    ("framework", "place", "when"),
    [
        pytest.param(*case, marks=[] if case in FAST else pytest.mark.slow)
        for case in itertools.product(STEPS, (True, False), ("before", "inside"))
    ],
)
def test_three_steps(framework, place, when):
    """Jitted before the block or in it, the losses are those of one device; outside it trains as ever."""
    train, before, jit = STEPS[framework]
    expected, _ = train(before if when == "before" else jit(), False)
    with gshard.instead_of_jit(mesh=MESH):
        found, weight = train(before if when == "before" else jit(), place)
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert len(weight.sharding.device_set) == 8
    if place and framework == "nnx":
        assert weight.sharding.spec == P("data")
    if when == "before":
        after, weight = train(before, False)
        assert after == expected
        assert len(weight.sharding.device_set) == 1


def test_equinox_lowered():
    model = eqx.nn.MLP(32, 32, 64, 1, key=jax.random.key(0))
    state = OPTIMIZER.init(eqx.filter(model, eqx.is_array))
    with gshard.instead_of_jit(mesh=MESH):
        lowered = jitted_eqx_step.lower(model, state, jax.device_put(X, SPLIT), "train")
        assert isinstance(lowered.lowered, gshard.stages.Lowered)
        compiled = lowered.compile()
        found = compiled(model, state, jax.device_put(X, SPLIT), "train")[2]
    np.testing.assert_allclose(found, loss_of(model, X), rtol=1e-5)
