"""Rewrites a while loop under ``vmap`` whose examples end at different times.

JAX gives such a loop a condition with one flag an example and means: go round as long as any flag is set, and change
only the examples whose flag is. Here that is written out, as one equation with one body

    flags, *carry  ->  flags, *carry        new values are selected by the flags, which are then computed again

so that flags and selections have shardings like everything else. Examples are independent. So if the body does not
communicate, each device iterates until its own examples have ended, and no flag is combined; if it communicates along
some axes, all devices along these iterate equally often.

    vmap(lambda n: fori_loop(0, n, f, x))(ns)      ns split over 8 devices: eight loops, nothing is sent
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive, jaxpr_as_fun

from gshard.comm.shards import mask
from gshard.core.jax_adapter import closed, named_axes, shapes_of, sub_jaxprs
from gshard.core.program import Block, Edge, Equation, Value
from gshard.core.sharding import Sharding
from gshard.language.region import REGIONS, Crossing, Emitter, Region, ShardingOf, crossing, edge

mapped_while_p = Primitive("mapped_while")
mapped_while_p.multiple_results = True


@mapped_while_p.def_effectful_abstract_eval
def _results(*avals: Any, body: Any, consts: int) -> tuple[list[Any], Any]:
    return [v.aval for v in closed(body)[0].outvars], closed(body)[0].effects


def written_out(params: dict[str, Any], in_avals: Sequence[Any]) -> Any | None:
    """The jaxpr that stands for a ``while`` with one flag an example; None for one with a single flag."""
    condition = params["cond_jaxpr"]
    if not closed(condition)[0].outvars[0].aval.shape:
        return None
    a, b = params["cond_nconsts"], params["body_nconsts"]
    test, change = jaxpr_as_fun(condition), jaxpr_as_fun(params["body_jaxpr"])

    def flags_of(consts: Sequence[Any], carry: Sequence[Any]) -> Any:
        return test(*consts[:a], *carry)[0]

    def step(*arrays: Any) -> list[Any]:
        consts, flags, carry = arrays[: a + b], arrays[a + b], arrays[a + b + 1 :]
        new = [_selected(flags, x, y) for x, y in zip(change(*consts[a:], *carry), carry, strict=True)]
        return [flags_of(consts, new), *new]

    def loop(*arrays: Any) -> list[Any]:
        consts, start = arrays[: a + b], arrays[a + b :]
        flags = flags_of(consts, start)
        body = jax.make_jaxpr(step)(*shapes_of(in_avals[: a + b]), flags, *shapes_of(in_avals[a + b :]))
        return list(mapped_while_p.bind(*consts, flags, *start, body=body, consts=a + b))[1:]

    return jax.make_jaxpr(loop)(*shapes_of(in_avals))


def _selected(flags: Any, new: Any, old: Any) -> Any:
    """``new`` where an example goes on; the examples are the dimensions in front."""
    if new is old:
        return old
    return lax.select(lax.broadcast_in_dim(flags, old.shape, range(flags.ndim)), new, old)


def _edges(params: dict[str, Any], inputs: Any, outputs: Any, blocks: Sequence[Block]) -> list[Edge]:
    (body,), consts = blocks, params["consts"]
    edges: list[Edge] = []
    for outer, inner in zip(inputs, body.inputs, strict=True):
        edges += edge(outer, inner)
    for inner, end, result in zip(body.inputs[consts:], body.outputs, outputs, strict=True):
        edges += edge(inner, end) + edge(result, inner)
    return edges


def _entry(equation: Equation, sharding: ShardingOf) -> list[Sharding]:
    return [sharding(v) for v in equation.blocks[0].inputs]


def _leave(equation: Equation, sharding: ShardingOf) -> list[Sharding]:
    return [sharding(v) for v in equation.blocks[0].inputs[equation.params["consts"] :]]


def _crossings(equation: Equation) -> list[Crossing]:
    (body,), consts = equation.blocks, equation.params["consts"]
    found = [crossing(x, v) for x, v in zip(equation.inputs, body.inputs, strict=True)]
    found += [crossing(x, v, each_round=True) for x, v in zip(body.outputs, body.inputs[consts:], strict=True)]
    found += [crossing(x, v, inward=False) for x, v in zip(equation.outputs, body.inputs[consts:], strict=True)]
    return [c for some in found for c in some]


def _emit(equation: Equation, emitter: Emitter, arrays: Sequence[Any]) -> Sequence[Any]:
    (body,), consts = equation.blocks, equation.params["consts"]
    carried = body.inputs[consts:]
    flags = carried[0]
    sharding = emitter.sharding(flags)
    atoms = tuple(a for dim in sharding.dims for a in dim)

    def step(*carry: Any) -> list[Any]:
        out = emitter.run(body, [*arrays[:consts], *carry])
        return [
            emitter.move(v, x, emitter.sharding(inner), equation)
            for v, x, inner in zip(body.outputs, out, carried, strict=True)
        ]

    once = jax.make_jaxpr(step)(*arrays[consts:])
    together = bool(sharding.unreduced) or _meets(once, frozenset(atoms))

    def go_on(carry: Any) -> Any:
        mine = emitter.move(flags, carry[0], Sharding(sharding.dims), equation)
        any_of_mine = jnp.any(_without_padding(mine, flags, sharding))
        return emitter.combine(any_of_mine, "or", atoms, equation) if together else any_of_mine

    return list(
        lax.while_loop(
            go_on,  # type: ignore[arg-type]
            lambda carry: jaxpr_as_fun(once)(*carry),
            list(arrays[consts:]),
        )
    )


def _without_padding(flags: Any, value: Value, sharding: Sharding) -> Any:
    for d, (n, atoms) in enumerate(zip(value.shape, sharding.dims, strict=True)):
        if atoms and n != flags.shape[d] * lax.axis_size(atoms):
            flags = mask(flags, d, n, atoms, False)
    return flags


def _meets(jaxpr: Any, atoms: frozenset[str]) -> bool:
    """Whether a per-device body communicates over some of these atoms, or has effects outside."""
    for eqn in closed(jaxpr)[0].eqns:
        inner = sub_jaxprs(eqn.params)
        if any(_meets(body, atoms) for body in inner):
            return True
        axes = named_axes(eqn)
        own = eqn.params.get("axis_name", ())  # a permutation names its axes, and has no effect that says so
        meeting = axes.union(own if isinstance(own, (tuple, list)) else (own,))
        if not inner and eqn.primitive.name != "axis_index" and meeting & atoms:
            return True
        if len(eqn.effects) > len(axes):
            return True
    return False


REGIONS[mapped_while_p.name] = Region(
    lambda params: [params["body"]],
    _edges,
    _entry,
    _leave,
    _emit,
    _crossings,
    decided=lambda equation: (equation.blocks[0].inputs[equation.params["consts"]],),
)
