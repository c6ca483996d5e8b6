"""What a reader sees of a small program at each stage: the text in tests/golden is the expectation."""

import jax
import jax.numpy as jnp

import gshard
from gshard import split
from invented import invented


def two_layers(params, x):
    hidden = jnp.tanh(split(x, 0, "data") @ split(params["w1"], 1, "model"))
    return jnp.sum(hidden @ params["w2"], axis=1)


def scanned(weights, x):
    def layer(carry, w):
        return jnp.tanh(split(carry, 0, "data") @ w), None

    return jax.lax.scan(layer, x, weights)[0]


W2 = "params['w2']"
ARGUMENTS = (
    {"w1": jax.ShapeDtypeStruct((6, 8), jnp.float32), "w2": jax.ShapeDtypeStruct((8, 5), jnp.float32)},
    jax.ShapeDtypeStruct((3, 6), jnp.float32),
)


def test_stages_of_two_layers(golden):
    lowered = gshard.jit(two_layers, mesh=gshard.Mesh.abstract(data=2, model=4)).lower(*ARGUMENTS)
    golden("two_layers", f"{lowered.program}\n\n{lowered.plan}\n")


def test_explanation_of_two_layers(golden):
    found = gshard.explain(two_layers, *ARGUMENTS, mesh=gshard.Mesh.abstract(data=2, model=4))
    golden("two_layers_explained", f"{found.format(tensors=12)}\n\n{found.why(W2)}\n")


def test_plan_of_a_scan(golden):
    weights, x = jax.ShapeDtypeStruct((3, 6, 6), jnp.float32), jax.ShapeDtypeStruct((4, 6), jnp.float32)
    lowered = gshard.jit(scanned, mesh=gshard.Mesh.abstract(data=2)).lower(weights, x)
    golden("scan", str(lowered.plan))


def test_an_operation_without_a_rule_is_named_in_the_plan():
    def f(x):
        return invented(split(x, 0, 8))

    x = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    found = gshard.explain(f, x, mesh=gshard.Mesh.abstract(devices=8))
    (text,) = found.lists["gathered"]
    assert text.startswith("invented at invented.py:")
    assert text.endswith("f32[8,4] (128 B on every device)")
    assert text in str(found)
