"""Keeps the optimizer state of a training step in the memory of the host.

Arrays that only the update reads, such as the moments of Adam, are idle during the forward and the backward pass. The
step fetches each before its first use and sends its new value back at once, in the order of the results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
from jax.extend.core import Literal

from gshard.core.jax_adapter import as_if_at, bind, closed
from gshard.core.jax_adapter_context import context_of, in_context
from gshard.core.memory_kinds import is_on_host, shape_in_memory
from gshard.core.program import Program, Value
from gshard.device.fusion_model import is_product
from gshard.language.transfer import transferred

_LEAST = 1e-3  # of the bytes of the state: smaller arrays stay on the devices


def state_to_offload(program: Program, donated: Iterable[int]) -> dict[int, int]:
    """The arguments that can be in the memory of the host, each with the result that replaces it.

    They are arrays of the state that neither a product nor a loop depends on. As in JAX, results replace donated
    arguments of their shape and dtype in order.
    """
    first, inputs = len(program.captured), program.block.inputs
    number_of_result = {v: i for i, v in reversed(list(enumerate(program.block.outputs))) if isinstance(v, Value)}
    found = {
        i - first: number_of_result[after]
        for i, after in program.state([first + i for i in donated])
        if not inputs[i].on_host and _is_read_by_update_only(program, inputs[i])
    }
    total = sum(inputs[first + i].bytes for i in found)
    return {i: result for i, result in found.items() if inputs[first + i].bytes >= _LEAST * total}


def _is_read_by_update_only(program: Program, argument: Value) -> bool:
    """Whether no product and no region depends on an argument."""
    dependent = {argument}
    for e in program.block.equations:
        if dependent.isdisjoint(v for v in e.inputs if isinstance(v, Value)):
            continue
        if e.rule is None or is_product(e.rule):
            return False
        dependent.update(e.outputs)
    return True


def with_state_on_host(
    step: Callable[..., Any], results: Collection[int], static: Collection[int] = ()
) -> Callable[..., Any]:
    """A step whose arguments may be in the memory of the host."""

    @functools.wraps(step)
    def stepped(*args: Any) -> Any:
        numbers = [i for i in range(len(args)) if i not in static]
        leaves, tree = jax.tree.flatten([args[i] for i in numbers])

        def on_devices(*arrays: Any) -> Any:
            every = list(args)
            for i, given in zip(numbers, jax.tree.unflatten(tree, arrays), strict=True):
                every[i] = given
            return step(*every)

        types = [jax.typeof(x) for x in leaves]
        shapes = [
            shape_in_memory(t.shape, t.dtype, on_host=False, weak_type=bool(getattr(t, "weak_type", False)))
            for t in types
        ]
        jaxpr, shape = jax.make_jaxpr(on_devices, return_shape=True)(*shapes)
        return jax.tree.unflatten(jax.tree.structure(shape), _run(jaxpr, leaves, frozenset(results)))

    return stepped


def _run(jaxpr: Any, leaves: Sequence[Any], results: frozenset[int]) -> list[Any]:
    """Evaluates a jaxpr; it fetches arguments before they are read first, and sends results once they are computed."""
    body, consts = closed(jaxpr)
    env: dict[Any, Any] = dict(zip(body.constvars, consts, strict=True))
    env.update(zip(body.invars, leaves, strict=True))
    on_host = {v for v, x in zip(body.invars, leaves, strict=True) if is_on_host(x)}
    to_host = {v for i, v in enumerate(body.outvars) if i in results and not isinstance(v, Literal)}
    sent: dict[Any, Any] = {v: env[v] for v in to_host & on_host}

    def read(v: Any) -> Any:
        if isinstance(v, Literal):
            return v.val
        if v in on_host:
            env[v] = transferred(env[v], False)
            on_host.discard(v)
        return env[v]

    for eqn in _in_order(body, on_host):
        with as_if_at(eqn.source_info), in_context(context_of(eqn)):
            made = bind(eqn.primitive, eqn.params, [read(v) for v in eqn.invars])
            env.update(zip(eqn.outvars, made, strict=True))
            for v in eqn.outvars:
                if v in to_host:
                    sent[v] = transferred(env[v], True)
    return [
        (sent[v] if v in sent else transferred(read(v), True)) if i in results else read(v)
        for i, v in enumerate(body.outvars)
    ]


def _in_order(body: Any, on_host: Collection[Any]) -> Iterable[Any]:
    """The equations, those that depend on the state on the host last and in the order of the results.

    The order is the written one if one of these has an effect.
    """
    dependent, update = set(on_host), []
    for eqn in body.eqns:
        if any(not isinstance(v, Literal) and v in dependent for v in eqn.invars):
            dependent.update(eqn.outvars)
            update.append(eqn)
    if any(eqn.effects for eqn in update):
        return body.eqns  # type: ignore[no-any-return]
    producer = {v: eqn for eqn in update for v in eqn.outvars}
    late = {id(eqn) for eqn in update}
    ordered: dict[int, Any] = {id(eqn): eqn for eqn in body.eqns if id(eqn) not in late}
    for result in body.outvars:
        pending = [producer[result]] if not isinstance(result, Literal) and result in producer else []
        while pending:
            eqn = pending[-1]
            needed = [producer[v] for v in eqn.invars if not isinstance(v, Literal) and v in producer]
            waiting = [e for e in needed if id(e) not in ordered]
            if waiting:
                pending += reversed(waiting)
                continue
            ordered.setdefault(id(eqn), eqn)
            pending.pop()
    return ordered.values()
