"""Moves the arguments of a call into the buffers that its executable expects.

JAX's dispatch in C++ takes the buffers of committed arrays on as many devices as they are, so other calls go through
Python. Donated memory must belong to the call alone: a moved array is a copy, and none may be given twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format

from gshard.api.signature import arrays_of, refuse_twice
from gshard.core.errors import ShardingError, warn_once
from gshard.core.jax_adapter import no_mesh_set, user_line
from gshard.core.jax_adapter_dispatch import address_of, fast_path, input_layouts, layout_of, put_arguments
from gshard.core.memory_kinds import is_host_kind
from gshard.core.mesh import Mesh
from gshard.core.program import Program
from gshard.core.uneven import UnevenArray
from gshard.emit.compile import Executable


class Callee(Protocol):
    """What is called: ``api.lowered.Lowered``."""

    @property
    def executable(self) -> Executable: ...
    @property
    def program(self) -> Program: ...
    @property
    def mesh(self) -> Mesh: ...
    @property
    def argument_shardings(self) -> tuple[Any, ...]: ...
    @property
    def donated(self) -> frozenset[int]: ...
    @property
    def unread(self) -> frozenset[int]: ...
    @property
    def out_tree(self) -> Any: ...
    @property
    def closed_over(self) -> Sequence[Any]: ...
    @property
    def told(self) -> set[str]: ...
    @property
    def moved(self) -> set[int]: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Placed:
    """The arguments of one call."""

    arrays: list[Any]  # the flat arguments where the executable expects them; those that it does not read as they came
    by_dispatch: bool  # whether JAX's dispatch in C++ brings arguments that lie like these to the same place


def placed_arguments(callee: Callee, leaves: Sequence[Any]) -> Placed:
    """Moves flat arguments to where the program expects them; donated ones share no memory with anything else."""
    if callee.program.references:
        leaves = [*leaves, *callee.closed_over]
        refuse_twice(leaves, lambda: callee.program.names[len(callee.program.captured) :], callee.program.name)
        leaves = arrays_of(leaves)
    callee.executable.agree()  # to move an array may take collectives as well
    donated, unread, targets = callee.donated, callee.unread, callee.argument_shardings
    layouts = input_layouts(callee.executable.compiled, len(callee.program.captured))
    _check(callee, leaves)
    arrays = [x.padded if isinstance(x, UnevenArray) else x for x in leaves]
    moved = [i for i, x in enumerate(arrays) if i not in unread and not _lies_so(x, targets[i], layouts.get(i))]
    if not moved:
        return Placed(arrays, True)
    dispatched = not _tell(callee, moved, arrays)
    with no_mesh_set():  # with one set JAX copies and moves no array of other devices, or of another order of them
        for i in moved:
            copied = i in donated and callee.mesh.size > 1
            # C++ makes no copy of a donated array that lies on one of the devices already.
            dispatched = dispatched and not copied and not _is_taken_as_it_is(arrays[i], targets[i], layouts.get(i))
            copy = jnp.array if isinstance(arrays[i], jax.Array) else np.array
            arrays[i] = _in_memory_of(targets[i], copy(arrays[i], copy=True) if copied else arrays[i])
        for i, x in zip(moved, put_arguments([arrays[i] for i in moved], [targets[i] for i in moved]), strict=True):
            layout = layouts.get(i)
            arrays[i] = x if layout is None or layout_of(x) == layout else jax.device_put(x, Format(layout, targets[i]))
    return Placed(arrays, dispatched)


def _in_memory_of(target: Any, x: Any) -> Any:
    """An array in the kind of memory of a sharding: JAX changes the memory, or the order of devices, one at a time."""
    if not isinstance(x, jax.Array) or x.sharding.memory_kind == target.memory_kind:
        return x
    return jax.device_put(x, x.sharding.with_memory_kind(target.memory_kind))


def _tell(callee: Callee, moved: Sequence[int], arrays: Sequence[Any]) -> bool:
    """Warns of committed arguments that are moved again; whether others are, so that the next call comes here too."""
    names, targets = callee.program.names[len(callee.program.captured) :], callee.argument_shardings
    committed = [i for i in moved if isinstance(arrays[i], jax.Array) and arrays[i].committed]
    again = [f"{names[i]}: from {arrays[i].sharding} to {targets[i]}" for i in committed if i in callee.moved]
    hint = f"Place them once before, with jax.device_put. The call is at {user_line()}." if again else ""
    warn_once(callee.program.name, callee.told, "moves arguments in each call:", again, hint)
    is_first = not callee.moved.issuperset(committed)
    callee.moved.update(committed)
    return is_first


def by_dispatch(callee: Callee, placed: Placed, leaves: Sequence[Any], results: Sequence[Any]) -> Any:
    """What JAX's dispatch in C++ runs from now on for arguments that lie like these; None if each call needs Python."""
    executable = callee.executable
    reordered = executable.spmd.in_orders or executable.spmd.out_orders
    ours = callee.program.references or any(isinstance(x, UnevenArray) for x in (*results, *leaves))
    if ours or reordered or not placed.by_dispatch:
        return None
    return fast_path(executable.compiled, callee.out_tree, results, executable.captured, len(leaves))


def is_on_cpu(callee: Callee) -> bool:
    """Whether a program runs on CPU devices, whose XLA may crash on arrays that were overwritten."""
    return any(d.platform == "cpu" for d in callee.mesh.devices or ())


def captured_arrays(callee: Callee) -> list[Any]:
    """The captured arrays as they were placed, and those of the user's that share their memory."""
    placed = callee.executable.captured
    own = zip(callee.program.captured, placed, strict=True)
    return [*placed, *(x for x, copy in own if address_of(x) == address_of(copy))]


def _lies_so(x: Any, target: Any, layout: Any) -> bool:
    """Whether an array's buffers are the ones that are expected: devices, their order, memory, parts and layout."""
    if not isinstance(x, jax.Array):
        return False
    same = x.sharding == target or x.sharding.is_equivalent_to(target, x.ndim)
    return same and (layout is None or layout_of(x) == layout)


def _is_taken_as_it_is(x: Any, target: Any, layout: Any) -> bool:
    """Whether JAX's dispatch in C++ runs on the buffers of an array that lies otherwise than expected.

    What must be in the memory of the host is not left to it: on devices with one memory that would go unnoticed.
    """
    if is_host_kind(target.memory_kind):
        return True
    if not isinstance(x, jax.Array):
        return False
    if layout is not None and layout_of(x) != layout:
        return True
    return x.committed and len(x.sharding.addressable_devices) == len(target.addressable_devices)


def _check(callee: Callee, leaves: Sequence[Any]) -> None:
    captured, names = callee.executable.captured, callee.program.names
    for i, x in enumerate((*captured, *leaves), -len(captured)):
        if (i not in callee.unread or i in callee.donated) and getattr(x, "is_deleted", bool)():
            was, hint = (
                ("was given", "Use the earlier call's result") if i >= 0 else ("closes over", "Pass it as an argument")
            )
            raise ShardingError.like(
                RuntimeError(),
                f"{callee.program.name} {was} an array that an earlier call has overwritten, as "
                f"{names[len(captured) + i]}.",
                user_line(),
                hint=f"{hint}, or do not donate it.",
            )
    at = {address_of(x): i for i, x in enumerate(captured, -len(captured))} if callee.donated else {}
    for i, (x, target) in enumerate(zip(leaves, callee.argument_shardings, strict=True)) if callee.donated else ():
        first = at.setdefault(address_of(x), i) if _is_at(x, target) else i
        if first != i and {first, i} & callee.donated:
            raise ShardingError.like(
                RuntimeError(),
                f"{callee.program.name} may overwrite an array that it was given twice, as "
                f"{names[len(captured) + first]} and {names[len(captured) + i]}.",
                user_line(),
                f"donated: {', '.join(names[len(captured) + k] for k in sorted(callee.donated))}",
                "Give a copy (jnp.copy), or do not donate it.",
            )


def _is_at(x: Any, target: Any) -> bool:
    """Whether an array is on the devices of a sharding as this says, in whatever words."""
    if isinstance(x, UnevenArray):
        return bool(x.sharding == target)
    return isinstance(x, jax.Array) and x.sharding.is_equivalent_to(target, x.ndim)
