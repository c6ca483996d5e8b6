"""Rewrites a while loop under ``vmap`` whose examples end at different times.

The condition of such a loop has one flag for each example. JAX iterates as long as any flag is set, and changes only
the examples whose flag is set. gshard makes this explicit in one equation with one body

    flags, *carry  ->  flags, *carry        selects new values by the flags, then computes the flags again

so that flags and selections have shardings like all values. Examples are independent. If the body does not communicate,
each device iterates until its own examples have ended, and no flags are combined. If the body communicates over some
atoms, all devices along these atoms run the same number of iterations.

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
from gshard.core.program import Edge, Equation, Value
from gshard.core.sharding import Sharding
from gshard.language.region import REGIONS, Crossing, Emitter, Region, ShardingOf, crossing, edge, moved_to

mapped_while_p = Primitive("mapped_while")
mapped_while_p.multiple_results = True


@mapped_while_p.def_effectful_abstract_eval
def _results(*avals: Any, body: Any, consts: int) -> tuple[list[Any], Any]:
    return [v.aval for v in closed(body)[0].outvars], closed(body)[0].effects


def written_out(params: dict[str, Any], in_avals: Sequence[Any]) -> Any | None:
    """The jaxpr that replaces a ``while`` with one flag for each example; None for a ``while`` with a single flag."""
    condition = params["cond_jaxpr"]
    if not closed(condition)[0].outvars[0].aval.shape:
        return None
    cond_consts = params["cond_nconsts"]
    count = cond_consts + params["body_nconsts"]  # of all constants
    condition_function = jaxpr_as_fun(condition)
    body_function = jaxpr_as_fun(params["body_jaxpr"])

    def flags_of(consts: Sequence[Any], carry: Sequence[Any]) -> Any:
        return condition_function(*consts[:cond_consts], *carry)[0]

    def step(*arrays: Any) -> list[Any]:
        consts, flags, carry = arrays[:count], arrays[count], arrays[count + 1 :]
        results = body_function(*consts[cond_consts:], *carry)
        new_carry = [_selected(flags, new, old) for new, old in zip(results, carry, strict=True)]
        return [flags_of(consts, new_carry), *new_carry]

    def loop(*arrays: Any) -> list[Any]:
        consts, start = arrays[:count], arrays[count:]
        flags = flags_of(consts, start)
        body = jax.make_jaxpr(step)(*shapes_of(in_avals[:count]), flags, *shapes_of(in_avals[count:]))
        return list(mapped_while_p.bind(*consts, flags, *start, body=body, consts=count))[1:]

    return jax.make_jaxpr(loop)(*shapes_of(in_avals))


def _selected(flags: Any, new: Any, old: Any) -> Any:
    """``new`` for examples whose flag is set, ``old`` for the others. The examples are the leading dimensions."""
    if new is old:
        return old
    return lax.select(lax.broadcast_in_dim(flags, old.shape, range(flags.ndim)), new, old)


def _edges(equation: Equation) -> list[Edge]:
    (body,), consts = equation.blocks, equation.params["consts"]
    edges: list[Edge] = []
    for outer, inner in zip(equation.inputs, body.inputs, strict=True):
        edges += edge(outer, inner)
    for inner, end, result in zip(body.inputs[consts:], body.outputs, equation.outputs, strict=True):
        edges += edge(inner, end) + edge(result, inner)
    return edges


def _entry(equation: Equation, sharding: ShardingOf) -> list[Sharding]:
    return [sharding(v) for v in equation.blocks[0].inputs]


def _leave(equation: Equation, sharding: ShardingOf) -> list[Sharding]:
    return [sharding(v) for v in equation.blocks[0].inputs[equation.params["consts"] :]]


def _crossings(equation: Equation) -> list[Crossing]:
    (body,), consts = equation.blocks, equation.params["consts"]
    crossings = [crossing(x, v) for x, v in zip(equation.inputs, body.inputs, strict=True)]
    crossings += [crossing(x, v, each_round=True) for x, v in zip(body.outputs, body.inputs[consts:], strict=True)]
    crossings += [crossing(x, v, inward=False) for x, v in zip(equation.outputs, body.inputs[consts:], strict=True)]
    return [c for of_values in crossings for c in of_values]


def _emit(equation: Equation, emitter: Emitter, arrays: Sequence[Any]) -> Sequence[Any]:
    (body,), consts = equation.blocks, equation.params["consts"]
    carried = body.inputs[consts:]
    flags = carried[0]
    sharding = emitter.sharding(flags)
    atoms = tuple(a for dim in sharding.dims for a in dim)

    def step(*carry: Any) -> list[Any]:
        out = emitter.run(body, [*arrays[:consts], *carry])
        return moved_to(equation, emitter, body.outputs, out, carried)

    local_body = jax.make_jaxpr(step)(*arrays[consts:])
    all_iterate = bool(sharding.unreduced) or _communicates(local_body, frozenset(atoms))

    def go_on(carry: Any) -> Any:
        local_flags = emitter.move(flags, carry[0], Sharding(sharding.dims), equation)
        any_flag = jnp.any(_without_padding(local_flags, flags, sharding))
        return emitter.combine(any_flag, "or", atoms, equation) if all_iterate else any_flag

    return list(
        lax.while_loop(
            go_on,  # type: ignore[arg-type]
            lambda carry: jaxpr_as_fun(local_body)(*carry),
            list(arrays[consts:]),
        )
    )


def _without_padding(flags: Any, value: Value, sharding: Sharding) -> Any:
    for d, (n, atoms) in enumerate(zip(value.shape, sharding.dims, strict=True)):
        if atoms and n != flags.shape[d] * lax.axis_size(atoms):
            flags = mask(flags, d, n, atoms, False)
    return flags


def _communicates(jaxpr: Any, atoms: frozenset[str]) -> bool:
    """Whether a per-device body communicates over some of these atoms, or has other effects."""
    for eqn in closed(jaxpr)[0].eqns:
        inner = sub_jaxprs(eqn.params)
        if any(_communicates(body, atoms) for body in inner):
            return True
        axes = named_axes(eqn)
        axis_name = eqn.params.get("axis_name", ())  # the effects of a permute do not contain its axes
        all_axes = axes.union(axis_name if isinstance(axis_name, (tuple, list)) else (axis_name,))
        if not inner and eqn.primitive.name != "axis_index" and all_axes & atoms:
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
