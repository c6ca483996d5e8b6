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
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from gshard.comm.shards import Shards, along
from gshard.core.program import Constant, Equation, Value
from gshard.core.rule import Rule, RuleMaker
from gshard.core.xla_workarounds import taken
from gshard.language.registry import Call, rule
from gshard.rules.elementwise import N_ARY, UNARY

ELEMENTWISE = frozenset((*UNARY, *N_ARY)) - {"name", "copy_p", "threefry2x32"}
MOVERS = frozenset(("concatenate", "pad", "rev", "slice"))
PLACED = MOVERS | {"iota", "broadcast_in_dim", "transpose", "squeeze", "reshape"}

_LOOK_UP = 8  # operations that are no more than looking up an element

At = tuple[Any, ...]
"""For each dimension int32 [m], the positions that are wanted, or None for all."""

table_p = Primitive("table")


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """How an array is made of positions and numbers.

    Attributes:
        equations: in order; of names in `ELEMENTWISE` and `PLACED`.
        numbers: the values without dimensions that they read from elsewhere.
        result: what the last one makes.
    """

    equations: tuple[Equation, ...]
    numbers: tuple[Value, ...]
    result: Value

    def part(self, numbers: Sequence[Any], at: At) -> Any:
        """The elements at some positions of each dimension."""
        return _Part(self, numbers).of(self.result, at)


class _Part:
    """One reading of a table: what was computed once is not computed again."""

    def __init__(self, table: Table, numbers: Sequence[Any]):
        self.makers = {e.outputs[0]: e for e in table.equations}
        self.numbers = dict(zip(table.numbers, numbers, strict=True))
        self.known: dict[Any, Any] = {}

    def of(self, x: Value | Constant, at: At) -> Any:
        if isinstance(x, Constant):
            return x.value
        if x in self.numbers:
            return self.numbers[x]
        key = x, tuple(map(id, at))
        if key not in self.known:
            # The positions are kept with what was computed for them: as long as they are, no others have their place.
            self.known[key] = self._made(self.makers[x], at), at
        return self.known[key][0]

    def _made(self, e: Equation, at: At) -> Any:
        if e.name in ELEMENTWISE:
            shape = e.outputs[0].shape
            return e.primitive.bind(*(self.of(x, _of_operand(x.shape, shape, at)) for x in e.inputs), **e.params)
        if all(positions is None for positions in at):
            return e.primitive.bind(*(self.of(x, (None,) * len(x.shape)) for x in e.inputs), **e.params)
        return getattr(self, f"_{e.name}")(e, at)

    def _iota(self, e: Equation, at: At) -> Any:
        shape = [n if i is None else i.shape[0] for n, i in zip(e.outputs[0].shape, at, strict=True)]
        d = e.params["dimension"]
        if at[d] is None:
            return lax.broadcasted_iota(e.params["dtype"], shape, d)
        return jnp.broadcast_to(along(at[d].astype(e.params["dtype"]), d, len(shape)), shape)

    def _broadcast_in_dim(self, e: Equation, at: At) -> Any:
        (x,), dims = e.inputs[:1], e.params["broadcast_dimensions"]
        shape = [n if i is None else i.shape[0] for n, i in zip(e.outputs[0].shape, at, strict=True)]
        own = tuple(None if n == 1 else at[d] for n, d in zip(x.shape, dims, strict=True))
        return lax.broadcast_in_dim(self.of(x, own), shape, dims)

    def _transpose(self, e: Equation, at: At) -> Any:
        order = e.params["permutation"]
        own: list[Any] = [None] * len(order)
        for d, source in enumerate(order):
            own[source] = at[d]
        return lax.transpose(self.of(e.inputs[0], tuple(own)), order)

    def _squeeze(self, e: Equation, at: At) -> Any:
        (x,), dropped = e.inputs, {d % len(e.inputs[0].shape) for d in e.params["dimensions"]}
        rest = iter(at)
        own = tuple(None if d in dropped else next(rest) for d in range(len(x.shape)))
        return lax.squeeze(self.of(x, own), tuple(dropped))

    def _reshape(self, e: Equation, at: At) -> Any:
        (x,), target = e.inputs[:1], e.outputs[0].shape
        same = {(math.prod(x.shape[:d]), n): d for d, n in enumerate(x.shape)}
        own: list[Any] = [None] * len(x.shape)
        left, shape = list(at), list(target)
        for d, (n, i) in enumerate(zip(target, at, strict=True)):
            source = same.get((math.prod(target[:d]), n))
            if i is not None and n > 1 and source is not None:
                own[source], left[d], shape[d] = i, None, i.shape[0]
        return _taken(lax.reshape(self.of(x, tuple(own)), shape), tuple(left))

    def _rev(self, e: Equation, at: At) -> Any:
        (x,), dims = e.inputs, e.params["dimensions"]
        own = tuple(
            n - 1 - i if i is not None and d in dims else i for d, (n, i) in enumerate(zip(x.shape, at, strict=True))
        )
        return lax.rev(self.of(x, own), [d for d in dims if at[d] is None])

    def _slice(self, e: Equation, at: At) -> Any:
        (x,), starts, limits = e.inputs, e.params["start_indices"], e.params["limit_indices"]
        steps = e.params["strides"] or (1,) * len(starts)
        own = tuple(i if i is None else a + s * i for i, a, s in zip(at, starts, steps, strict=True))
        found = self.of(x, own)
        for d, i in enumerate(at):
            if i is None:
                found = lax.slice_in_dim(found, starts[d], limits[d], steps[d], d)
        return found

    def _pad(self, e: Equation, at: At) -> Any:
        (x, value), config = e.inputs, [(int(a), int(b), int(c)) for a, b, c in e.params["padding_config"]]
        own: list[Any] = list(at)
        inside = jnp.ones((1,) * len(at), jnp.bool_)
        for d, (n, i, (low, _, interior)) in enumerate(zip(x.shape, at, config, strict=True)):
            if i is not None:
                k, left = (i - low) // (interior + 1), (i - low) % (interior + 1)
                own[d] = jnp.clip(k, 0, max(n - 1, 0))
                inside &= along((left == 0) & (k >= 0) & (k < n), d, len(at))
        number = self.of(value, ())
        remaining = [c if i is None else (0, 0, 0) for c, i in zip(config, at, strict=True)]
        found = lax.pad(self.of(x, tuple(own)), number, remaining)
        return jnp.where(inside, found, number)

    def _concatenate(self, e: Equation, at: At) -> Any:
        d = e.params["dimension"]
        i = at[d]
        if i is None:
            return lax.concatenate([self.of(x, at) for x in e.inputs], d)
        # Each operand at all positions may be more than all of it, and what looking it up takes.
        if e.outputs[0].shape[d] + _LOOK_UP * i.shape[0] < len(e.inputs) * i.shape[0]:
            return _taken(self.of(e.outputs[0], (*at[:d], None, *at[d + 1 :])), (*(None,) * d, i))
        found, end = None, sum(x.shape[d] for x in e.inputs)
        for x in reversed(e.inputs):
            end -= x.shape[d]
            if x.shape[d]:
                own = self.of(x, (*at[:d], jnp.clip(i - end, 0, x.shape[d] - 1), *at[d + 1 :]))
                found = own if found is None else jnp.where(along(i < end + x.shape[d], d, len(at)), own, found)
        return found


def _of_operand(own: tuple[int, ...], shape: tuple[int, ...], at: At) -> At:
    """The positions of an operand, which has no dimensions or those of the result, some of them 1."""
    return tuple(None if n == 1 and m != 1 else i for n, m, i in zip(own, shape, at, strict=True)) if own else ()


def _taken(x: Any, at: At) -> Any:
    for d, i in enumerate(at):
        if i is not None:
            x = taken(x, i, d)
    return x


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

    flops = sum(math.prod(e.outputs[0].shape) for e in made.equations if e.name in ELEMENTWISE)
    return make.rule([[] for _ in call.in_shapes], [result], local=local, flops=flops)
