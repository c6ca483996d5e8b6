"""Tables: arrays that follow from the positions of their elements alone (``rewrite.fold_table`` finds them).

Sines and cosines side by side, a ramp that is filled up with ones, counters that run backwards: each device computes
its own part, and nothing is sent. Vectors of positions describe a part, one for each dimension that
is split: a reversal counts them from the other end, a slice spreads them, and where arrays are put side by side each is
computed for all positions and one is chosen.

    concatenate(sin(a), cos(a)) along 8 of 64 positions      where(i < 32, sin(a[min(i, 31)]), cos(a[max(i - 32, 0)]))
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir

from gshard.comm.shards import Shards
from gshard.core.program import Constant, Equation, Value
from gshard.core.rule import Rule, RuleMaker
from gshard.language.registry import Call, rule
from gshard.language.traits import Places, traits_of

table_p = Primitive("table")


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """How an array is made of positions and numbers.

    Attributes:
        equations: in order; elementwise, or of primitives with the trait ``placed``.
        numbers: the values without dimensions that they read from elsewhere.
        result: what the last one makes.
    """

    equations: tuple[Equation, ...]
    numbers: tuple[Value, ...]
    result: Value

    def part(self, numbers: Sequence[Any], at: Places) -> Any:
        """The elements at some positions of each dimension."""
        return _Part(self, numbers).of(self.result, at)


class _Part:
    """One reading of a table: what was computed once is not computed again."""

    def __init__(self, table: Table, numbers: Sequence[Any]):
        self.makers = {e.outputs[0]: e for e in table.equations}
        self.numbers = dict(zip(table.numbers, numbers, strict=True))
        self.known: dict[Any, Any] = {}

    def of(self, x: Value | Constant, at: Places) -> Any:
        if isinstance(x, Constant):
            return x.value
        if x in self.numbers:
            return self.numbers[x]
        key = x, tuple(map(id, at))
        if key not in self.known:
            # The positions are kept with what was computed for them: as long as they are, no others have their place.
            self.known[key] = self._made(self.makers[x], at), at
        return self.known[key][0]

    def _made(self, e: Equation, at: Places) -> Any:
        traits = traits_of(e.name)
        if traits.computes:
            shape = e.outputs[0].shape
            return e.primitive.bind(*(self.of(x, _of_operand(x.shape, shape, at)) for x in e.inputs), **e.params)
        if all(positions is None for positions in at):
            return e.primitive.bind(*(self.of(x, (None,) * len(x.shape)) for x in e.inputs), **e.params)
        assert traits.placed is not None
        return traits.placed(self, e, at)


def _of_operand(own: tuple[int, ...], shape: tuple[int, ...], at: Places) -> Places:
    """The positions of an operand, which has no dimensions or those of the result, some of them 1."""
    return tuple(None if n == 1 and m != 1 else i for n, m, i in zip(own, shape, at, strict=True)) if own else ()


@table_p.def_impl
def _run(*numbers: Any, table: Table) -> Any:
    return table.part(numbers, (None,) * len(table.result.shape))


@table_p.def_abstract_eval
def _shape(*numbers: Any, table: Table) -> Any:
    return jax.core.ShapedArray(table.result.shape, table.result.dtype)


mlir.register_lowering(table_p, mlir.lower_fun(_run, multiple_results=False))


@rule("table")
def table(call: Call) -> Rule:
    """All dimensions are parallel, and nothing is read but numbers."""
    made: Table = call.params["table"]
    make = RuleMaker()
    result = make.parallel(call.out_shapes[0])

    def local(shards: Shards, *numbers: Any) -> list[Any]:
        at: list[Any] = [None] * len(result)
        for d, (n, m) in enumerate(zip(call.out_shapes[0], shards.out_shape(), strict=True)):
            if shards.atoms(result[d][0]):
                at[d] = jnp.minimum(jnp.arange(m, dtype=jnp.int32) + shards.offset(result[d]), max(n - 1, 0))
        return [made.part(numbers, tuple(at))]

    flops = sum(math.prod(e.outputs[0].shape) for e in made.equations if traits_of(e.name).computes)
    return make.rule([[] for _ in call.in_shapes], [result], local=local, flops=flops)
