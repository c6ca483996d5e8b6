"""Arrays without operands: counters and random bits. Each device computes its part."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from gshard.comm.shards import Shards, along
from gshard.core.rule import Rule, RuleMaker
from gshard.language.registry import Call, rule
from gshard.language.traits import set_traits


def _iota_values(params: Mapping[str, Any]) -> np.ndarray:
    shape, d = params["shape"], params["dimension"]
    counter = np.arange(shape[d], dtype=params["dtype"])
    return np.broadcast_to(along(counter, d, len(shape)), shape)


@rule("iota", values=_iota_values)
def iota(call: Call) -> Rule:
    """Each device counts from the beginning of its part."""
    make = RuleMaker()
    result = make.parallel(call.out_shapes[0])
    d = call.params["dimension"]

    def local(shards: Shards) -> list[Any]:
        counter = lax.broadcasted_iota(jnp.int32, shards.out_shape(), d) + shards.offset(result[d])
        return [counter.astype(call.params["dtype"])]

    return make.rule([], [result], local=local)


@rule("empty")
def empty(call: Call) -> Rule:
    """Uninitialised memory. Each device allocates its own part."""
    make = RuleMaker()
    result, dtype = make.parallel(call.out_shapes[0]), call.params["dtype"]
    return make.rule([], [result], local=lambda shards: [lax.empty(shards.out_shape(), dtype)], flops=0)


@rule("platform_index")
def platform_index(call: Call) -> Rule:
    """The index of the platform for which the program is compiled: the same scalar on all devices."""
    return RuleMaker().rule([], [[]], flops=0)


@rule("iota_2x32_shape")
def iota_2x32_shape(call: Call) -> Rule:
    """The row-major index of each element as two words (high, low): the counters of random bits."""
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
    """The product of 32-bit words and a 64-bit constant, modulo 2**64, as (high, low) words."""
    c_high, c_low = jnp.uint32(constant >> 32 & 0xFFFFFFFF), constant & 0xFFFFFFFF
    x0, x1 = x & jnp.uint32(0xFFFF), x >> jnp.uint32(16)
    c0, c1 = jnp.uint32(c_low & 0xFFFF), jnp.uint32(c_low >> 16)
    low, middle1, middle2 = x0 * c0, x0 * c1, x1 * c0
    middle = (low >> jnp.uint32(16)) + (middle1 & jnp.uint32(0xFFFF)) + (middle2 & jnp.uint32(0xFFFF))
    high = x1 * c1 + (middle1 >> jnp.uint32(16)) + (middle2 >> jnp.uint32(16)) + (middle >> jnp.uint32(16))
    return high + x * c_high, x * jnp.uint32(c_low)


# Implementations that treat each key independently. ``unsafe_rbg`` does not: its results depend on the first key and on
# the number of keys.
_INDEPENDENT_KEYS = ("key<fry>", "key<rbg>")


def _per_key(call: Call, make: RuleMaker, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """New dimensions of keys: parallel if the implementation treats each key independently."""
    independent = not call.on_keys or call.in_dtypes[0].name in _INDEPENDENT_KEYS
    return make.parallel(shape) if independent else [make.replicate(n) for n in shape]


@rule("random_seed", "random_fold_in")
def per_key(call: Call) -> Rule:
    """One key from each seed, or from each key and number."""
    make = RuleMaker()
    dims = _per_key(call, make, call.out_shapes[0])
    operands = [[dim if n == m else () for dim, n, m in zip(dims, s, call.out_shapes[0])] for s in call.in_shapes]
    return make.rule(operands, [dims])


@rule("random_split")
def random_split(call: Call) -> Rule:
    """Keys are parallel. The new dimensions, over the keys that each key is split into, cannot be split."""
    make = RuleMaker()
    dims = _per_key(call, make, call.in_shapes[0])
    return make.rule([dims], [[*dims, *(make.replicate(n) for n in call.params["shape"])]])


set_traits("rng_uniform", pure=False, shared=False)  # every run gives other numbers; it has no rule


@rule("rng_bit_generator")
def rng_bit_generator(call: Call) -> Rule:
    """Nothing can be split: the bits of an element depend on the algorithm and on the shape of the whole array.

    Every device computes all bits from the whole state and keeps its part.
    """
    make = RuleMaker()
    state = [make.replicate(n) for n in call.in_shapes[0]]
    return make.rule([state], [state, [make.replicate(n) for n in call.out_shapes[1]]])


@rule("random_gamma")
def random_gamma(call: Call) -> Rule:
    """Keys of threefry are parallel. The samples of one key cannot be split.

    Other implementations draw the bits for all keys at once.
    """
    keys, shape = call.in_shapes
    make = RuleMaker()
    dims = make.parallel(keys) if call.in_dtypes[0].name == "key<fry>" else [make.replicate(n) for n in keys]
    dims += [make.replicate(n) for n in shape[len(keys) :]]
    return make.rule([dims[: len(keys)], dims], [dims])
