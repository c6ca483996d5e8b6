"""A partitioned function under JAX's own transformations computes what the function itself does under them."""

import contextlib
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import checkpoint_policies
from jax._src.ad_checkpoint import saved_residuals
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import jet
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gshard
from gshard.xla.hlo_collectives import collectives
from placed import mesh_of, three_calls


def loss(w, x):
    x = gshard.split(x, 0, 8)
    h = jnp.tanh(x @ w["a"])
    return jnp.mean((h @ w["b"]) ** 2)


@pytest.fixture
def arguments(rng):
    w = {"a": rng.standard_normal((12, 16), np.float32), "b": rng.standard_normal((16, 5), np.float32)}
    return w, rng.standard_normal((24, 12), np.float32), rng.standard_normal((3, 24, 12), np.float32)


def test_a_series_is_taken_inside(arguments):
    w, x, xs = arguments
    series = lambda f, v: jet.jet(f, (v,), [list(xs[:2])])  # noqa: E731
    with pytest.raises(KeyError, match="gshard_call"):  # JAX has no rule for it
        series(gshard.jit(lambda v: loss(w, v), mesh=8), x)
    got = gshard.jit(lambda v: series(lambda u: loss(w, u), v), mesh=8)(x)
    want = series(lambda v: loss(w, v), x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=3e-5, atol=3e-5), got, want)


def test_a_derivative_is_planned_once(arguments):
    w, x, _ = arguments
    traced = 0

    def counted(w, x):
        nonlocal traced
        traced += 1
        return loss(w, x)

    gradient = jax.grad(gshard.jit(counted, mesh=8))
    gradient(w, x)
    gradient(w, x)
    assert traced == 1


def test_marks_of_results_and_arguments_hold_inside(arguments):
    _, x, _ = arguments
    spec = jax.sharding.PartitionSpec("devices")
    doubled = gshard.jit(lambda v: v * 2, mesh=8, in_shardings=(spec,), out_shardings=spec)
    out = jax.jit(doubled)(x)
    np.testing.assert_array_equal(out, 2 * x)
    assert out.sharding.shard_shape(out.shape) == (3, 12)


POLICIES = {
    "names": checkpoint_policies.save_only_these_names("h"),
    "offload": checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=(), names_which_can_be_offloaded=("h",), offload_src="device",
        offload_dst="pinned_host"
    ),
    "products": checkpoint_policies.dots_saveable,
}  # fmt: skip


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_of_checkpoint_selects_values_inside(name, rng):
    w, x = rng.standard_normal((3, 16, 16), np.float32) / 8, rng.standard_normal((64, 16), np.float32)

    def layer(x, w):
        return jnp.sin(checkpoint_name(jnp.tanh(gshard.split(x, 0, 8) @ w), "h") @ w.T)

    def gradient(layer, **policy):
        body = jax.checkpoint(layer, **policy)
        return jax.grad(lambda w, x: jnp.sum(jax.lax.scan(lambda c, w: (body(c, w), None), x, w)[0] ** 2))

    partitioned, policy = gshard.jit(layer, mesh=8), POLICIES[name]
    shapes = [
        sorted(str(aval) for aval, _ in saved_residuals(jax.checkpoint(f, policy=policy), x, w[0]))
        for f in (partitioned, jax.jit(layer))
    ]
    assert shapes[0] == shapes[1]
    want = jax.jit(gradient(layer))(w, x)
    for run in (
        jax.jit(gradient(partitioned, policy=policy)),
        gshard.jit(gradient(partitioned, policy=policy), mesh=8),
    ):
        for got in three_calls(run, mesh_of(d=8), w, x):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    text = run.trace(w, x).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("annotate_device_placement") == (2 if name == "offload" else 0)


@pytest.mark.parametrize("wrapped", [lambda f: f, jax.jit, gshard.jit(mesh=8)])
def test_a_reducer_can_be_partitioned(wrapped):
    """XLA takes no region for all devices as a reducer: a call of scalars is as the function itself."""
    reducer = gshard.jit(lambda a, b: a + b, mesh=8)
    f = wrapped(lambda x: jax.lax.reduce(x, np.float32(0), reducer, (0,)))
    x = np.arange(64, dtype=np.float32)
    for got in three_calls(f, mesh_of(d=8), x):
        assert got == x.sum()


# A partitioned function inside ``jax.jit`` is planned for operands as they are split there.
X = np.random.default_rng(0).standard_normal((64, 16)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((16, 16)).astype(np.float32) / 4


def mean_square(x, w):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def stepped(f):
    def step(x, w):
        value, gradient = jax.value_and_grad(f, 1)(x, w)
        return w - gradient / 2, value

    return step


# At the top of a program, and in bodies that JAX lowers before the call of them.
PLACES = {
    "call": lambda f: f,
    "of what is computed": lambda f: lambda x, w: f(2 * x.reshape(1, *x.shape)[0] + 1, w.T),
    "grad": lambda f: jax.grad(f, 1),
    "scan": lambda f: lambda x, w: jax.lax.scan(lambda w, _: stepped(f)(x, w), w, None, length=2),
    "cond": lambda f: lambda x, w: jax.lax.cond(w[0, 0] < 9, f, lambda x, w: 0.0, x, w),
    "nested jit": lambda f: lambda x, w: jax.jit(lambda x, w: f(x, w) * 2)(x, w),
}
MESHES = {kind: jax.make_mesh((8,), ("d",), axis_types=(kind,)) for kind in (AxisType.Auto, AxisType.Explicit)}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("place", PLACES)
def test_placed_arguments_stay_split(place, kind):
    mesh, around = MESHES[kind], PLACES[place]
    x, w = jax.device_put(X, NamedSharding(mesh, P("d"))), jax.device_put(W, NamedSharding(mesh, P()))
    with jax.set_mesh(mesh) if kind is AxisType.Explicit else contextlib.nullcontext():
        ours, theirs = jax.jit(around(gshard.jit(mean_square, mesh=mesh))), jax.jit(around(mean_square))
        compiled, plain = ours.lower(x, w).compile(), theirs.lower(x, w).compile()
        assert not [c for c in collectives(compiled.as_text()) if c.kind != "all_reduce"]
        assert compiled.cost_analysis()["flops"] < 1.1 * plain.cost_analysis()["flops"]
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), ours(x, w), theirs(x, w))


def residual(x, w):
    for _ in range(40):
        x = jnp.tanh(x @ w) / 4 + x
    return x


def of_calls(x, w):
    layer = jax.jit(lambda x, w: (jnp.tanh(x @ w) + x, jnp.cos(x)))
    for _ in range(40):
        y, z = layer(x, w)
        x = y / 4 + z
    return x


@pytest.mark.parametrize("before", [residual, of_calls])
def test_operands_of_many_operations(before):
    """All operations before the call are read, each once, whatever the number of ways from an argument to the call."""
    mesh = MESHES[AxisType.Auto]
    partitioned = gshard.jit(mean_square, mesh=mesh)
    run = jax.jit(lambda x, w: partitioned(before(x, w), w))
    expected = jax.jit(lambda x, w: mean_square(before(x, w), w))(X, W)
    for spec, others in ((P("d"), False), (P(), False), (P("d"), False), (P(None, "d"), True)):
        x, w = jax.device_put(X, NamedSharding(mesh, spec)), jax.device_put(W, NamedSharding(mesh, P()))
        np.testing.assert_allclose(run(x, w), expected, rtol=1e-5)
        kinds = {c.kind for c in collectives(run.lower(x, w).compile().as_text())}
        assert others or kinds <= {"all_reduce"}
    np.testing.assert_allclose(run(X, W), expected, rtol=1e-5)


def test_equal_calls_are_planned_for_their_own_operands():
    mesh = MESHES[AxisType.Auto]
    double = gshard.jit(lambda x: x * 2, mesh=mesh)
    x, y = jax.device_put((X, X), (NamedSharding(mesh, P("d")), NamedSharding(mesh, P(None, "d"))))
    compiled = jax.jit(lambda x, y: (double(x), double(y))).lower(x, y).compile()
    assert not collectives(compiled.as_text())
    assert [s.spec for s in compiled.output_shardings] == [P("d"), P(None, "d")]


def test_random_keys_and_new_arrays_inside():
    """Where a key is an operand, what is split stays split; what comes of a key alone leaves as its marks say."""
    mesh = MESHES[AxisType.Auto]
    x = jax.device_put(X, NamedSharding(mesh, P("d")))
    key = jax.random.key(3)

    def dropped(x, key):
        first, second = jax.random.split(key)
        return x * jax.random.bernoulli(first, 0.5, x.shape), second

    def twice(f):
        return lambda x, key: f(*f(jnp.sin(x), key))

    run = jax.jit(twice(gshard.jit(dropped, mesh=mesh)))
    assert not collectives(run.lower(x, key).compile().as_text())
    (found, last), (expected, wanted) = run(x, key), jax.jit(twice(dropped))(X, key)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(jax.random.key_data(last), jax.random.key_data(wanted))
    init = gshard.jit(lambda key: gshard.split(jax.random.normal(key, (64, 8)), 0, "d"), mesh=mesh)
    for arguments in ((key,), (key, x), (key,)):
        made, *_ = jax.jit(lambda k, *xs: (init(jax.random.fold_in(k, 1)), *(x + 1 for x in xs)))(*arguments)
        assert made.sharding.shard_shape(made.shape) == (8, 8)


def test_a_program_planned_at_partitioning_can_be_serialized():
    mesh = MESHES[AxisType.Auto]
    x, w = jax.device_put(X, NamedSharding(mesh, P("d"))), jax.device_put(W, NamedSharding(mesh, P()))
    compiled = jax.jit(PLACES["nested jit"](gshard.jit(mean_square, mesh=mesh))).lower(x, w).compile()
    loaded = deserialize_and_load(*serialize(compiled))
    assert loaded(x, w) == compiled(x, w)


def test_where_operands_cannot_be_seen_the_log_is_told_and_strict_refuses(caplog):
    mesh = MESHES[AxisType.Auto]
    x, w = jax.device_put(X, NamedSharding(mesh, P("d"))), jax.device_put(W, NamedSharding(mesh, P()))
    around = PLACES["nested jit"]
    with caplog.at_level(logging.WARNING, logger="gshard"):
        exported = jax.export.export(jax.jit(around(gshard.jit(mean_square, mesh=mesh))))(x, w)
    assert "nothing says how its operands are split" in caplog.text
    assert "test_transformations.py" in caplog.text
    np.testing.assert_allclose(exported.call(x, w), 2 * mean_square(X, W), rtol=1e-5)
    strict = jax.jit(around(gshard.jit(mean_square, mesh=mesh, strict=True)))
    np.testing.assert_allclose(strict(x, w), 2 * mean_square(X, W), rtol=1e-5)
    with pytest.raises(gshard.ShardingError, match=r"(?s)nothing says.*at test_transformations.py.*in_shardings"):
        jax.export.export(strict)(x, w)


def test_an_error_at_xlas_partitioning_is_ours_with_the_users_line():
    """XLA asks for the program of a call in a body; what is refused then is no text in an error of XLA's."""
    mesh = MESHES[AxisType.Auto]
    inside = PLACES["nested jit"](gshard.jit(lambda x, w: jnp.mean(jnp.tanh(x @ x.T @ x @ w)), mesh=mesh, strict=100.0))
    run = jax.jit(lambda x, w: inside(x, w))
    for spec in (P("d"), P(None, "d"), P("d")):
        x, w = jax.device_put(X, NamedSharding(mesh, spec)), jax.device_put(W, NamedSharding(mesh, P()))
        with pytest.raises(gshard.PlanError, match="each device would send") as refused:
            run(x, w)
        assert refused.value.where.startswith("test_transformations.py:")
        assert refused.value.hint == "Change these marks, or allow more bytes."
        assert "custom_partitioner" not in str(refused.value)
