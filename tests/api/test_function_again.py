"""Functions that are compiled once more: of frameworks, partial ones and methods too."""

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import gshard

eqx = pytest.importorskip("equinox")
nnx = pytest.importorskip("flax.nnx")
P = PartitionSpec
MESH = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "model"))


def put(*shape, spec=()):
    return jax.device_put(jnp.ones(shape), NamedSharding(MESH, P(*spec)))


def whole(x):
    """A constraint that was left over."""
    return jax.lax.with_sharding_constraint(x, NamedSharding(MESH, P()))


class Net(eqx.Module):
    up: jax.Array
    down: jax.Array
    activation: Callable[..., Any]  # a leaf that is no array

    def __call__(self, x):
        return whole(self.activation(x @ self.up)) @ self.down

    @eqx.filter_jit
    def step(self, x):
        return step_of(self, x)


def step_of(net, x):
    gradient = eqx.filter_grad(lambda net: (net(x) ** 2).mean())(net)
    return eqx.apply_updates(net, jax.tree.map(lambda g: -g, gradient))


class Model(nnx.Module):
    def __init__(self):
        self.up, self.down = nnx.Param(put(64, 512)), nnx.Param(put(512, 64))
        self.count = nnx.Variable(put())

    def __call__(self, x):
        return whole(jax.nn.gelu(x @ self.up[...])) @ self.down[...]

    @nnx.jit
    def step(self, x):
        step_of_model(self, x)


def step_of_model(model, x):
    gradient = nnx.grad(lambda model: (model(x) ** 2).mean())(model)
    model.up[...] -= gradient["up"][...]
    model.down[...] -= gradient["down"][...]
    model.count[...] += 1


class Plain:
    @functools.partial(jax.jit, static_argnums=0)
    def step(self, params, x):
        def loss(params):
            return ((whole(jax.nn.gelu(x @ params["up"])) @ params["down"]) ** 2).mean()

        return jax.tree.map(lambda w, g: w - g, params, jax.grad(loss)(params))


NET, MODEL, PLAIN = Net(put(64, 512), put(512, 64), jax.nn.gelu), Model(), Plain()
PARAMS = {"up": put(64, 512), "down": put(512, 64)}
X = put(128, 64, spec=("data",))
STEPS = {
    "equinox": (eqx.filter_jit(step_of), (NET, X), "net/up"),
    "equinox method": (NET.step, (X,), "self/up"),
    "nnx": (nnx.jit(step_of_model), (MODEL, X), "model/up"),
    "nnx method": (MODEL.step, (X,), "self/up"),
    "method": (PLAIN.step, (PARAMS, X), "params/up"),
    "partial": (functools.partial(Plain.step, PLAIN, PARAMS), (X,), "params/up"),
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.one_in(2)
def test_shardings_of_its_arguments_are_tried(name):
    f, arguments, weight = STEPS[name]
    found = gshard.explain(f, *arguments)
    assert found.is_compiled
    again = found.source.again
    assert again is not None
    number = next(
        i for i, a in enumerate(found.source.program.arguments) if a.short.text.removesuffix("/value") == weight
    )
    assert again.leaves[number].shape == (64, 512)
    changed = again.compiled({number: P(None, "model")})
    assert changed is not None
    assert changed.program.arguments[number].cut.text == "P(None, model)"
    assert [a.bytes for a in changed.program.arguments] == [a.bytes for a in found.source.program.arguments]
    assert changed.program.peak < found.peak


@pytest.mark.parametrize("name", ["equinox method", "nnx", "partial"])
@pytest.mark.one_in(3)
def test_a_constraint_inside_is_removed(name):
    f, arguments, _ = STEPS[name]
    found = gshard.explain(f, *arguments, machine="h100:1x8")
    advice = found.advise(seconds=20)
    assert any(": remove the constraint P()" in one.text for one in advice.changes)


def test_arrays_of_a_framework_are_not_kept_either():
    net = Net(put(64, 512), put(512, 64), jax.nn.gelu)
    found = gshard.explain(eqx.filter_jit(step_of), net, X)
    reference = weakref.ref(net.up)
    assert found.advise(seconds=1e-3).refused == 0
    del net
    gc.collect()
    assert reference() is None
    advice = found.advise(seconds=1e-3)
    assert (advice.compiled, advice.refused) == (1, 0)


def test_a_plain_partial_is_partitioned_by_gshard():
    found = gshard.explain(functools.partial(lambda a, b: a @ b, put(8, 8)), put(8, 8), mesh=8)
    assert not found.is_compiled
