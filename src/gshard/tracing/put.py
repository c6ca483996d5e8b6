"""Separates ``jax.device_put`` inside a program into a mark and a transfer.

    jax.device_put(x, NamedSharding(mesh, P("data")))                                 a mark
    jax.device_put(x, jax.memory.Space.Host)                                          a transfer (language.transfer)
    jax.device_put(x, NamedSharding(mesh, P("data"), memory_kind="pinned_host"))      both
    jax.device_put(x)                                                                 nothing

Values move between devices only in device memory. So the mark precedes a transfer to the host, and follows a transfer
from the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import Sharding as JaxSharding

from gshard.core.errors import ShardingError
from gshard.core.jax_adapter import shapes_of, user_line
from gshard.core.mark import Mark
from gshard.core.memory_kinds import is_in_host_space, is_on_host
from gshard.language.mark_primitive import bind_mark
from gshard.language.transfer import is_transfer, transferred


def put_apart(params: dict[str, Any], in_avals: list[Any], mark_of: Callable[..., Mark]) -> Any | None:
    """The closed jaxpr of marks and transfers that replaces a ``device_put``; None if it is a single transfer."""
    if is_transfer(params, in_avals):
        return None
    targets = zip(params["devices"], in_avals, strict=True)
    marks_and_memories = [_mark_and_memory(target, aval, mark_of) for target, aval in targets]

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


def _mark_and_memory(target: Any, aval: Any, mark_of: Callable[..., Mark]) -> tuple[Mark | None, bool]:
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
        return mark_of(target, len(aval.shape)), to_host
    if isinstance(target, SingleDeviceSharding):
        (device,) = target.device_set
        whole = (None,) * len(aval.shape)
        return Mark("spec", spec=whole, axes=(("device", 1),), devices=(device,)), to_host
    raise _refused(f"jax.device_put inside a program does not read a {type(target).__name__}.", target)


def _refused(what: str, target: Any) -> ShardingError:
    return ShardingError(
        what, user_line(), f"{target}"[:200], "Give a jax.sharding.NamedSharding, or a jax.memory.Space (Device, Host)."
    )
