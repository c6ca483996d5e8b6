"""A state on the host: what is found, that numbers stay the same, and that one layer at a time is on the devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

import gshard
from gshard.search.state_on_host import state_to_offload, with_state_on_host

LAYERS = 4


def adam(state, x):
    weights, first, second = state

    def loss(weights):
        y = x
        for w in weights:
            y = jnp.tanh(y @ w)
        return jnp.mean(y * y)

    value, gradients = jax.value_and_grad(loss)(weights)
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, gradients)
    second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, second, gradients)
    weights = jax.tree.map(lambda w, m, v: w - 0.1 * m / (jnp.sqrt(v) + 1e-3), weights, first, second)
    return (weights, first, second), value


def numbers(rng):
    def arrays(scale):
        return [jnp.asarray(scale * rng.standard_normal((16, 16)), "float32") for _ in range(LAYERS)]

    return (arrays(0.3), arrays(0.0), arrays(0.0)), jnp.asarray(rng.standard_normal((8, 16)), "float32")


def traced(f, *args):
    return gshard.jit(f, mesh=gshard.Mesh.abstract(d=1)).lower(*args).program


def on_host(x):
    return jax.device_put(x, SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host"))


def test_the_moments_are_found_and_the_weights_are_not(rng):
    state, x = numbers(rng)
    count = len(jax.tree.leaves(state))
    found = state_to_offload(traced(adam, state, x), range(count))
    assert found == {i: i for i in range(LAYERS, 3 * LAYERS)}
    assert not state_to_offload(traced(adam, state, x), [])


def test_what_a_product_or_a_loop_reads_stays():
    array = jax.ShapeDtypeStruct((16, 16), "float32")

    def step(a, b, c):
        looped = jax.lax.fori_loop(0, 3, lambda i, y: 0.5 * y + b, jnp.zeros_like(b))
        return a + a @ a, looped, 0.9 * c

    assert state_to_offload(traced(step, array, array, array), range(3)) == {2: 2}


def test_numbers_are_those_of_the_step(rng):
    state, x = numbers(rng)
    program = traced(adam, state, x)
    pairs = state_to_offload(program, range(3 * LAYERS))
    moved = jax.jit(with_state_on_host(adam, frozenset(pairs.values())))
    ours, theirs = (state[0], on_host(state[1]), on_host(state[2])), state
    for _ in range(3):
        ours, value = moved(ours, x)
        theirs, expected = jax.jit(adam)(theirs, x)
        kinds = [leaf.sharding.memory_kind for leaf in jax.tree.leaves(ours)]
        assert kinds == ["device"] * LAYERS + ["pinned_host"] * 2 * LAYERS
        np.testing.assert_allclose(value, expected, rtol=1e-6)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), ours, theirs)


def test_one_layer_of_the_state_is_fetched_at_a_time(rng):
    state, x = numbers(rng)
    shapes = (state[0], *jax.tree.map(on_host, state[1:]))
    jaxpr = jax.make_jaxpr(with_state_on_host(adam, frozenset(range(LAYERS, 3 * LAYERS))))(shapes, x)
    fetched = most = 0
    for eqn in jaxpr.jaxpr.eqns:
        if eqn.primitive.name == "device_put":
            to_host = eqn.outvars[0].aval.memory_space is jax.memory.Space.Host
            fetched += -1 if to_host else 1
            most = max(most, fetched)
    assert fetched == 0
    assert 1 <= most <= 2, "no more than the two moments of one layer"


def test_effects_keep_their_order():
    told = []

    def step(m, g):
        new = 0.9 * m + g
        jax.debug.callback(lambda n: told.append(float(n)), new.sum())
        return new

    m = on_host(jnp.ones((4, 4)))
    new = jax.jit(with_state_on_host(step, {0}))(m, jnp.ones((4, 4)))
    jax.effects_barrier()
    assert (told, new.sharding.memory_kind) == (pytest.approx([1.9 * 16]), "pinned_host")
