"""Tables: arrays whose elements depend on their positions only (``rewrite.fold_table``).

Examples are concatenated sines and cosines, or a padded counter in reverse. Each device computes its own part, and
nothing is sent. A part is described by a vector of positions for each split dimension. Each equation maps the positions
of its result to those of its operands: a reversal counts from the other end, a slice multiplies by its stride. For a
concatenation, each operand is computed at all positions, and one of them is selected.

    concatenate(sin(a), cos(a)) along 8 of 64 positions      where(i < 32, sin(a[min(i, 31)]), cos(a[max(i - 32, 0)]))
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gshard.comm.shards import Shards
from gshard.core.program import Constant, Equation, Value
from gshard.core.rule import Rule, RuleMaker
from gshard.language.function_primitive import function_primitive
from gshard.language.registry import Call, rule
from gshard.language.traits import Places, traits_of


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
