"""Functions that frameworks jit are explained as those of ``jax.jit``, with the names and the lines of the user."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
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
    assert found.is_compiled
    assert all(row.line or row.module for row in found.collectives)
    assert {row.line.partition(":")[0] for row in found.collectives} == {"test_framework_jit.py"}
    rows = {row.array for row in found.collectives}
    names = [a.short.text.removesuffix("/value") for a in found.tensors]
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
        assert not found.is_compiled
        assert found.total_bytes > 0
        names = [row.array for row in found.collectives]
        assert any(any(weight in name for weight in weights) for name in names), names
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
    assert found.is_compiled
    assert found.total_bytes == gshard.explain(step.jitted, x).total_bytes > 0
    assert not gshard.explain(step, x, partitioner="gshard", mesh=MESH).is_compiled


def test_in_a_block_a_function_of_jax_is_explained_as_gshard_partitions_it():
    f, x = jax.jit(lambda x: x.sum()), jax.ShapeDtypeStruct((64, 32), "float32", sharding=SPLIT)
    with gshard.instead_of_jit(mesh=MESH):
        assert not gshard.explain(f, x).is_compiled
        assert gshard.explain(f, x, partitioner="xla").is_compiled


def fresh():
    """A function of Flax and its arguments, which are on no mesh."""
    f, arguments, _ = of_nnx()
    on_one = lambda x: jnp.asarray(np.asarray(x)) if isinstance(x, jax.Array) and x.ndim else x  # noqa: E731
    nnx.update(arguments[:2], jax.tree.map(on_one, nnx.state(arguments[:2])))
    return f, [*arguments[:2], on_one(arguments[2])]


@functools.cache
def searched():
    f, arguments = fresh()
    return gshard.search(f, *arguments, mesh={"data": 8}, machine="h100:1x8", memory_limit=40_000, progress=False)


def losses(f, arguments):
    """The losses of four steps. The batch is on one device, on the mesh, split otherwise, and on the host."""
    x = np.asarray(arguments[2])
    batches = jnp.asarray(x), placed(jnp.asarray(x)), jax.device_put(x, NamedSharding(MESH, P(None, "data"))), x
    return [float(f(*arguments[:2], jnp.asarray(batch))) for batch in batches]


def test_a_searched_plan_runs_in_a_block(tmp_path):
    """All calls run the plan, wherever the arguments are; also one that was read from a file."""
    f, arguments = fresh()
    expected, found = losses(*fresh()), searched()
    assert any("kernel" in line or "weight" in line for line in str(found).splitlines() if "@data" in line)
    found.save(tmp_path / "plan.json")
    with gshard.instead_of_jit(mesh=found.mesh, plan=gshard.SavedPlan.load(tmp_path / "plan.json")):
        np.testing.assert_allclose(losses(f, arguments), expected, rtol=1e-4)
        lowered = f.lower(*arguments)
    weights = [x for x in jax.tree.leaves(arguments[:2]) if np.shape(x) in {(32, 64), (64, 32)}]
    assert len(weights) == 6, "two weights with two moments each"
    assert not all(x.sharding.is_fully_replicated for x in weights)
    assert "chosen by search" in gshard.explain(lowered).format(tensors=12)


def test_a_plan_is_for_the_function_with_its_name():
    (f, arguments), found = fresh(), searched()

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


def test_a_plan_is_explained_for_its_function_only():
    (f, arguments), found = fresh(), searched()
    explained = gshard.explain(f, *arguments, mesh=found.mesh, machine="h100:1x8", plan=found.plan)
    assert explained.plan.entry == found.plan.entry
    assert explained.total_bytes == found.cost.sent
    other = gshard.jit(lambda x: x * 2, mesh={"data": 8}).lower(arguments[2]).plan
    with pytest.raises(gshard.PlanError, match="the plan is for another function than"):
        gshard.explain(f, *arguments, mesh=found.mesh, plan=other)


def test_what_a_framework_takes_apart_is_refused_with_the_way_out():
    f, arguments = fresh()
    found = searched()
    for use in (lambda: found.in_shardings, lambda: found.named(found.mesh.user_jax_mesh)):
        with pytest.raises(gshard.ArgumentError, match=r"takes its arguments apart(.|\n)*gshard\.instead_of_jit\(mesh"):
            use()
    assert found.marks.marks
    assert "in_shardings" not in str(found.marks)


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


def train(place):
    model = WithStatistics(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)
    if place:  # FSDP: weights and moments of Adam are split where they divide
        state = nnx.state((model, optimizer))
        placed = jax.tree.map(lambda x: jax.device_put(x, SPLIT) if np.ndim(x) and x.shape[0] % 8 == 0 else x, state)
        nnx.update((model, optimizer), placed)
    x = jax.device_put(X, SPLIT) if place else X
    return [float(jitted_nnx_step(model, optimizer, x)) for _ in range(3)], model.first.kernel[...]


def test_three_steps():
    """The losses are those of one device; outside of the block it trains as ever."""
    expected, _ = train(False)
    with gshard.instead_of_jit(mesh=MESH):
        found, weight = train(True)
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert len(weight.sharding.device_set) == 8
    assert weight.sharding.spec == P("data")
    after, weight = train(False)
    assert after == expected
    assert len(weight.sharding.device_set) == 1


def test_a_step_of_equinox():
    model = eqx.nn.MLP(32, 32, 64, 1, key=jax.random.key(0))
    step = eqx.filter_jit(eqx_step, donate="all-except-first")
    expected = jnp.mean((jax.vmap(model)(X) - X) ** 2)
    with gshard.instead_of_jit(mesh=MESH):
        lowered = step.lower(model, OPTIMIZER.init(eqx.filter(model, eqx.is_array)), jax.device_put(X, SPLIT), "train")
        assert isinstance(lowered.lowered, gshard.stages.Lowered)
        for f in (lowered.compile(), step):
            made = OPTIMIZER.init(eqx.filter(model, eqx.is_array))
            changed, _, loss, kind = f(model, made, jax.device_put(X, SPLIT), "train")
            assert (kind, changed.activation) == ("train", model.activation)
            np.testing.assert_allclose(loss, expected, rtol=1e-5)
