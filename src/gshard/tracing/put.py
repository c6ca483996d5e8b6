"""Takes ``jax.device_put`` inside a program apart into a mark and a transfer.

    jax.device_put(x, NamedSharding(mesh, P("data")))                                 a mark
    jax.device_put(x, jax.memory.Space.Host)                                          a transfer (language.transfer)
    jax.device_put(x, NamedSharding(mesh, P("data"), memory_kind="pinned_host"))      both
    jax.device_put(x)                                                                 nothing

What is moved between devices is moved while it is in their memory: a mark stands before a transfer to the host and
after one from it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding

from gshard.core.errors import ShardingError
from gshard.core.jax_adapter import shapes_of, user_line
from gshard.core.mark import Mark
from gshard.core.memory_kinds import is_in_host_space, is_on_host
from gshard.language.mark_primitive import bind_mark
from gshard.language.transfer import is_transfer, transferred


def put_apart(params: dict[str, Any], in_avals: list[Any], mark_of: Callable[..., Mark]) -> Any | None:
    """The closed jaxpr of marks and transfers that a ``device_put`` is; None if it is one transfer already.

    Args:
        params: its parameters.
        in_avals: the types of its operands.
        mark_of: the mark that a ``NamedSharding`` is, for an array of so many dimensions.

    Raises:
        ShardingError: it names a memory, a layout or a kind of sharding that gshard has no mark for.
    """
    if is_transfer(params, in_avals):
        return None
    said = [_said(target, aval, mark_of) for target, aval in zip(params["devices"], in_avals, strict=True)]

    def put(*arrays: Any) -> list[Any]:
        results = []
        for x, (mark, to_host) in zip(arrays, said, strict=True):
            if mark is not None and to_host:
                x = bind_mark(x, mark)
            if is_on_host(x) != to_host:
                x = transferred(x, to_host)
            results.append(x if mark is None or to_host else bind_mark(x, mark))
        return results

    return jax.make_jaxpr(put)(*shapes_of(in_avals))


def _said(target: Any, aval: Any, mark_of: Callable[..., Mark]) -> tuple[Mark | None, bool]:
    """The mark of one operand, and whether its result is in the memory of the host."""
    here = is_on_host(aval)
    if target is None or isinstance(target, jax.Device):
        return None, here  # JAX itself gives a single device no meaning inside of a program
    if isinstance(target, jax.memory.Space):
        if target not in (jax.memory.Space.Host, jax.memory.Space.Device):
            raise _refused(f"memory space {target.name} is none that an array can be put in.", target)
        return None, target is jax.memory.Space.Host
    if not isinstance(target, Sharding):
        raise _refused(f"jax.device_put inside a program does not read a {type(target).__name__}.", target)
    to_host = here if target.memory_kind is None else is_in_host_space(target.memory_kind)
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
