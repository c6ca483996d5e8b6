"""gshard.jit(..., static_leaves=True): what is no array inside of arguments and results."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gshard


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    """A module whose activation function and rate are leaves, as Equinox's are."""

    w: Any
    act: Any
    rate: Any = 0.0

    def __call__(self, x):
        y = self.act(x @ self.w)
        return y * (1 - self.rate) if self.rate else y


def layer(rng, act=jnp.tanh, rate=0.0):
    return Layer(rng.standard_normal((6, 4)).astype("float32"), act, rate)


def apply(model, x):
    return model(gshard.split(x, 0, 4))


def inputs(rng, rows=10):
    return rng.standard_normal((rows, 6)).astype("float32")


def test_a_module_is_an_argument(rng):
    model, x = layer(rng, lambda y: -y, 0.25), inputs(rng)
    partitioned = gshard.jit(apply, mesh=4, static_leaves=True)
    np.testing.assert_allclose(partitioned(model, x), model(x), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(partitioned(model=model, x=x), model(x), rtol=1e-5, atol=1e-6)


def test_another_leaf_is_another_program_and_the_same_one_is_not(rng):
    traced = []

    def f(model, x):
        traced.append(model.act)
        return apply(model, x)

    partitioned = gshard.jit(f, mesh=4, static_leaves=True)
    model, x = layer(rng), inputs(rng)
    for act in (jnp.tanh, jnp.sin, jnp.tanh, jnp.sin):
        changed = dataclasses.replace(model, act=act)
        np.testing.assert_allclose(partitioned(changed, x), changed(x), rtol=1e-5, atol=1e-6)
    assert traced == [jnp.tanh, jnp.sin]
    assert partitioned._cache_size() == 2
    assert partitioned.lower(model, x) is partitioned.lower(layer(rng), x)


@pytest.mark.parametrize("values", [(1, 1.0, True), (0.0, -0.0), (math.nan, math.inf, -math.inf), (0j, -0j)])
def test_numbers_of_python_are_told_apart_by_type_and_sign(values):
    partitioned = gshard.jit(lambda given: (given["x"] + 1, given["n"]), mesh=2, static_leaves=True)
    for _ in range(2):
        for n in values:
            x, found = partitioned({"x": np.arange(4), "n": n})
            assert (type(found), repr(found)) == (type(n), repr(n))
            np.testing.assert_array_equal(x, np.arange(4) + 1)
    assert partitioned._cache_size() == len(values), "a NaN is the same leaf in every call"


def test_results_hold_such_leaves_and_go_round_donated(rng, mesh_2x4):
    def step(model, x):
        grads = jax.grad(lambda w: jnp.sum(jnp.square(dataclasses.replace(model, w=w)(x))))(model.w)
        w = gshard.shard(model.w - 0.01 * grads, P("model", "data"))
        return dataclasses.replace(model, w=w), {"rows": x.shape[0], "name": "step", "none": None, "sum": x.sum()}

    model, x = layer(rng, rate=0.5), inputs(rng)
    partitioned = gshard.jit(step, mesh=mesh_2x4, static_leaves=True, donate_argnums=0)
    ours, theirs = dataclasses.replace(model, w=jnp.array(model.w)), model
    for _ in range(3):
        ours, told = partitioned(ours, x)
        theirs, _ = step(theirs, x)
        assert ours.act is jnp.tanh
        assert ours.rate == 0.5
        assert (told["rows"], told["name"], told["none"]) == (10, "step", None)
        np.testing.assert_allclose(told["sum"], x.sum(), rtol=1e-5)
        np.testing.assert_allclose(ours.w, theirs.w, rtol=1e-4, atol=1e-5)


def test_within_transformations(rng):
    model, x = layer(rng, jnp.sin, 0.25), inputs(rng)
    partitioned = gshard.jit(apply, mesh=4, static_leaves=True)

    def loss(call, w, x):
        return jnp.sum(jnp.square(call(dataclasses.replace(model, w=w), x)))

    ours = jax.jit(jax.grad(lambda w, x: loss(partitioned, w, x)))(model.w, x)
    theirs = jax.grad(lambda w, x: loss(lambda m, x: m(x), w, x))(model.w, x)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    mapped = jax.vmap(lambda x: partitioned(model, x))(np.stack([x, -x]))
    np.testing.assert_allclose(mapped, np.stack([model(x), model(-x)]), rtol=1e-5, atol=1e-6)


def test_stages(rng):
    model, x = layer(rng), inputs(rng, 8)
    partitioned = gshard.jit(lambda m, x: (m, apply(m, x)), mesh=4, static_leaves=True, in_shardings=(P(), None))
    lowered = partitioned.lower(model, x)
    assert lowered.program.names == ("m.w", "x")
    for info in (lowered.out_info, partitioned.trace(model, x).out_info, partitioned.eval_shape(model, x)):
        assert info[0].act is jnp.tanh
        assert info[1].shape == (8, 4)
    same, y = lowered.compile()(model, x)
    assert same.act is jnp.tanh
    np.testing.assert_allclose(y, model(x), rtol=1e-5, atol=1e-6)
    with pytest.raises(gshard.ArgumentError, match="does not match the input pytree"):
        lowered.compile()(dataclasses.replace(model, act=jnp.sin), x)
    assert gshard.explain(partitioned, model, x).total_bytes == 0
    with jax.disable_jit():
        np.testing.assert_allclose(partitioned(model, x)[1], model(x), rtol=1e-5, atol=1e-6)


def test_what_has_no_hash_is_refused_with_its_path(rng):
    partitioned = gshard.jit(apply, mesh=4, static_leaves=True)
    with pytest.raises(gshard.ArgumentError, match=r"arguments of apply, \[0\]\.act(.|\n)*a set"):
        partitioned(layer(rng, act={1, 2}), inputs(rng))
    with pytest.raises(gshard.ArgumentError, match=r"the result of <lambda>\['found'\](.|\n)*a set"):
        gshard.jit(lambda x: {"found": {1}, "x": x}, mesh=4, static_leaves=True)(inputs(rng))


def test_arrays_of_all_kinds_are_arrays(rng, mesh_2x4):
    given = {
        "jax": jnp.arange(3.0),
        "numpy": np.arange(3),
        "scalar": np.float32(2),
        "key": jax.random.key(0),
        "bfloat": jnp.bfloat16(1.5),
        "uneven": gshard.jit(lambda x: gshard.split(x, 0, 8), mesh=mesh_2x4, uneven="keep")(inputs(rng)),
        "type": jnp.float32,
    }
    kinds = {}

    def f(given):
        kinds.update({name: isinstance(x, jax.core.Tracer) for name, x in given.items()})
        return given["uneven"] * given["scalar"]

    found = gshard.jit(f, mesh=mesh_2x4, static_leaves=True)(given)
    assert kinds == {name: name != "type" for name in given}
    np.testing.assert_array_equal(found, given["uneven"].whole() * 2)
