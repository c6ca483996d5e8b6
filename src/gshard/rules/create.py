"""Arrays made from nothing: counters and random bits. Every device makes its own part of the same whole array.

Random bits are computed from a counter for each element, so the part that a device makes is bit for bit what the
unpartitioned program has there, for every mesh (JAX's ``jax_threefry_partitionable``, on by default).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from gshard.comm.shards import Shards, along
from gshard.core.program import Equation
from gshard.core.rule import Rule, RuleMaker
from gshard.language.registry import Call, rule
from gshard.language.traits import Part, Places, set_traits


def _iota_values(params: Mapping[str, Any]) -> np.ndarray:
    shape, d = params["shape"], params["dimension"]
    counted = np.arange(shape[d], dtype=params["dtype"])
    return np.broadcast_to(counted.reshape([-1 if i == d else 1 for i in range(len(shape))]), shape)


def _iota_at(part: Part, e: Equation, at: Places) -> Any:
    shape = [n if i is None else i.shape[0] for n, i in zip(e.outputs[0].shape, at, strict=True)]
    d = e.params["dimension"]
    if at[d] is None:
        return lax.broadcasted_iota(e.params["dtype"], shape, d)
    return jnp.broadcast_to(along(at[d].astype(e.params["dtype"]), d, len(shape)), shape)


@rule("iota", free=True, shape_in="shape", values=_iota_values, placed=_iota_at)
def iota(call: Call) -> Rule:
    """Each device counts from where its part begins."""
    make = RuleMaker()
    result = make.parallel(call.out_shapes[0])
    along = call.params["dimension"]

    def local(shards: Shards) -> list[Any]:
        count = lax.broadcasted_iota(jnp.int32, shards.out_shape(), along) + shards.offset(result[along])
        return [count.astype(call.params["dtype"])]

    return make.rule([], [result], local=local)


@rule("empty")
def empty(call: Call) -> Rule:
    """Memory that is still to be written; each device takes that for its part."""
    make = RuleMaker()
    result = make.parallel(call.out_shapes[0])

    def local(shards: Shards) -> list[Any]:
        return [lax.empty(shards.out_shape(), call.params["dtype"])]

    return make.rule([], [result], local=local, flops=0)


@rule("platform_index")
def platform_index(call: Call) -> Rule:
    """Which of several platforms the program is compiled for: the same number everywhere."""
    return RuleMaker().rule([], [[]], flops=0)


@rule("iota_2x32_shape")
def iota_2x32_shape(call: Call) -> Rule:
    """The row-major number of every element, as two words (high, low): the counters of random bits."""
    make = RuleMaker()
    result = make.parallel(call.out_shapes[0])

    def local(shards: Shards) -> list[Any]:
        local_shape = shards.out_shape()
        high = low = jnp.zeros(local_shape, jnp.uint32)
        stride = math.prod(call.out_shapes[0])
        for d, n in enumerate(call.out_shapes[0]):
            stride = stride // n if n else 0
            index = lax.broadcasted_iota(jnp.uint32, local_shape, d) + jnp.uint32(shards.offset(result[d]))
            add_high, add_low = _times(index, stride)
            low = low + add_low
            high = high + add_high + (low < add_low).astype(jnp.uint32)
        return [high, low]

    return make.rule([], [result, result], local=local)


def _times(x: Any, constant: int) -> tuple[Any, Any]:
    """A 64-bit product of 32-bit words and a 64-bit constant, as (high, low) words."""
    c_high, c_low = jnp.uint32(constant >> 32 & 0xFFFFFFFF), constant & 0xFFFFFFFF
    x0, x1 = x & jnp.uint32(0xFFFF), x >> jnp.uint32(16)
    c0, c1 = jnp.uint32(c_low & 0xFFFF), jnp.uint32(c_low >> 16)
    low, middle1, middle2 = x0 * c0, x0 * c1, x1 * c0
    middle = (low >> jnp.uint32(16)) + (middle1 & jnp.uint32(0xFFFF)) + (middle2 & jnp.uint32(0xFFFF))
    high = x1 * c1 + (middle1 >> jnp.uint32(16)) + (middle2 >> jnp.uint32(16)) + (middle >> jnp.uint32(16))
    return high + x * c_high, x * jnp.uint32(c_low)


@rule("random_wrap")
def random_wrap(call: Call) -> Rule:
    """The words of a key (the last dimension) are whole."""
    make = RuleMaker()
    dims = make.parallel(call.out_shapes[0])
    words = [make.replicate(n) for n in call.in_shapes[0][len(dims) :]]
    return make.rule([[*dims, *words]], [dims])


@rule("random_unwrap")
def random_unwrap(call: Call) -> Rule:
    """The words of a key (the last dimension) are whole."""
    make = RuleMaker()
    dims = make.parallel(call.in_shapes[0])
    words = [make.replicate(n) for n in call.out_shapes[0][len(dims) :]]
    return make.rule([dims], [[*dims, *words]])


# Implementations that make of each of many keys what they make of it alone. ``unsafe_rbg`` is none of them: what it
# makes of many keys depends on the first of them and on how many there are.
_EACH_BY_ITSELF = ("key<fry>", "key<rbg>")


def _per_key(call: Call, make: RuleMaker, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The dimensions of keys: parallel where each is by itself."""
    alone = not call.on_keys or call.in_dtypes[0].name in _EACH_BY_ITSELF
    return make.parallel(shape) if alone else [make.replicate(n) for n in shape]


@rule("random_seed", "random_fold_in")
def per_key(call: Call) -> Rule:
    """One key from each seed, or from each key and number."""
    make = RuleMaker()
    dims = _per_key(call, make, call.out_shapes[0])
    operands = [[dim if n == m else () for dim, n, m in zip(dims, s, call.out_shapes[0])] for s in call.in_shapes]
    return make.rule(operands, [dims])


@rule("random_split")
def random_split(call: Call) -> Rule:
    """Keys are parallel; the new dimension, over the keys made of each, is replicated."""
    make = RuleMaker()
    dims = _per_key(call, make, call.in_shapes[0])
    return make.rule([dims], [[*dims, *(make.replicate(n) for n in call.params["shape"])]])


set_traits("rng_uniform", pure=False, shared=False, fixed=True)  # each run draws other numbers; it has no rule


@rule("rng_bit_generator", fixed=True)
def rng_bit_generator(call: Call) -> Rule:
    """Whole: which bits an element gets depends on the algorithm and on the shape of all of them.

    Every device makes all bits from the whole state and keeps its part.
    """
    make = RuleMaker()
    state = [make.replicate(n) for n in call.in_shapes[0]]
    return make.rule([state], [state, [make.replicate(n) for n in call.out_shapes[1]]])


@rule("random_gamma")
def random_gamma(call: Call) -> Rule:
    """Keys are parallel; the samples drawn with keys split from each of them are whole.

    Only those of threefry: what else draws bits for many keys draws them all at once.
    """
    keys, shape = call.in_shapes
    make = RuleMaker()
    dims = make.parallel(keys) if call.in_dtypes[0].name == "key<fry>" else [make.replicate(n) for n in keys]
    dims += [make.replicate(n) for n in shape[len(keys) :]]
    return make.rule([dims[: len(keys)], dims], [dims])
