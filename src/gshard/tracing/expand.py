"""Expands equations before rules are looked up: opens calls, takes random bits apart.

A call (jit, a custom derivative, rematerialisation) is nothing but its body. Random bits are counters and integer
arithmetic: taken apart, the counters split like any other array made from nothing. A linear solve with derivatives of
its own is its solver, a sum over an axis that ``vmap`` named a sum over a dimension.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec

from gshard.core.errors import ShardingError
from gshard.core.jax_adapter import (
    body_of_call,
    closed,
    expand_high_primitive,
    expand_random_bits,
    shapes_of,
    user_line,
)
from gshard.core.jax_adapter_context import compute_on_p
from gshard.core.mark import Mark
from gshard.core.partition_spec import words_of
from gshard.core.program import Block
from gshard.rules.callback import WITH_A_DEVICE
from gshard.rules.sorted_search import sorted_search
from gshard.tracing.mapped_while import written_out
from gshard.tracing.put import put_apart

_DEVICE = jax.memory.Space.Device


def expansion(name: str, params: dict[str, Any], in_avals: list[Any]) -> tuple[Any, tuple[Any, ...]] | None:
    """The jaxpr (and its constants) that stands for an equation, or None if it stands for itself."""
    if name == "random_bits":
        return closed(expand_random_bits(in_avals[0], params["bit_width"], params["shape"]))
    if name == "call_hi_primitive":
        return closed(expand_high_primitive(params, in_avals))
    if name == "device_put":
        apart = put_apart(params, in_avals, mark_of_named_sharding)
        return None if apart is None else closed(apart)
    if name == "while":
        loop = written_out(params, in_avals)
        return None if loop is None else closed(loop)
    if name == "custom_linear_solve":
        return _solve(params, in_avals)
    if name == "compute_on" and any(space != _DEVICE for space in params["out_memory_spaces"]):
        return _computed_on(params, in_avals)
    if name in _REDUCERS and not any(isinstance(axis, str) for axis in params["axes"]):
        return _reduced(_REDUCERS[name], params["axes"], in_avals)
    if (search := sorted_search(params, in_avals)) is not None:
        return closed(search)
    body = body_of_call(name, params)
    return None if body is None else closed(body)


_REDUCERS = {"psum": lax.reduce_sum, "pmax": lax.reduce_max, "pmin": lax.reduce_min}


def _reduced(reducer: Callable[..., Any], axes: tuple[int, ...], in_avals: list[Any]) -> tuple[Any, tuple[Any, ...]]:
    """A collective over an axis that ``vmap`` named is a reduction of the dimensions it maps over."""
    return closed(jax.make_jaxpr(lambda *arrays: [reducer(x, axes) for x in arrays])(*shapes_of(in_avals)))


def _solve(params: dict[str, Any], in_avals: list[Any]) -> tuple[Any, tuple[Any, ...]]:
    """A linear solve is its solver, applied to the arrays that it has captured and the right-hand sides."""
    counts = params["const_lengths"]
    first, last = counts.matvec + counts.vecmat, sum(counts)

    def solver(*arrays: Any) -> list[Any]:
        return jaxpr_as_fun(params["jaxprs"].solve)(*arrays[first : first + counts.solve], *arrays[last:])

    return closed(jax.make_jaxpr(solver)(*shapes_of(in_avals)))


def _computed_on(params: dict[str, Any], in_avals: list[Any]) -> tuple[Any, tuple[Any, ...]]:
    """What ``compute_on`` computes, put into the memories that it names for its results."""
    spaces = params["out_memory_spaces"]
    computed = {**params, "out_memory_spaces": (_DEVICE,) * len(spaces)}

    def placed(*arrays: Any) -> list[Any]:
        made = compute_on_p.bind(*arrays, **computed)
        return [x if space == _DEVICE else jax.device_put(x, space) for x, space in zip(made, spaces, strict=True)]

    return closed(jax.make_jaxpr(placed)(*shapes_of(in_avals)))


def needs_barrier(name: str, params: dict[str, Any]) -> bool:
    """Whether a call's operands must be hidden from common-subexpression elimination: rematerialisation."""
    return name in ("remat2", "checkpoint") and bool(params.get("prevent_cse")) and bool(params.get("differentiated"))


def without_shardings(name: str, params: dict[str, Any]) -> dict[str, Any]:
    """The parameters of an equation without what JAX wrote down where it saw arguments that are on a mesh.

    On one device's parts that means nothing. The sharding of a callback is the user's: it names the device that calls.
    """
    if name in WITH_A_DEVICE:
        return params
    return {k: None if k in ("sharding", "out_sharding") else v for k, v in params.items()}


def mark_of_equation(name: str, params: dict[str, Any], shape: tuple[int, ...]) -> Mark | None:
    """The mark that an equation is: one of ours, or a sharding constraint of JAX's over a mesh."""
    if name == "gshard_mark":
        return params["mark"]  # type: ignore[no-any-return]
    if name == "sharding_constraint":
        return mark_of_any_sharding(params["sharding"], shape)
    if name == "reshard":
        return mark_of_type(params["dst_sharding"], len(shape))
    return None


def mark_of_type(sharding: Any, ndim: int) -> Mark | None:
    """What the sharding in an array's type says, where its mesh has axes of type Explicit; None if that is nothing."""
    mesh = getattr(sharding, "mesh", None)
    if mesh is None or mesh.empty or not mesh.explicit_axes:
        return None
    mark = mark_of_named_sharding(sharding, ndim)
    if not mesh.auto_axes:
        return mark
    open_dim = PartitionSpec.UNCONSTRAINED  # what an axis of type Auto does is not in the type
    return dataclasses.replace(mark, spec=tuple(open_dim if entry is None else entry for entry in mark.spec))


def mark_of_any_sharding(sharding: Any, shape: tuple[int, ...], leaf: str = "") -> Mark:
    """Any sharding of JAX's, of an array of this shape, as a mark.

    A ``NamedSharding`` is read by its axes, any other (``SingleDeviceSharding``, XLA's own) by the devices that hold
    each part.

    Raises:
        ShardingError: it asks for unreduced values.
    """
    if isinstance(sharding, NamedSharding):
        return mark_of_named_sharding(sharding, len(shape), leaf)
    divides = (sharding.num_devices,) * len(shape)  # which device holds which part does not depend on their sizes
    held = {d: tuple(i.start or 0 for i in index) for d, index in sharding.devices_indices_map(divides).items()}
    parts = tuple(len(set(starts)) for starts in zip(*held.values(), strict=True))
    names = [f"dimension {d}" for d in range(len(shape))]
    axes = (*zip(names, parts, strict=True), ("copies", len(held) // math.prod(parts)))
    spec = tuple(name if n > 1 else None for name, n in zip(names, parts, strict=True))
    devices = tuple(sorted(held, key=held.__getitem__))  # part by part, the last dimension fastest
    return Mark("spec", spec=spec, axes=axes, devices=devices, leaf=leaf, said=str(sharding))


def mark_of_result(aval: Any, i: int, block: Block) -> Mark | None:
    """What the type of result ``i`` of a program says, as ``mark_of_type``.

    Raises:
        ShardingError: it says that the result is unreduced or reduced: an array outside of a program is finished.
    """
    mark = mark_of_type(getattr(aval, "sharding", None), len(block.outputs[i].shape))
    if mark is not None and (mark.unreduced or mark.reduced):
        raise ShardingError(
            f"result {i} is {'unreduced' if mark.unreduced else 'reduced'}, and what leaves a program is finished.",
            next((e.line for e in block.equations if block.outputs[i] in e.outputs), ""),
            f"{aval.str_short(short_dtypes=True)}, {mark.spec_text}",
            "Finish it before it is returned: jax.sharding.reshard(y, P(...)).",
        )
    return mark


def marks_of_parts(eqn: Any, source: Any) -> Iterator[tuple[Any, Mark]]:
    """The results whose types say that they are unreduced over axes over which no operand is, each as a mark.

    An ``out_sharding`` of a product says so, or a look-up's derivative. What marks say is a mark in any case.

    Raises:
        ShardingError: a ``shard_map`` takes or gives unreduced values.
    """
    if "out_specs" in eqn.params:
        _refuse_in_parts((*eqn.params["in_specs"], *eqn.params["out_specs"]), source)
    found = [(v, axes) for v in eqn.outvars if (axes := _unreduced_axes(v.aval))]
    if not found or eqn.primitive.name in _MARKS:
        return
    have = frozenset[str]().union(*(_unreduced_axes(v.aval) for v in eqn.invars))
    for v, axes in found:
        if axes - have and (mark := mark_of_type(v.aval.sharding, len(v.aval.shape))) is not None:
            yield v, mark


def _refuse_in_parts(specs: Iterable[Any], source: Any) -> None:
    for spec in specs:
        if getattr(spec, "unreduced", None) or getattr(spec, "reduced", None):
            raise ShardingError(
                "a shard_map inside of the program takes or gives values that are unreduced or reduced.",
                user_line(source),
                str(spec),
                "Give finished values, and add parts up inside of it, by jax.lax.psum.",
            )


_MARKS = ("gshard_mark", "sharding_constraint", "reshard")


def _unreduced_axes(aval: Any) -> frozenset[str]:
    spec = getattr(getattr(aval, "sharding", None), "spec", None)
    return frozenset(getattr(spec, "unreduced", None) or ())


def mark_of_named_sharding(sharding: NamedSharding, ndim: int, leaf: str = "") -> Mark:
    """A ``NamedSharding`` as a mark; its axes are looked up in the mesh by name, or by the devices along them.

    Raises:
        ShardingError: it asks for unreduced values.
    """
    entries, more = words_of(sharding.spec)
    spec = (*entries, *(None,) * (ndim - len(entries)))
    axes = tuple((str(n), int(s)) for n, s in sharding.mesh.shape.items())
    concrete = isinstance(sharding.mesh, jax.sharding.Mesh)
    devices = tuple(sharding.mesh.devices.flat) if concrete else ()
    return Mark("spec", spec=spec, axes=axes, devices=devices, leaf=leaf, **more)
