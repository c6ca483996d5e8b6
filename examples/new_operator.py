"""Rules of two operators that gshard has never heard of are registered and checked.

One rule is a line of text. The other is a function of the equation, because the dimensions depend on a parameter.
A third rule is wrong: the check names the dimension.

    python examples/new_operator.py
"""

import functools
import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir

import gshard


def operator(name, meaning):
    """A primitive, as a library with kernels of its own would define it."""
    primitive = Primitive(name)
    primitive.def_impl(lambda *arrays, **params: jax.jit(functools.partial(meaning, **params))(*arrays))

    def shaped(*avals, **params):
        result = jax.eval_shape(functools.partial(meaning, **params), *avals)
        return jax.core.ShapedArray(result.shape, result.dtype)

    primitive.def_abstract_eval(shaped)
    lowered = mlir.lower_fun(meaning, multiple_results=False)
    # A lowering of its own, as a kernel has, is one that gshard cannot look into.
    mlir.register_lowering(primitive, lambda ctx, *arrays, **params: lowered(ctx, *arrays, **params))
    return primitive


score_p = operator("score", lambda x, w: jnp.einsum("tf,fh->th", jnp.tanh(x), w))
relative_p = operator("relative", lambda x, axis: x - x.max(axis, keepdims=True))


def layer(x, w):
    """f32[tokens, features], f32[features, heads] -> f32[tokens, heads]."""
    x, w = gshard.split(x, 1, 8), gshard.split(w, 0, 8)
    return relative_p.bind(gshard.split(score_p.bind(x, w), 0, 8), axis=1)


x = jax.random.normal(jax.random.key(0), (24, 40))
w = jax.random.normal(jax.random.key(1), (40, 5))
expected = relative_p.bind(score_p.bind(x, w), axis=1)

# What is not known is gathered, and that is said.
assert len(gshard.explain(layer, x, w, mesh=8).lists["gathered"]) == 2

gshard.rule("score")("token feature, feature head -> token head; add over feature")


@gshard.rule("relative")
def relative(call):
    """All dimensions are independent but the one whose maximum is taken."""
    make = gshard.rules.RuleMaker()
    (shape,) = call.in_shapes
    dims = [make.replicate(n) if d == call.params["axis"] else make.factor(n) for d, n in enumerate(shape)]
    return make.rule([dims], [dims])


found = gshard.explain(layer, x, w, mesh=8)
print(found, end="\n\n")
assert found.lists["gathered"] == ()
assert set(found.bytes_by_kind) == {"reduce_scatter"}
assert jnp.allclose(gshard.jit(layer, mesh=8, strict=True)(x, w), expected, atol=1e-4)

# Every split that the rules allow computes what the operator itself computes.
print(gshard.testing.check_rule(score_p.bind, x[:7], w, primitive="score"))
print(gshard.testing.check_rule(functools.partial(relative_p.bind, axis=0), x[:7], primitive="relative"))

gshard.rule("relative")("a b -> a b")
try:
    gshard.testing.check_rule(functools.partial(relative_p.bind, axis=0), x[:7], primitive="relative")
except gshard.rules.RuleError as error:
    print(error)
else:
    raise AssertionError("the rule is wrong")
