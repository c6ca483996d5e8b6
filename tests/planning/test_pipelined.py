"""Pipelines of stacked and of separate layers: numbers, turns, what devices send and hold, refusals."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import gshard
from checked_calls import near_largest
from gshard.core.mark import Schedule
from gshard.core.mesh import Mesh
from gshard.planning.pipelined import pipelined
from gshard.planning.settled import settled
from gshard.testing import assert_proved
from placed import mesh_of

RNG = np.random.default_rng(3)
ROWS, LENGTH, UNITS = 24, 3, 6


def normal(*shape):
    return (RNG.standard_normal(shape) / 3).astype(np.float32)


def weights(layers):
    return {"a": normal(layers, UNITS, 10), "b": normal(layers, 10, UNITS), "g": normal(layers, UNITS) + 1}


def block(x, w):
    x = x - x.mean(1, keepdims=True) * w["g"]
    h = jnp.tanh(x.reshape(-1, UNITS) @ w["a"])  # rows and positions are one dimension
    return x + (h @ w["b"]).reshape(x.shape)


def plain(x, w):
    return block(x, w), None


X, SHARED, MASK = normal(ROWS, LENGTH, UNITS), normal(UNITS), RNG.random((ROWS, LENGTH)) < 0.7
W = weights(8)


def of_plain(w):
    return jax.lax.scan(plain, X, w)[0]


def of_remat(w):
    return jax.lax.scan(jax.checkpoint(plain), X, w)[0]


def of_carried(w):
    """A sum over the batch, one that each layer scales, and a number that does not depend on the batch."""

    def layer(carry, w):
        x, aux, scaled, i = carry
        x = block(x, w) * SHARED
        return (x, aux + (x**2).mean(), 0.5 * scaled + x.sum(), i + 1), ((x**2).sum(), x[:, 0], w["g"] * 2)

    (x, aux, scaled, i), (sums, rows, doubled) = jax.lax.scan(layer, (X, 0.3, 0.1, 2), w)
    return x * aux + scaled + i, sums.sum() + (rows**2).sum() + doubled.sum()


def of_masked(w):
    offsets = jnp.cumsum(jnp.ones((8, ROWS, UNITS)) * X[:, 0] / 8, 0)
    masked = lambda x, w: (jnp.where(MASK[..., None], block(x, w[0]), x) + w[1][:, None], None)  # noqa: E731
    return jax.lax.scan(jax.checkpoint(masked), X, (w, offsets))[0]


def of_dropped(w):
    """Random bits, which depend on positions in the batch."""

    def layer(x, w):
        w, key = w
        return jnp.where(jax.random.bernoulli(key, 0.8, x.shape), block(x, w), x), None

    return jax.lax.scan(jax.checkpoint(layer), X, (w, jax.random.split(jax.random.key(1), 8)))[0]


def of_keys(w):
    """A key for each row, which a layer splits, and a mask that a running sum over rows makes."""

    def layer(x, w):
        w, key, mask = w
        keys = jax.random.split(key, ROWS)
        kept = jax.vmap(lambda key, x: jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x, 0))(keys, block(x, w))
        return jnp.where((jnp.cumsum(mask) % 3 > 0)[:, None, None], kept, x), None

    keys, masks = jax.random.split(jax.random.key(1), 8), jnp.stack([jnp.roll(MASK[:, 0], i) for i in range(8)])
    return jax.lax.scan(jax.checkpoint(layer), X, (w, keys, masks))[0]


def of_narrow(w):
    narrow = lambda x: jax.tree.map(lambda a: a.astype(jnp.bfloat16), x)  # noqa: E731
    return jax.lax.scan(plain, narrow(X), narrow(w))[0].astype(jnp.float32)


def of_second(w):
    layer = lambda x, w: (jnp.tanh(jnp.cumsum(x, 0) @ w["a"] @ w["b"]) + x, None)  # noqa: E731
    return jax.lax.scan(layer, X.swapaxes(0, 1), w)[0]


def of_chunks(w):
    def layer(carry, w):
        x, y = carry
        y = jax.lax.scan(lambda c, t: (0.5 * c + t, c * t), y, jnp.moveaxis(x, 1, 0))[0]
        return (block(x, w) + y[:, None], jnp.tanh(y)), None

    return jax.lax.scan(layer, (X, X[:, 0]), w)[0]


PROGRAMS = {f.__name__.removeprefix("of_"): f for f in (
    of_plain, of_remat, of_carried, of_masked, of_dropped, of_narrow, of_second, of_chunks
)}  # fmt: skip
OTHER = weights(8)
KINDS = "stacked", "separate"


def apart(w):
    return [jax.tree.map(lambda a, i=i: a[i], w) for i in range(8)]


def stacked(layers):
    return jax.tree.map(lambda *w: jnp.stack(w), *layers)


def of_kind(kind, w):
    return w if kind == "stacked" else apart(w)


def loss_of(program, mark=lambda w: w):
    def loss(w):
        return sum((x**2).mean() if x.ndim else x for x in jax.tree.leaves(program(mark(w))))

    return jax.value_and_grad(loss)


def marked(over="stage", stack=False, **arguments):
    return lambda w: gshard.pipeline(stacked(w) if stack else w, over, **arguments)


def check(function, *arguments, pipelines=2, **axes):
    """Proves that a program with pipelines, so many of them, is the program."""
    step = gshard.jit(function, mesh=Mesh.abstract(**axes))
    assert len(step.lower(*arguments).plan.program.pipelines) == pipelines
    assert_proved(step, arguments)
    return gshard.explain(step, *arguments)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_are_those_of_the_loop(name, kind, rounds):
    function = loss_of(PROGRAMS[name], marked(micro_batches=6, rounds=rounds, stack=kind == "separate"))
    check(function, of_kind(kind, W), stage=4, other=2)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", KINDS)
def test_two_towers(kind):
    """Encoder and decoder: the layers of the second loop read the result of the first one."""

    def towers(encoder, decoder):
        mark = marked(micro_batches=4, stack=kind == "separate")
        x = jax.lax.scan(plain, X, mark(encoder))[0]
        y = jax.lax.scan(lambda y, w: (block(y, w) + jnp.cos(x), None), X[::-1], mark(decoder))[0]
        return (x**2).mean() + (y**2).mean()

    w = of_kind(kind, W), of_kind(kind, OTHER)
    check(jax.value_and_grad(towers, (0, 1)), *w, pipelines=4, stage=4, other=2)


def test_layers_that_are_constants():
    """No derivative is by the weights of the layers, which are not arguments."""

    def loss(first):
        w = gshard.pipeline(stacked(apart(W)), "stage", micro_batches=4)
        return (jax.lax.scan(jax.checkpoint(plain), X * first, w)[0] ** 2).mean()

    check(jax.value_and_grad(loss), SHARED, stage=4, other=2)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("over", "axes", "micro_batches", "rounds"), [
    ("stage", {"stage": 2, "other": 4}, 1, 1), ("stage", {"stage": 2, "other": 4}, 3, 4),
    ("stage", {"stage": 8}, 8, 1), ("stage", {"stage": 8}, 24, 1),
    ("stage", {"stage": 4, "other": 2}, 2, 1), ("stage", {"stage": 4, "other": 2}, 4, 2),
    ("stage", {"stage": 2, "other": 4}, 2, 4),
    (4, {"stage": 2, "data": 2, "model": 2}, 4, 1), (("stage", "data"), {"stage": 2, "data": 2, "model": 2}, 4, 1),
])  # fmt: skip
def test_numbers_of_other_schedules(over, axes, micro_batches, rounds):
    check(loss_of(of_carried, marked(over, micro_batches=micro_batches, rounds=rounds)), W, **axes)


def beside(w, x):
    w = {
        "a": gshard.shard(w["a"], P("stage", None, "model")),
        "b": gshard.shard(w["b"], P("stage", "model")),
        "g": gshard.split(w["g"], 0, "stage"),
    }
    w = gshard.pipeline(w, "stage", micro_batches=3)
    return (jax.lax.scan(jax.checkpoint(plain), gshard.split(x, 0, "data"), w)[0] ** 2).mean()


def test_beside_data_and_tensor_parallelism():
    found = check(jax.value_and_grad(beside), W, X, stage=2, data=2, model=2)
    over = {(c.kind, c.atoms) for c in found.spmd.collectives}
    assert ("collective_permute", ("stage",)) in over
    assert not any(kind == "all_gather" for kind, _ in over)


def together(results):
    is_list = lambda x: isinstance(x, list)  # noqa: E731
    return jax.tree.map(lambda x: stacked(x) if is_list(x) else x, results, is_leaf=is_list)


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_step_keeps_its_state(kind):
    optimizer = optax.adamw(1e-2)

    def step(w, state, x, mark=lambda w: w):
        value, gradient = jax.value_and_grad(
            lambda w: (jax.lax.scan(jax.checkpoint(plain), x, mark(w))[0] ** 2).mean()
        )(w)
        updates, state = optimizer.update(gradient, state, w)
        return optax.apply_updates(w, updates), state, value

    w = of_kind(kind, W)
    mark = marked(micro_batches=4, stack=kind == "separate")
    run = gshard.jit(functools.partial(step, mark=mark), mesh=mesh_of(stage=4, data=2))
    want, got = (W, optimizer.init(W)), (w, optimizer.init(w))
    for _ in range(3):
        *want, value = jax.jit(step)(*want, X)
        *got, other = run(*got, X)
        near_largest(together((*got, other)), together((*want, value)), 2e-5)
    for x in jax.tree.leaves(got[0]) if kind == "stacked" else ():
        assert x.sharding.spec[0] == "stage"


def test_arguments_of_explicit_axes():
    function = loss_of(of_remat, marked(micro_batches=4))
    run, want = gshard.jit(function, mesh=mesh_of(stage=8, explicit=True)), jax.jit(loss_of(of_remat))(W)
    first = run(W)
    placed = jax.tree.map(lambda g, w: jax.device_put(w, g.sharding), first[1], W)
    for got in (first, run(placed), jax.jit(function)(placed)):
        near_largest(got, want, 2e-5)


def test_outside_of_a_mesh_the_mark_is_the_identity():
    assert_proved(loss_of(of_plain, marked(micro_batches=5, rounds=3)), (W,), like=loss_of(of_plain))
    check(loss_of(of_plain, marked(micro_batches=5)), W, pipelines=0, stage=1, data=8)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("micro_batches", [4, 8])
def test_turns_permutes_and_bytes(stages, micro_batches):
    """One permutation each turn, of one micro-batch; each stage has its part of the weights."""
    function = loss_of(of_remat, marked(micro_batches=micro_batches))
    found = gshard.explain(function, W, mesh=Mesh.abstract(stage=stages))
    turns = Schedule("stage", micro_batches).turns(stages)
    assert turns == micro_batches + stages - 1
    permutes = [c for c in found.spmd.collectives if c.kind == "collective_permute"]
    assert sum(c.times for c in permutes) == 2 * turns  # forward and backward
    assert {c.bytes for c in permutes} == {X.nbytes // micro_batches}
    loops = [e for e in found.plan.program.block.walk() if e.name == "scan" and e.trip_count == turns]
    assert len(loops) == 2
    assert all(row.local_bytes * stages == row.bytes for row in found.tensors if row.name.startswith("w["))
    text = f"{turns} turns, bubble {stages - 1}/{turns} = {(stages - 1) / turns:.1%}"
    assert all(text in line for line in found.plan.program.pipelines)
    assert text in found.format(tensors=0)


def in_rounds(w):
    w = gshard.split(w, 1, "stage")
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), w)
    return of_remat(gshard.pipeline(flat, "stage", micro_batches=4, rounds=2))


def test_stacks_in_rounds_stay_where_they_are():
    w = jax.tree.map(lambda x: x.reshape(2, 4, *x.shape[1:]), W)
    found = check(jax.value_and_grad(lambda w: (in_rounds(w) ** 2).mean()), w, stage=4)
    assert found.bytes_by_kind["collective_permute"] > 0
    assert not any(c.shape.endswith(("6,10]", "10,6]")) for c in found.spmd.collectives)  # weights and their gradients
    assert all(row.local_bytes * 4 == row.bytes for row in found.tensors if row.name.startswith("w["))


def of_separate(layers, rounds, x):
    stack = gshard.pipeline(stacked(layers), "stage", micro_batches=4, rounds=rounds)
    return (jax.lax.scan(jax.checkpoint(lambda x, w: (jnp.tanh(x @ w["a"]) @ w["b"], None)), x, stack)[0] ** 2).mean()


@pytest.mark.parametrize("rounds", [1, 2])
def test_separate_layers_move_once_each_way(rounds):
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    layers = [{"a": shape((512, 1024)), "b": shape((1024, 512))}] * 8
    found = gshard.explain(
        jax.jit(lambda w, x: jax.value_and_grad(of_separate)(w, rounds, x), donate_argnums=0),
        layers, shape((64, 512)), mesh=Mesh.abstract(stage=4),
    )  # fmt: skip
    moved = [c for c in found.spmd.collectives if c.shape.endswith(("1024,512]", "512,1024]", "256,512]", "128,1024]"))]
    whole = 8 * 2 * 512 * 1024 * 2
    assert {(c.kind, c.shape[:4]) for c in moved} == {("all_to_all", "bf16")}
    assert sum(c.total_bytes for c in moved) == 2 * 3 / 4 * whole / 4  # a quarter of it is at home already
    assert all(row.local_bytes * 4 == row.bytes for row in found.tensors if row.name.startswith("w["))


LIBRARIES = {
    "equinox": ([eqx.nn.Linear(UNITS, UNITS, key=key) for key in jax.random.split(jax.random.key(0), 8)], jax.vmap),
    "flax": (nnx.List([nnx.Linear(UNITS, UNITS, rngs=nnx.Rngs(i)) for i in range(8)]), lambda own: own),
}


@pytest.mark.parametrize("library", LIBRARIES)
def test_layers_of_libraries(library):
    layers, called = LIBRARIES[library]

    def loss(model):
        layers, first = model
        stack = gshard.pipeline(stacked(layers), "stage", micro_batches=6)
        x = X[:, 0] @ first
        return (jax.lax.scan(lambda x, own: (x + jnp.tanh(called(own)(x)), None), x, stack)[0] ** 2).mean()

    check(jax.value_and_grad(loss), (layers, normal(UNITS, UNITS)), stage=4, b=2)


def test_under_vmap_also_of_weights():
    """The dimension that vmap adds is no batch if micro-batches do not divide it, and layers are no first dimension."""
    loss = lambda w, x: (jax.lax.scan(plain, x, gshard.pipeline(w, "stage", micro_batches=4))[0] ** 2).mean()  # noqa: E731
    function = jax.vmap(jax.vmap(jax.value_and_grad(loss), (None, 0)), (0, None))
    w = jax.tree.map(lambda v: np.stack([v, 0.5 * v, -v]), W)
    x = np.stack([X, X[::-1]])
    found = check(function, w, x, stage=4, other=2)
    assert all("4 micro-batches of 6 rows" in text for text in found.plan.program.pipelines)


def test_inside_a_loop_over_batches():
    def accumulated(w, x):
        loss = lambda w, x: (jax.lax.scan(plain, x, gshard.pipeline(w, "stage", micro_batches=4))[0] ** 2).mean()  # noqa: E731
        added = lambda total, x: (jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(w, x)), None)  # noqa: E731
        return jax.lax.scan(added, jax.tree.map(jnp.zeros_like, (0.0, w)), x)[0]

    check(accumulated, W, np.stack([X, 0.5 * X, X + 1]), stage=4, other=2)


def test_with_a_layout():
    def layer(x, w):
        h = gshard.name(jnp.tanh(x @ w["a"]), "batch length hidden")
        return x + h @ w["b"], None

    function = lambda w: jax.lax.scan(layer, X, gshard.pipeline(w, "stage", micro_batches=4))[0]  # noqa: E731
    mesh = mesh_of(stage=2, data=2, model=2)
    run = gshard.jit(function, mesh=mesh, layout=gshard.Layout(batch="data", hidden="model"))
    for _ in range(3):
        near_largest(run(W), jax.jit(function)(W), 2e-5)
    assert gshard.explain(run, W).plan.program.pipelines


def test_a_settled_program_is_a_fixed_point():
    mesh = Mesh.abstract(stage=4)
    program = gshard.stages.trace(loss_of(of_remat, marked(micro_batches=4)), W)
    once = settled(program, mesh).program
    assert settled(once, mesh).program is once
    assert pipelined(once, mesh) is once
    assert settled(program, mesh).program.block is once.block
    other = Mesh.abstract(data=4)
    with pytest.raises(gshard.ShardingError, match="no axis 'stage'"):
        settled(program, other)


def test_loops_that_only_add_are_no_pipelines():
    def norms(w):
        w = gshard.pipeline(w, "stage", micro_batches=4)
        return jax.lax.scan(lambda total, w: (total + (w["a"] ** 2).sum(), w["a"].max()), 0.0, w)

    check(norms, W, pipelines=0, stage=4, other=2)


def test_a_stack_that_no_loop_scans_is_refused():
    def f(w):
        w = gshard.pipeline(w, "stage", micro_batches=4)
        return jax.lax.scan(plain, X, jax.tree.map(lambda a: a[::-1][:4] * 2, w))[0]

    with pytest.raises(gshard.ShardingError, match="no loop scans over the stack") as error:
        gshard.explain(f, W, mesh=Mesh.abstract(stage=4))
    assert "test_pipelined.py:" in str(error.value)


def normalised(x, w):
    x = x / jnp.sqrt((x**2).mean() + 1)
    return x + jnp.tanh(x @ w["a"]) @ w["b"], None


def test_keys_that_a_layer_makes_for_each_row_are_refused():
    with pytest.raises(gshard.ShardingError, match="random_split in a layer mixes the rows") as error:
        gshard.explain(lambda w: of_keys(gshard.pipeline(w, "stage", micro_batches=6)), W, mesh=Mesh.abstract(stage=4))
    assert "of_keys" in error.value.where


@pytest.mark.parametrize(
    ("layer", "arguments", "message"),
    [
        (normalised, {"micro_batches": 4}, r"(?s)mixes the rows of the batch.*\(normalised\)"),
        (plain, {"micro_batches": 5}, "a batch of 24 rows cannot be cut into 5 micro-batches"),
        (plain, {"micro_batches": 4, "rounds": 3}, "a loop over 8 layers cannot be cut into 12 equal parts"),
        (plain, {"micro_batches": 2, "rounds": 2}, "2 micro-batches cannot pass 4 stages in several rounds"),
    ],
)
def test_refusals_name_the_line(layer, arguments, message):
    def f(w):
        return jax.lax.scan(layer, X, gshard.pipeline(w, "stage", **arguments))[0]

    with pytest.raises(gshard.ShardingError, match=message) as error:
        gshard.explain(f, W, mesh=Mesh.abstract(stage=4))
    assert "test_pipelined.py:" in str(error.value)
    assert "pipeline(x, 'stage'" in str(error.value)
    assert error.value.hint


@pytest.mark.parametrize(
    ("x", "arguments", "message"),
    [
        (W, {"micro_batches": 0}, "micro_batches is a positive integer"),
        (W, {"micro_batches": True}, "micro_batches is a positive integer"),
        (W, {"micro_batches": 2, "rounds": 1.5}, "rounds is a positive integer"),
        ({"a": X, "b": W["a"]}, {"micro_batches": 2}, "one dimension of layers"),
        (1.0, {"micro_batches": 2}, "one dimension of layers"),
        (apart(W), {"micro_batches": 2}, "Stack separate layers"),
    ],
)
def test_wrong_marks(x, arguments, message):
    with pytest.raises(gshard.ShardingError, match=message):
        gshard.pipeline(x, "stage", **arguments)
