"""Shardings at the boundary: whatever the tree of arguments, each leaf gets the spec that ``jax.jit`` would give it."""

import collections
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gshard
from gshard.core.errors import ShardingError
from gshard.core.mesh import Mesh

AUTO = jax.sharding.AxisType.Auto
Pair = collections.namedtuple("Pair", "first second")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    """As modules of Equinox are: an absent bias is None, and what is no array is not a leaf."""

    w: Any
    b: Any
    name: str = dataclasses.field(default="layer", metadata={"static": True})


@pytest.fixture
def mesh():
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AUTO, AUTO))


A, B, C = (np.arange(16 * 8, dtype=np.float32).reshape(16, 8) * k for k in (1, -2, 3))
D, M = P("data"), P(None, "model")

# Specs for the arguments, and the arguments. None in the arguments has no leaf; in the specs it says nothing.
TREES = {
    "None before": (({"a": None, "b": D, "c": None},), ({"a": None, "b": A, "c": B},)),
    "spec on None": (({"a": M, "b": D, "c": M},), ({"a": None, "b": A, "c": B},)),
    "None for a subtree": ((D, None, M), ({"a": None, "b": A}, {"c": B, "d": C}, [C, None])),
    "spec for a subtree": ((D, M), ({"a": None, "b": [A, (None, B)]}, (None, C))),
    "one for all": (D, ({"a": None, "b": A}, None, B)),
    "None as argument": ((D, M), (None, A)),
    "None among arguments": ((None, D, None, M), (A, None, None, B)),
    "nested": ((((D, None), None), M), (((None, (None, A)), B), C)),
    "named tuple": ((Pair(D, Pair(None, M)),), (Pair(A, Pair(None, B)),)),
    "module": ((Layer(D, None), [Layer(M, D)]), (Layer(A, None), [Layer(B, C)])),
    "module without bias": ((Layer(None, M), Layer(M, None)), (Layer(A, None), Layer(B, C))),
    "empty": ((D, M, {}, M), ((), [], {}, A)),
}
MISFITS = {
    "None left out": (({"b": D},), ({"a": None, "b": A},), "children at key path in_shardings[0]"),
    "another key": (({"a": D},), ({"b": A},), "pytree of in_shardings does not match"),
    "not in a tuple": ({"b": D}, ({"b": A},), "in_shardings=(...,)"),
    "too many": ((D, D), (A,), "in_shardings has 2 entries, and the function has 1 argument"),
    "too few": ((D,), (A, B), "in_shardings has 1 entry, and the function has 2 arguments"),
    "deeper than the tree": (({"b": (D,)},), ({"b": A},), "different types at key path in_shardings[0]['b']"),
    "another kind inside": (({"l": [D]},), ({"l": (A,)},), "at key path in_shardings[0]['l']"),
    "specs below None": (({"a": {"b": D}},), ({"a": None},), "at key path in_shardings[0]['a']"),
    "other statics": ((Layer(D, D, "other"),), (Layer(A, B),), "in_shardings"),
    "rank": (({"w": P(None, None, "data")},), ({"w": A},), "in_shardings[0]['w']: f32[16,8]"),
    "no spec": (({"w": 3},), ({"w": A},), "in_shardings[0]['w']: 3"),
}


def named(specs, mesh):
    wrap = lambda s: NamedSharding(mesh, s) if isinstance(s, P) else s  # noqa: E731
    return jax.tree.map(wrap, specs, is_leaf=lambda s: isinstance(s, P))


def plus_one(*args):
    return jax.tree.map(lambda v: v + 1, args)


@pytest.mark.parametrize("case", TREES)
def test_in_shardings_fall_on_the_leaves_that_jax_gives_them(case, mesh):
    specs, args = TREES[case]
    compiled = jax.jit(plus_one, in_shardings=named(specs, mesh)).lower(*args).compile()
    theirs = [getattr(s, "spec", P()) for s in jax.tree.leaves(compiled.input_shardings[0])]
    ours = gshard.jit(plus_one, mesh=mesh, in_shardings=named(specs, mesh) if case == "nested" else specs).lower(*args)
    marks = ours.program.argument_marks
    shapes = [v.shape for v in ours.program.block.inputs]
    assert len(marks) == len(theirs) == len(shapes)
    for mark, spec, shape in zip(marks, theirs, shapes, strict=True):
        found = NamedSharding(mesh, P(*mark.spec) if mark is not None else P())
        assert found.is_equivalent_to(NamedSharding(mesh, spec), len(shape))
    for value, spec in zip(ours.program.block.inputs, theirs, strict=True):
        if spec != P():
            assert ours.mesh.spec_of(ours.plan.sharding(value).dims) == spec


@pytest.mark.parametrize("case", TREES)
def test_out_shardings_fall_on_the_leaves_that_jax_gives_them(case, mesh):
    specs, results = TREES[case]
    specs = tuple(specs) if isinstance(specs, list) else specs

    def f(zero):
        return jax.tree.map(lambda v: v + zero, results)

    theirs = jax.jit(f, out_shardings=named(specs, mesh))(np.float32(0))
    ours = gshard.jit(f, mesh=mesh, out_shardings=specs)(np.float32(0))
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.tobytes() == b.tobytes()
        if isinstance(b.sharding, NamedSharding) and b.sharding.spec != P():
            assert a.sharding.is_equivalent_to(b.sharding, a.ndim)


@pytest.mark.parametrize("case", MISFITS)
def test_what_is_no_prefix_is_refused_as_in_jax(case, mesh):
    specs, args, text = MISFITS[case]
    with pytest.raises((ValueError, TypeError)):
        jax.jit(plus_one, in_shardings=named(specs, mesh))(*args)
    with pytest.raises(ShardingError) as caught:
        gshard.jit(plus_one, mesh=mesh, in_shardings=specs)(*args)
    assert text in str(caught.value)
    assert caught.value.hint
    if not isinstance(specs, tuple):
        return
    with pytest.raises(ShardingError, match="out_shardings"):
        gshard.jit(lambda: plus_one(*args), mesh=mesh, out_shardings=specs)()


@pytest.mark.parametrize("typo", ["dota", P(None, "modle")], ids=str)
def test_a_name_that_is_no_axis_names_the_leaf(typo, mesh):
    with pytest.raises(ShardingError, match=r"at argument params\['w'\](.|\n)*Did you mean"):
        gshard.jit(lambda params: params["w"] + 1, mesh=mesh, in_shardings=({"w": typo},))({"w": A})
    with pytest.raises(ShardingError, match=r"out_shardings\['w'\]: array of shape \[16,8\](.|\n)*Did you mean"):
        gshard.jit(lambda x: {"w": x + 1}, mesh=mesh, out_shardings={"w": typo})(A)


def test_what_is_no_array_names_the_leaf(mesh):
    with pytest.raises(
        TypeError, match=r"returned a value of type <class 'str'> at output component \['l'\]\['name'\]"
    ):
        gshard.jit(lambda x: {"l": {"name": "text", "w": x}}, mesh=mesh, out_shardings=P())(A)


def test_marks_of_results_may_ask_for_equal_parts(mesh):
    spec = {"w": P("data", "model")}
    program = gshard.jit(lambda x: {"w": x}, mesh=mesh, out_shardings=spec).lower
    assert program(A).plan is not None
    with pytest.raises(ShardingError) as caught:
        _ = program(A[:13]).plan
    assert "dimension 0 of a result has 13 elements, which cannot leave in 4 equal parts" in caught.value.what
    assert caught.value.got is not None
    assert "out_shardings['w']" in caught.value.got
    assert caught.value.hint is not None
    assert "pad the array" in caught.value.hint
    assert Mesh.of(mesh).given is mesh


def test_a_result_that_does_not_divide_is_refused_as_jax_refuses_it(mesh, rng):
    x = rng.standard_normal((13, 8)).astype(np.float32)
    sharding = NamedSharding(mesh, P("data", "model"))
    with pytest.raises(ValueError, match="divi"):
        jax.jit(lambda x: x + 1, out_shardings=sharding)(x)
    for spec in (sharding, P("data", "model")):
        f = gshard.jit(lambda x: x + 1, mesh=mesh, out_shardings=spec)
        for run in (f, jax.jit(f), jax.grad(lambda x, f=f: f(x).sum())):
            with pytest.raises(ShardingError, match=r"13 elements(.|\n)*out_shardings(.|\n)*pad the array"):
                run(x)
    fits = gshard.jit(lambda x: x + 1, mesh=mesh, out_shardings=P(None, "model"))(x)
    assert fits.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "model")), 2)


def test_an_argument_with_types_of_another_mesh_is_named():
    of_four = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Explicit,))
    w = jax.device_put(jnp.ones((8, 4)), jax.NamedSharding(of_four, P("x")))
    f = gshard.jit(lambda p, y: jnp.tanh(p["w"]) @ y, mesh={"data": 8})
    with pytest.raises(gshard.ShardingError) as caught:
        f({"w": w}, jnp.ones(4))
    assert "argument p['w'] is on a mesh of 4 devices" in caught.value.what
    assert "f32[8@x,4] on x=4" in caught.value.got
    assert "data=8" in caught.value.got
    assert "jax.device_put" in caught.value.hint
    assert "test_boundary.py" in caught.value.where
    np.testing.assert_allclose(f({"w": np.ones((8, 4))}, np.ones(4)), 4 * np.tanh(np.ones(8)), rtol=1e-6)


@pytest.mark.parametrize("how", ["called", "lowered", "in jax.jit", "explained"])
def test_arguments_by_name_are_refused_where_in_shardings_are_given(how):
    """``in_shardings`` say nothing of them, and JAX refuses them too; static ones may have names."""
    x = jnp.ones((8, 8))
    jitted = gshard.jit(lambda a, b, n=1: a * b * n, mesh=8, in_shardings=P("devices"), static_argnames="n")
    assert jitted(x, x, n=2).sharding.spec == P("devices")
    calls = {
        "called": lambda: jitted(x, b=x),
        "lowered": lambda: jitted.lower(x, b=x).plan,
        "in jax.jit": lambda: jax.jit(lambda x: jitted(a=x, b=x))(x),
        "explained": lambda: gshard.explain(jitted, x, b=x),
    }
    with pytest.raises(gshard.ArgumentError, match=r"(?s)positional arguments.*by name.*\bb=") as refused:
        calls[how]()
    assert isinstance(refused.value, ValueError)
