"""instead_of_jit: in the block jitted functions are partitioned, with the same results; outside nothing changes."""

import contextlib
import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental import checkify
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import gshard
from checked_calls import near
from placed import mesh_of

X = np.linspace(-1, 1, 12 * 8, dtype=np.float32).reshape(12, 8)
W = np.linspace(-2, 2, 8 * 8, dtype=np.float32).reshape(8, 8)


def is_partitioned(f, *args, **kwargs):
    return isinstance(f.lower(*args, **kwargs), gshard.stages.Lowered)


def layer(x, w):
    return jnp.tanh(gshard.split(x, 0, "a") @ w)


CASES = {
    "plain": jax.jit(layer),
    "pytree": jax.jit(lambda x, w: {"y": (layer(x, w), x.sum()), "none": None}),
    "captured": jax.jit(lambda x, w: layer(x, jnp.asarray(W)) + jnp.arange(8.0)),
    "unread": jax.jit(lambda x, w: layer(x, jnp.ones((8, 8)))),
    "scan": jax.jit(lambda x, w: jax.lax.scan(lambda c, _: (layer(c, w), c.sum()), x, None, length=3)),
    "grad outside": lambda x, w: jax.value_and_grad(lambda x, w: jax.jit(layer)(x, w).sum(), argnums=(0, 1))(x, w),
    "callback": jax.jit(lambda x, w: jax.pure_callback(np.sin, x, layer(x, w))),
    "static": jax.jit(lambda x, w, n: layer(x, w) * n, static_argnums=2),
}


def called(name, x, w):
    return CASES[name](x, w, 3) if name == "static" else CASES[name](x, w)


@pytest.mark.parametrize("name", CASES)
def test_before_in_and_after(name):
    """Arguments come from the host, from one device, and placed; a block is entered twice; each result is the same."""
    mesh = mesh_of(a=2, b=4)
    placed = tuple(jax.device_put(x, NamedSharding(mesh, P("b"))) for x in (X, W))
    calls = [(X, W), (jnp.asarray(X), jnp.asarray(W)), placed]
    plain = [called(name, *arguments) for arguments in calls]
    for _ in range(2):
        with gshard.instead_of_jit(mesh=mesh):
            inside = [called(name, *arguments) for arguments in (*calls, calls[0])]
        for found, expected in zip(inside, [*plain, plain[0]], strict=True):
            near(found, expected)
            assert all(len(x.sharding.device_set) == 8 for x in jax.tree.leaves(found))
        after = called(name, *calls[1])
        near(after, plain[1])
        assert all(len(x.sharding.device_set) == 1 for x in jax.tree.leaves(after))


@pytest.mark.parametrize("axes", [{"a": 2, "b": 4, "explicit": True}, {"a": 3}])
def test_meshes(axes):
    """With the mesh that is set or that is given, and sizes that do not divide."""
    mesh, f = mesh_of(**axes), jax.jit(lambda x, w: jnp.tanh(x @ w))
    x, expected = X[:7], np.tanh(X[:7] @ W)
    for given in (mesh, None):
        with jax.set_mesh(mesh) if given is None else contextlib.nullcontext(), gshard.instead_of_jit(given):
            for _ in range(3):
                near(f(x, W), expected)
            assert is_partitioned(f, x, W)


def test_calls_in_the_block_are_dispatched_without_python(monkeypatch):
    mesh, f = mesh_of(a=8), jax.jit(lambda x: 2 * x)
    x = jax.device_put(np.arange(8.0), NamedSharding(mesh, P("a")))
    with gshard.instead_of_jit(mesh=mesh):
        f(x)
        monkeypatch.setattr("gshard.api.instead_of_jit.Partitioner.run", None)
        near(f(x), 2 * np.arange(8.0))


def test_what_a_function_was_jitted_with_is_kept():
    mesh = mesh_of(a=2, b=4)

    def of(*spec):
        return NamedSharding(mesh, P(*spec))

    @functools.partial(jax.jit, donate_argnums=0, in_shardings=(of("b"), of()), out_shardings=(of("b"), None))
    def f(x, w):
        return x @ w, x.sum()

    with gshard.instead_of_jit(mesh=mesh):
        for _ in range(3):
            x = jax.device_put(X, of("b"))
            y, total = f(x, W)
            assert x.is_deleted()
            assert y.sharding.spec == P("b")
            near((y, total), (X @ W, X.sum()))
        with pytest.raises(RuntimeError, match=r"has overwritten|has been deleted"):
            f(x, W)
        x = jax.device_put(X, of("b"))
        lowered = f.lower(x, W)
        assert lowered.plan.program.names == ("x", "w")
        assert lowered.donate_argnums == (0,)
        near(lowered.compile()(x, W)[0], X @ W)
        same = jax.jit(lambda a, b: (a + b, a - b), donate_argnums=(0, 1))
        x = jax.device_put(X, of())
        with pytest.raises(RuntimeError, match="twice"):
            same(x, x)


def test_shardings_over_an_abstract_mesh():
    """They name no devices: results and arguments are split as on the mesh, also in shapes that are lowered."""
    mesh = mesh_of(a=2, b=4)
    rows, columns = (NamedSharding(mesh.abstract_mesh, P(*spec)) for spec in ("a", (None, "b")))
    f = jax.jit(lambda x: x * 2, in_shardings=rows, out_shardings=columns)
    with jax.set_mesh(mesh), gshard.instead_of_jit(mesh):
        for x in (X, jnp.asarray(X), jax.device_put(X, NamedSharding(mesh, P("a")))):
            near(f(x), 2 * X)
            assert f(x).sharding == NamedSharding(mesh, P(None, "b"))
        assert is_partitioned(f, jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=rows))


def test_a_function_that_is_lowered_first_is_compiled_once():
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(listener := lambda name, *_, **__: compiled.append(name))
    f, mesh = jax.jit(lambda x: {"y": (gshard.split(x, 0, "a"), x.sum())}), mesh_of(a=8)
    x = jax.device_put(np.arange(8.0), NamedSharding(mesh, P("a")))
    with gshard.instead_of_jit(mesh, memory_limit="1GiB"):
        lowered = f.lower(x)
        assert gshard.explain(lowered).total_bytes > 0
        assert "/jax/core/compile/backend_compile_duration" not in compiled
        near([lowered.compile()(x)] + [f(x) for _ in range(3)], [{"y": (np.arange(8.0), 28.0)}] * 4)
        with_options = lowered.compile({"xla_cpu_enable_fast_min_max": True})
        near(with_options(x)["y"][0], np.arange(8.0))
    jax.monitoring.unregister_event_duration_listener(listener)
    assert compiled.count("/jax/core/compile/backend_compile_duration") == 2


def test_left_to_jax():
    """JAX's own functions, and what says that it runs elsewhere."""
    mesh = mesh_of(a=3)  # devices 0, 1, 2
    elsewhere = jax.devices()[5]
    f = jax.jit(lambda x: x + 1)
    there = jax.jit(lambda x: x + 1, out_shardings=SingleDeviceSharding(elsewhere))
    with gshard.instead_of_jit(mesh=mesh):
        assert not is_partitioned(jnp.cumsum, X)
        assert not is_partitioned(jax.jit(jax.nn.softmax), X)
        assert not is_partitioned(jax.jit(jnp.sin), X)
        assert (jnp.ones(3) + 1).sharding.device_set == {jax.devices()[0]}
        assert f(jax.device_put(X, elsewhere)).sharding.device_set == {elsewhere}
        assert there(X).sharding.device_set == {elsewhere}
        assert len(f(X).sharding.device_set) == 3


def test_functions_that_jax_made_of_yours():
    """They are defined in a file of JAX's: a function around them is partitioned, they themselves are not."""

    def f(x):
        checkify.check((x > -9).all(), "too small")
        return jnp.tanh(x)

    made = checkify.checkify(f)
    for g, devices in ((made, 1), (lambda x: made(x), 8)):
        with gshard.instead_of_jit(mesh=8):
            error, found = jax.jit(g)(X)
        error.throw()
        near(found, np.tanh(X))
        assert len(found.sharding.device_set) == devices


def test_eager_operations_are_left_to_jax():
    x = jnp.asarray(X)
    with gshard.instead_of_jit(mesh=8):
        for found in (
            x @ x.T, x[1:3], x.at[0].set(1), jnp.where(x > 0, x, 0), jax.nn.softmax(x), jnp.einsum("ij,kj", x, x),
            jnp.linalg.norm(x), jax.random.normal(jax.random.key(0), (3,)), jax.vmap(jnp.sum)(x), jnp.sort(x),
            jax.lax.scan(lambda c, y: (c + y, y), 0.0, x[:, 0])[1], jax.nn.one_hot(jnp.arange(3), 3), x.mean(),
            jax.grad(lambda x: jnp.sum(jnp.where(x > 0, jnp.sin(x), jax.nn.relu(x))))(x), jnp.linspace(0, 1, 5),
            jax.lax.map(lambda x: x + 1, x),
        ):  # fmt: skip
            assert len(found.sharding.device_set) == 1


def test_no_mesh():
    with gshard.instead_of_jit(), pytest.raises(gshard.MeshError):
        jax.jit(lambda x: x + 1)(X)
    with pytest.raises(gshard.MeshError):
        gshard.instead_of_jit(mesh=1000)


def test_blocks_nest_and_end_with_errors():
    f, original = jax.jit(lambda x: x + 1), (jax._src.pjit._pjit_call_impl_python, jax.stages.Traced.lower)
    block = gshard.instead_of_jit(mesh=8)

    def devices():
        return len(f(X).sharding.device_set)

    @block
    def decorated():
        return devices()

    with block:
        assert devices() == 8
        with gshard.instead_of_jit(mesh=4):
            assert devices() == 4
            with block:
                assert devices() == decorated() == 8
            assert devices() == 4
        with pytest.raises(gshard.MeshError), gshard.instead_of_jit():
            devices()
        assert devices() == 8
    assert devices() == 1
    assert (jax._src.pjit._pjit_call_impl_python, jax.stages.Traced.lower) == original
    assert decorated() == 8
    assert devices() == 1


def test_a_block_holds_in_its_thread():
    f, found = jax.jit(lambda x: x * 3), {}
    inside, outside = threading.Event(), threading.Event()

    def other():
        with gshard.instead_of_jit(mesh=4):
            inside.set()
            assert outside.wait(60)
            found["in"] = len(f(X).sharding.device_set)

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(60)
    with gshard.instead_of_jit(mesh=8):
        found["here"] = len(f(X).sharding.device_set)
    found["out"] = len(f(X).sharding.device_set)
    outside.set()
    thread.join()
    assert found == {"in": 4, "here": 8, "out": 1}


def test_one_program_for_blocks_of_equal_options():
    traced = []

    @jax.jit
    def f(x):
        traced.append(1)
        return gshard.split(x, 0, 8) * 2

    mesh = mesh_of(a=8)
    x = jax.device_put(np.arange(8.0), NamedSharding(mesh, P("a")))
    for _ in range(3):
        with gshard.instead_of_jit(mesh=mesh):
            x = f(x)
    assert len(traced) == 1
    with gshard.instead_of_jit(mesh=mesh, strict=True):
        f(x)
    jax.clear_caches()
    with gshard.instead_of_jit(mesh=mesh):
        near(f(x), 16 * np.arange(8.0))


def test_a_partitioned_function_in_the_block():
    """A function from gshard.jit keeps its own mesh, and its program, in a block."""
    traced = []

    def f(x):
        traced.append(1)
        return gshard.split(x, 0, 4) + 1

    ours = gshard.jit(f, mesh=4)
    ours(X)
    assert len(traced) == 1
    with gshard.instead_of_jit(mesh=8):
        assert len(ours(X).sharding.device_set) == 4
        near(jax.jit(lambda x: gshard.jit(f, mesh=8)(x) * 2)(X), (X + 1) * 2)
        with jax.disable_jit():
            near(jax.jit(lambda x: x + 1)(X), X + 1)


def test_settings_of_jax():
    with gshard.instead_of_jit(mesh=8):
        with jax.debug_nans(True), pytest.raises(FloatingPointError):
            jax.jit(lambda x: jnp.log(gshard.split(x, 0, 8)))(-np.ones(8, np.float32))
        with jax.enable_x64(True):
            assert jax.jit(lambda x: gshard.split(x, 0, 8) * 2)(np.arange(8.0)).dtype == np.float64


def test_export_is_refused():
    """Where it is left to ``gshard.jit``, and does what it is asked outside of the block."""
    f = jax.jit(lambda x, w: jnp.tanh(gshard.split(x, 0, 8) @ w))
    with gshard.instead_of_jit(mesh=8), pytest.raises(gshard.ArgumentError, match=r"(?s)exported.*jax.export.export"):
        export.export(f, platforms=["tpu"])(X, W)
    assert "manual_computation" in export.export(gshard.jit(f, mesh=8))(X, W).mlir_module()
    assert export.export(f)(X, W).nr_devices == 1
