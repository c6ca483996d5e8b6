"""Expands equations to simpler ones before rules are looked up, and converts those that mark or move arrays."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from jax.sharding import Sharding as JaxSharding

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
from gshard.core.mark import Mark, words_of
from gshard.core.memory_kinds import is_in_host_space, is_on_host
from gshard.core.program import Block
from gshard.language.mark_primitive import bind_mark
from gshard.language.transfer import is_transfer, transferred
from gshard.rules.callback import WITH_A_DEVICE

# Separates ``jax.device_put`` inside a program into a mark and a transfer.


def put_apart(params: dict[str, Any], in_avals: list[Any]) -> Any | None:
    """The closed jaxpr of marks and transfers that replaces a ``device_put``; None if it is a single transfer."""
    if is_transfer(params, in_avals):
        return None
    marks_and_memories = list(map(_mark_and_memory, params["devices"], in_avals))

    def put(*arrays: Any) -> list[Any]:
        results = []
        for x, (mark, to_host) in zip(arrays, marks_and_memories, strict=True):
            if mark is not None and to_host:
                x = bind_mark(x, mark)
            if is_on_host(x) != to_host:
                x = transferred(x, to_host)
            results.append(x if mark is None or to_host else bind_mark(x, mark))
        return results

    return jax.make_jaxpr(put)(*shapes_of(in_avals))


def _mark_and_memory(target: Any, aval: Any) -> tuple[Mark | None, bool]:
    """The mark of one operand, and whether its result is in host memory."""
    on_host = is_on_host(aval)
    if target is None or isinstance(target, jax.Device):
        return None, on_host  # inside a program JAX ignores a single device
    if isinstance(target, jax.memory.Space):
        if target not in (jax.memory.Space.Host, jax.memory.Space.Device):
            raise _refused(f"memory space {target.name} is none that an array can be put in.", target)
        return None, target is jax.memory.Space.Host
    if not isinstance(target, JaxSharding):
        raise _refused(f"jax.device_put inside a program does not read a {type(target).__name__}.", target)
    to_host = on_host if target.memory_kind is None else is_in_host_space(target.memory_kind)
    if isinstance(target, NamedSharding):
        return mark_of_named_sharding(target, len(aval.shape)), to_host
    if isinstance(target, SingleDeviceSharding):
        (device,) = target.device_set
        whole = (None,) * len(aval.shape)
        return Mark(spec=whole, axes=(("device", 1),), devices=(device,)), to_host
    raise _refused(f"jax.device_put inside a program does not read a {type(target).__name__}.", target)


def _refused(what: str, target: Any) -> ShardingError:
    return ShardingError(
        what, user_line(), f"{target}"[:200], "Give a jax.sharding.NamedSharding, or a jax.memory.Space (Device, Host)."
    )


def written_out(params: dict[str, Any], in_avals: Sequence[Any]) -> Any | None:
    """The jaxpr that replaces a ``while`` with one flag for each example; None for a ``while`` with a single flag.

    ``vmap`` makes such loops, whose examples end at different times: the last one ends the loop.
    """
    condition = params["cond_jaxpr"]
    if not closed(condition)[0].outvars[0].aval.shape:
        return None
    cond_consts = params["cond_nconsts"]
    count = cond_consts + params["body_nconsts"]  # of all constants

    def loop(*arrays: Any) -> list[Any]:
        consts = arrays[:count]

        def flags_of(carry: Sequence[Any]) -> Any:
            return jaxpr_as_fun(condition)(*consts[:cond_consts], *carry)[0]

        def step(state: tuple[Any, list[Any]]) -> tuple[Any, list[Any]]:
            flags, carry = state
            results = jaxpr_as_fun(params["body_jaxpr"])(*consts[cond_consts:], *carry)
            # New values for examples whose flag is set. The examples are the leading dimensions.
            new_carry = [
                old if new is old else lax.select(lax.broadcast_in_dim(flags, old.shape, range(flags.ndim)), new, old)
                for new, old in zip(results, carry, strict=True)
            ]
            return flags_of(new_carry), new_carry

        start = list(arrays[count:])
        return list(lax.while_loop(lambda state: jnp.any(state[0]), step, (flags_of(start), start))[1])

    return jax.make_jaxpr(loop)(*shapes_of(in_avals))


_DEVICE = jax.memory.Space.Device


def expansion(name: str, params: dict[str, Any], in_avals: list[Any]) -> tuple[Any, tuple[Any, ...]] | None:
    """The jaxpr that replaces an equation, and its constants; None for an equation that stays."""
    if name == "random_bits":
        return closed(expand_random_bits(in_avals[0], params["bit_width"], params["shape"]))
    if name == "call_hi_primitive":
        return closed(expand_high_primitive(params, in_avals))
    if name == "reshard" and _adds_no_mark(params["dst_sharding"], in_avals[0]):
        return closed(jax.make_jaxpr(lambda x: x)(*shapes_of(in_avals)))
    if name == "device_put":
        apart = put_apart(params, in_avals)
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
    body = body_of_call(name, params)
    return None if body is None else closed(body)


def _adds_no_mark(destination: Any, aval: Any) -> bool:
    """Whether a reshard has no effect.

    If arguments are on a mesh, JAX adds reshards to constants, such as the 1.0 with which a gradient begins. Such a
    reshard names no axis, so the program is the same whether or not its arguments are on a mesh.
    """
    mark = mark_of_type(destination, len(aval.shape))
    if mark is None:
        return True  # no axis of the mesh is of type Explicit
    return not (aval.shape or mark.unreduced or mark.reduced or _unreduced_axes(aval))


_REDUCERS = {"psum": lax.reduce_sum, "pmax": lax.reduce_max, "pmin": lax.reduce_min}


def _reduced(reducer: Callable[..., Any], axes: tuple[int, ...], in_avals: list[Any]) -> tuple[Any, tuple[Any, ...]]:
    """A collective over an axis that ``vmap`` named, as a reduction of the dimensions that ``vmap`` maps over."""
    return closed(jax.make_jaxpr(lambda *arrays: [reducer(x, axes) for x in arrays])(*shapes_of(in_avals)))


def _solve(params: dict[str, Any], in_avals: list[Any]) -> tuple[Any, tuple[Any, ...]]:
    """The solver of a linear solve, applied to its captured arrays and the right-hand sides."""
    counts = params["const_lengths"]
    first, last = counts.matvec + counts.vecmat, sum(counts)

    def solver(*arrays: Any) -> list[Any]:
        return jaxpr_as_fun(params["jaxprs"].solve)(*arrays[first : first + counts.solve], *arrays[last:])

    return closed(jax.make_jaxpr(solver)(*shapes_of(in_avals)))


def _computed_on(params: dict[str, Any], in_avals: list[Any]) -> tuple[Any, tuple[Any, ...]]:
    """A ``compute_on`` with results in device memory, followed by transfers to the memories of its results."""
    spaces = params["out_memory_spaces"]
    computed = {**params, "out_memory_spaces": (_DEVICE,) * len(spaces)}

    def placed(*arrays: Any) -> list[Any]:
        results = compute_on_p.bind(*arrays, **computed)
        return [x if space == _DEVICE else jax.device_put(x, space) for x, space in zip(results, spaces, strict=True)]

    return closed(jax.make_jaxpr(placed)(*shapes_of(in_avals)))


def needs_barrier(name: str, params: dict[str, Any]) -> bool:
    """Whether a barrier must hide the operands of a call from common-subexpression elimination: rematerialisation."""
    return name in ("remat2", "checkpoint") and bool(params.get("prevent_cse")) and bool(params.get("differentiated"))


def without_shardings(name: str, params: dict[str, Any]) -> dict[str, Any]:
    """The parameters of an equation without the shardings that JAX recorded for arguments on a mesh.

    These shardings have no meaning for one device's part. The sharding of a callback stays: the user states there which
    device calls.
    """
    if name in WITH_A_DEVICE:
        return params
    return {k: None if k in ("sharding", "out_sharding") else v for k, v in params.items()}


def mark_of_equation(name: str, params: dict[str, Any], shape: tuple[int, ...]) -> Mark | None:
    """The mark of an equation that is a gshard mark or a sharding constraint of JAX; None for other equations."""
    if name == "gshard_mark":
        return params["mark"]  # type: ignore[no-any-return]
    if name == "sharding_constraint":
        return mark_of_any_sharding(params["sharding"], shape)
    if name == "reshard":
        return mark_of_type(params["dst_sharding"], len(shape))
    return None


def mark_of_type(sharding: Any, ndim: int) -> Mark | None:
    """The mark for the sharding in an array's type, if its mesh has axes of type Explicit; otherwise None."""
    mesh = getattr(sharding, "mesh", None)
    if mesh is None or mesh.empty or not mesh.explicit_axes:
        return None
    mark = mark_of_named_sharding(sharding, ndim)
    if not mesh.auto_axes:
        return mark
    open_dim = PartitionSpec.UNCONSTRAINED  # the type does not contain axes of type Auto
    return dataclasses.replace(mark, spec=tuple(open_dim if entry is None else entry for entry in mark.spec))


def mark_of_any_sharding(sharding: Any, shape: tuple[int, ...], leaf: str = "") -> Mark:
    """The mark for any JAX sharding of an array.

    A ``NamedSharding`` is read by its axes. Other shardings (``SingleDeviceSharding``, XLA's own) are read by the
    devices that hold each part.
    """
    if isinstance(sharding, NamedSharding):
        return mark_of_named_sharding(sharding, len(shape), leaf)
    divisible_shape = (sharding.num_devices,) * len(shape)  # the devices of a part do not depend on its size
    indices = sharding.devices_indices_map(divisible_shape)
    starts_of = {device: tuple(i.start or 0 for i in index) for device, index in indices.items()}
    parts = tuple(len(set(starts)) for starts in zip(*starts_of.values(), strict=True))
    names = [f"dimension {d}" for d in range(len(shape))]
    axes = (*zip(names, parts, strict=True), ("copies", len(starts_of) // math.prod(parts)))
    spec = tuple(name if n > 1 else None for name, n in zip(names, parts, strict=True))
    devices = tuple(sorted(starts_of, key=starts_of.__getitem__))  # part by part, the last dimension fastest
    return Mark(spec=spec, axes=axes, devices=devices, leaf=leaf, source_text=str(sharding))


def mark_of_result(aval: Any, i: int, block: Block) -> Mark | None:
    """The mark for the type of result ``i`` of a program (``mark_of_type``)."""
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
    """Marks for results whose types are unreduced over axes over which no operand is unreduced.

    Such types come from an ``out_sharding`` of a product, or from the derivative of a look-up. Equations that are marks
    are skipped.
    """
    if "out_specs" in eqn.params:
        _refuse_unreduced((*eqn.params["in_specs"], *eqn.params["out_specs"]), source)
    unreduced = [(v, axes) for v in eqn.outvars if (axes := _unreduced_axes(v.aval))]
    if not unreduced or eqn.primitive.name in _MARKS:
        return
    axes_of_operands = frozenset[str]().union(*(_unreduced_axes(v.aval) for v in eqn.invars))
    for v, axes in unreduced:
        if not axes - axes_of_operands:
            continue
        mark = mark_of_type(v.aval.sharding, len(v.aval.shape))
        if mark is not None:
            yield v, mark


def _refuse_unreduced(specs: Iterable[Any], source: Any) -> None:
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
    """The mark for a ``NamedSharding``. It is resolved by the names of its axes, or by the devices along them."""
    entries, unreduced_and_reduced = words_of(sharding.spec)
    spec = (*entries, *(None,) * (ndim - len(entries)))
    axes = tuple((str(name), int(size)) for name, size in sharding.mesh.shape.items())
    has_devices = isinstance(sharding.mesh, jax.sharding.Mesh)
    devices = tuple(sharding.mesh.devices.flat) if has_devices else ()
    return Mark(spec=spec, axes=axes, devices=devices, leaf=leaf, **unreduced_and_reduced)
