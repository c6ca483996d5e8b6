"""Primitives that gshard has never heard of: one that reverses rows and adds them up from the left, and any other.

Their lowering is their own, as a kernel's would be, so that gshard cannot look inside.
"""

import functools

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir


def _own_lowering(meaning):
    lowered = mlir.lower_fun(meaning, multiple_results=False)
    return lambda ctx, *xs, **params: lowered(ctx, *xs, **params)


def _meaning(x):
    return jnp.cumsum(x[::-1], axis=0)


invented_p = Primitive("invented")
invented_p.def_impl(_meaning)
invented_p.def_abstract_eval(lambda x: x)
mlir.register_lowering(invented_p, _own_lowering(_meaning))


def invented(x):
    """Applies the primitive."""
    return invented_p.bind(x)


def primitive_of(name, meaning, batched=None):
    """A new primitive that means a function, with a batching rule if there is one to give."""
    made = Primitive(name)
    made.def_impl(lambda *xs, **params: jax.jit(functools.partial(meaning, **params))(*xs))

    def shaped(*avals, **params):
        found = jax.eval_shape(lambda *xs: meaning(*xs, **params), *avals)
        return jax.core.ShapedArray(found.shape, found.dtype)

    made.def_abstract_eval(shaped)
    mlir.register_lowering(made, _own_lowering(meaning))
    if batched is not None:
        batching.primitive_batchers[made] = batched
    return made
