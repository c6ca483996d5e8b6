"""Arrays without operands: counters, random bits and tables of positions. Each device computes its part."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gshard.comm.shards import Shards, along
from gshard.core.program import Constant, Equation, Value
from gshard.core.rule import Rule, RuleMaker
from gshard.language.function_primitive import function_primitive
from gshard.language.registry import Call, rule
from gshard.language.traits import Part, Places, set_traits, traits_of


def _iota_values(params: Mapping[str, Any]) -> np.ndarray:
    shape, d = params["shape"], params["dimension"]
    counter = np.arange(shape[d], dtype=params["dtype"])
    return np.broadcast_to(along(counter, d, len(shape)), shape)


def _iota_at(part: Part, e: Equation, at: Places) -> Any:
    shape = [n if i is None else i.shape[0] for n, i in zip(e.outputs[0].shape, at, strict=True)]
    d = e.params["dimension"]
    if at[d] is None:
        return lax.broadcasted_iota(e.params["dtype"], shape, d)
    return jnp.broadcast_to(along(at[d].astype(e.params["dtype"]), d, len(shape)), shape)


@rule("iota", free=True, shape_in="shape", values=_iota_values, placed=_iota_at)
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
    result = make.parallel(call.out_shapes[0])

    def local(shards: Shards) -> list[Any]:
        return [lax.empty(shards.out_shape(), call.params["dtype"])]

    return make.rule([], [result], local=local, flops=0)


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


set_traits("rng_uniform", pure=False, shared=False, fixed=True)  # every run gives other numbers; it has no rule


@rule("rng_bit_generator", fixed=True)
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


# Tables: arrays whose elements depend on their positions only (``rewrite.fold_into_reader``).


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """The equations that compute an array from positions and scalars."""

    equations: tuple[Equation, ...]  # the equations in order; elementwise, or of primitives with the trait ``placed``
    numbers: tuple[Value, ...]  # the scalars that they read
    result: Value  # the array

    def part(self, numbers: Sequence[Any], at: Places) -> Any:
        """The elements at some positions of each dimension, for these values of the scalars."""
        return _Part(self, numbers).of(self.result, at)


class _Part:
    """Computes elements of the arrays of a table, each only once."""

    def __init__(self, table: Table, numbers: Sequence[Any]):
        self._producers = {e.outputs[0]: e for e in table.equations}
        self._numbers = dict(zip(table.numbers, numbers, strict=True))
        self._computed: dict[Any, tuple[Any, Places]] = {}

    def of(self, x: Value | Constant, at: Places) -> Any:
        if isinstance(x, Constant):
            return x.value
        if x in self._numbers:
            return self._numbers[x]
        key = x, tuple(map(id, at))
        if key not in self._computed:
            # The positions are kept alive, so that their ids stay unique.
            self._computed[key] = self._compute(self._producers[x], at), at
        return self._computed[key][0]

    def _compute(self, e: Equation, at: Places) -> Any:
        traits = traits_of(e.name)
        if traits.computes:
            shape = e.outputs[0].shape
            return e.primitive.bind(*(self.of(x, _at_operand(x.shape, shape, at)) for x in e.inputs), **e.params)
        if all(positions is None for positions in at):
            return e.primitive.bind(*(self.of(x, (None,) * len(x.shape)) for x in e.inputs), **e.params)
        assert traits.placed is not None
        return traits.placed(self, e, at)


def _at_operand(operand_shape: tuple[int, ...], shape: tuple[int, ...], at: Places) -> Places:
    """The positions of an elementwise operand, which is a scalar or may have broadcast dimensions of size 1."""
    if not operand_shape:
        return ()
    return tuple(None if n == 1 and m != 1 else i for n, m, i in zip(operand_shape, shape, at, strict=True))


def _run(*numbers: Any, table: Table) -> Any:
    return table.part(numbers, (None,) * len(table.result.shape))


def _shape(*numbers: Any, table: Table) -> Any:
    return jax.core.ShapedArray(table.result.shape, table.result.dtype)


table_p = function_primitive("table", _run, _shape)


@rule("table")
def table(call: Call) -> Rule:
    """All dimensions are parallel. The operands are scalars."""
    equations: Table = call.params["table"]
    make = RuleMaker()
    result = make.parallel(call.out_shapes[0])

    def local(shards: Shards, *numbers: Any) -> list[Any]:
        at: list[Any] = [None] * len(result)
        for d, (n, m) in enumerate(zip(call.out_shapes[0], shards.out_shape(), strict=True)):
            if shards.atoms(result[d][0]):
                at[d] = jnp.minimum(jnp.arange(m, dtype=jnp.int32) + shards.offset(result[d]), max(n - 1, 0))
        return [equations.part(numbers, tuple(at))]

    flops = sum(math.prod(e.outputs[0].shape) for e in equations.equations if traits_of(e.name).computes)
    return make.rule([[] for _ in call.in_shapes], [result], local=local, flops=flops)
