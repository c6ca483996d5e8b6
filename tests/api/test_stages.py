"""Traced, Lowered and Compiled have all that JAX's have; compiled programs are saved and loaded; jax.export."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental import serialize_executable
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gshard
from checked_calls import near

MESH = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
W = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)


def f(x, tree):
    return {"y": gshard.split(x, 0, "a") @ tree["w"], "sum": x.sum()}


def both(how):
    """What JAX gives, and what gshard gives."""
    return how(jax.jit(f, donate_argnums=0)), how(gshard.jit(f, mesh=MESH, donate_argnums=0))


STAGES = {
    "Wrapped": lambda jitted: jitted,
    "Traced": lambda jitted: jitted.trace(W, {"w": W}),
    "Lowered": lambda jitted: jitted.lower(W, {"w": W}),
    "Compiled": lambda jitted: jitted.lower(W, {"w": W}).compile(),
}


@pytest.mark.parametrize("stage", STAGES)
def test_all_public_attributes_are_there(stage):
    """Each attribute of JAX's is there and of an equal kind: callable, or with equal structure and types of leaves."""
    theirs, ours = both(STAGES[stage])
    public = {name for name in dir(theirs) if not name.startswith("_")}
    assert public >= {name for name in dir(getattr(jax.stages, stage)) if not name.startswith("_")} - {"call"}
    for name in sorted(public):
        expected, found = getattr(theirs, name), getattr(ours, name)
        assert callable(found) == callable(expected), name
        if callable(expected) or name in ("jaxpr", "lojax", "effects"):
            continue
        kinds = [[type(x) for x in jax.tree.leaves(t)] for t in (expected, found)]
        if "sharding" not in name:
            assert kinds[0] == kinds[1], name
        assert jax.tree.structure(found) == jax.tree.structure(expected), name
        if name in ("args_info", "donate_argnums", "fun_name", "in_tree", "out_tree"):
            assert found == expected, name
        if name in ("in_avals", "out_avals", "out_info"):
            shapes = [[(x.shape, x.dtype) for x in jax.tree.leaves(t)] for t in (expected, found)]
            assert shapes[0] == shapes[1], name


@pytest.mark.parametrize(
    "spec, memory", [(P(None, "a"), None), (P("b", "a"), None), (P(), "pinned_host"), (None, None)]
)
def test_shapes_have_the_shardings_that_are_given(spec, memory):
    """Before anything is planned, so that checkpoints are restored to where results are; a spec is as good."""
    on = None if spec is None else NamedSharding(MESH, spec, memory_kind=memory)
    given = {"y": on, "sum": None}
    expected = jax.jit(f, out_shardings=given)
    runs = [gshard.jit(f, mesh=MESH, out_shardings=given), gshard.jit(expected)]
    if on is None:
        runs = [gshard.jit(f, mesh=MESH), gshard.jit(f)]
    elif memory is None:
        runs.append(gshard.jit(f, mesh=MESH, out_shardings={"y": spec, "sum": None}))
    for run in runs:
        for found in (run.eval_shape(W, {"w": W}), run.trace(W, {"w": W}).out_info):
            assert found == expected.eval_shape(W, {"w": W})
            assert on is None or found["y"].sharding == run.lower(W, {"w": W}).out_info["y"].sharding


def test_methods_of_stages():
    theirs, ours = both(STAGES["Lowered"])
    for options in ({}, {"debug_info": True}, {"dialect": "hlo"}, {"dialect": "stablehlo", "debug_info": True}):
        for lowered in (theirs, ours):
            text = lowered.as_text(**options)
            assert ("test_stages.py" in text) == bool(options.get("debug_info"))
    assert type(ours.compiler_ir("stablehlo")) is type(theirs.compiler_ir("stablehlo"))
    with pytest.raises(gshard.ArgumentError, match="no device_assignment"):
        ours.compile(device_assignment=tuple(jax.devices()))
    compiled = ours.compile()
    formats = jax.tree.leaves(compiled.input_formats)
    assert [x.sharding for x in formats] == jax.tree.leaves(compiled.input_shardings)
    assert [x.sharding for x in jax.tree.leaves(compiled.output_formats)] == jax.tree.leaves(compiled.output_shardings)
    np.testing.assert_allclose(compiled.call(W, {"w": W})["y"], W @ W, atol=1e-5)
    traced = gshard.jit(f, mesh=MESH).trace(W, {"w": W})
    np.testing.assert_allclose(traced(W, {"w": W})["y"], W @ W, atol=1e-5)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = traced.nothing


KEY = jax.random.key(3)
SAVED = {
    "donated": (lambda x, y: (gshard.split(x, 0, "a") * 2 + y, y.sum()), {"donate_argnums": 0}),
    "captured": (lambda x, y: (gshard.split(x, 0, "a") @ jnp.asarray(W) + y, y), {"donate_argnums": 0}),
    "captured key": (lambda x, y: (gshard.split(x, 0, "a") + jax.random.normal(KEY, x.shape), y), {}),
    "order of devices": (lambda x, y: (gshard.shard(x, P(("b", "a"))) * 2 + y, y), {}),
}


@pytest.mark.parametrize("name", SAVED)
def test_saved_and_loaded(name):
    """Three calls of a loaded program, the second and third with what the one before returned."""
    g, options = SAVED[name]
    y = np.arange(8.0, dtype=np.float32)
    compiled = gshard.jit(g, mesh=MESH, **options).lower(jnp.asarray(W), y).compile()
    saved = pickle.loads(pickle.dumps(serialize_executable.serialize(compiled)))
    loaded = serialize_executable.deserialize_and_load(*saved)
    assert isinstance(loaded, jax.stages.Compiled)
    x, expected = jnp.asarray(W), jnp.asarray(W)
    for _ in range(3):
        found, wanted = loaded(x, y), jax.jit(g)(expected, y)
        near(found, wanted, 1e-4)
        x, expected = found[0], wanted[0]
        if x.sharding != loaded.input_shardings[0][0]:
            x = np.asarray(x)


@pytest.mark.parametrize(("what", "g", "options", "argument"), [
    ("back to Python", lambda x: jax.pure_callback(np.sin, x, x), {}, np.arange(8.0, dtype=np.float32)),
])  # fmt: skip
def test_what_cannot_be_saved(what, g, options, argument):
    compiled = gshard.jit(g, mesh=MESH, **options).lower(argument).compile()
    with pytest.raises(gshard.ArgumentError, match=rf"(?s){what}.*test_stages.py"):
        serialize_executable.serialize(compiled)


def test_export():
    """Exported for here and for another platform, with shardings, static arguments and a gradient."""
    placed = jax.device_put(W, NamedSharding(MESH, P("a")))
    step = gshard.jit(lambda x, w, n: (jnp.tanh(gshard.split(x, 0, "a") @ w) * n).sum(), mesh=MESH, static_argnums=2)
    shape = jax.ShapeDtypeStruct((8, 8), np.float32, sharding=NamedSharding(MESH, P("a")))
    exported = export.export(step)(shape, shape, 3)
    assert exported.nr_devices == 8
    assert exported.has_vjp()
    for _ in range(3):
        np.testing.assert_allclose(exported.call(placed, placed), 3 * np.tanh(W @ W).sum(), rtol=1e-5)
    found = jax.grad(exported.call)(placed, placed)
    np.testing.assert_allclose(found, jax.grad(lambda x: 3 * jnp.tanh(x @ W).sum())(W), rtol=1e-4, atol=1e-5)
    elsewhere = export.export(step, platforms=["tpu"])(shape, shape, 3)
    assert elsewhere.platforms == ("tpu",)
    assert "manual_computation" in elsewhere.mlir_module()


def test_export_of_a_part_of_an_axis():
    """A result that could be cut over a part of an axis leaves whole: a caller's mesh has no name for the part."""
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
    x = np.arange(24.0, dtype=np.float32).reshape(12, 2)
    exported = export.export(gshard.jit(lambda x: gshard.split(x, 0, "a") * 2, mesh=mesh))(x)
    np.testing.assert_array_equal(exported.call(jax.device_put(x, NamedSharding(mesh, P()))), 2 * x)


def test_symbolic_sizes_are_refused():
    (size,) = export.symbolic_shape("n")
    jitted = gshard.jit(f, mesh=MESH)
    with pytest.raises(gshard.ArgumentError, match=r"tree\['w'\] has a symbolic dimension"):
        export.export(jitted)(W, {"w": jax.ShapeDtypeStruct((8, size), np.float32)})


def test_functions_stay_in_their_process():
    jitted = gshard.jit(f, mesh=MESH)
    with pytest.raises(gshard.ArgumentError, match="cannot be pickled") as refused:
        pickle.dumps({"step": jitted})
    assert isinstance(refused.value, TypeError)
    assert copy.copy(jitted) is jitted
    assert copy.deepcopy([jitted])[0] is jitted
