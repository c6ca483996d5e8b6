"""Host memory: the arrays that a program keeps in host memory, and the transfers of a call.

Arrays of memory kind ``pinned_host`` or ``unpinned_host`` take no memory of a device. What is computed with them is
fetched, one device's part by each device, over the link between host and device.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

from gshard.core.memory_kinds import is_host_kind
from gshard.core.mesh import Mesh
from gshard.core.program import Block, Constant, Value, format_bytes, itemsize, type_text
from gshard.core.sharding import Sharding
from gshard.core.spmd import SpmdProgram
from gshard.device.fusion_model import device_program
from gshard.language.transfer import Transfer, changes_memory, transfers_of
from gshard.naming.array_names import ArrayNames

_SHOWN = 12  # rows of what moves


@dataclasses.dataclass(frozen=True)
class HostMemory:
    """What of a program is in the memory of the host."""

    arguments: tuple[int, int]  # bytes of the arguments there, whole and for each device
    results: tuple[int, int]  # the same of the results
    transfers: tuple[Transfer, ...]  # what moves between the memory of a device and that of the host
    # constraints that name the memory of the host; JAX and gshard read their shardings alone
    without_effect: tuple[str, ...] = ()

    @property
    def to_host(self) -> int:
        """Bytes that each device sends to the host in one call."""
        return sum(t.total_bytes for t in self.transfers if t.to_host)

    @property
    def from_host(self) -> int:
        """Bytes that each device fetches from the host in one call."""
        return sum(t.total_bytes for t in self.transfers if not t.to_host)

    @functools.cached_property
    def lines(self) -> list[str]:
        """The report as text; no line where nothing is on the host."""
        if not (self.transfers or self.arguments[0] or self.results[0] or self.without_effect):
            return []
        (whole, local), (left, left_local) = self.arguments, self.results
        lines = ["", "host memory"]
        for what, every, own in (("arguments", whole, local), ("results", left, left_local)):
            lines.append(f"  {what}: {format_bytes(every)} in all, {format_bytes(own)} for each device")
        moved = f"fetches {format_bytes(self.from_host)} from the host and sends {format_bytes(self.to_host)} to it"
        lines.append(f"  each device {moved} in one call")
        rows: dict[tuple[str, str, str, str], tuple[int, int]] = {}
        for t in self.transfers:
            key = ("to host" if t.to_host else "from host", t.shape, t.array, t.line)
            times, sent = rows.get(key, (0, 0))
            rows[key] = times + t.times, sent + t.total_bytes
        ordered = sorted(rows.items(), key=lambda row: -row[1][1])
        wide = max((len(array) for (*_, array, _), _ in ordered[:_SHOWN]), default=0)
        for (way, shape, array, line), (times, sent) in ordered[:_SHOWN]:
            lines.append(f"  {way:<18} x{times:<4} {format_bytes(sent):>10}  {shape:<24} {array:<{wide}}  {line}")
        if rest := ordered[_SHOWN:]:
            lines.append(f"  ... and {len(rest)} more rows with {format_bytes(sum(sent for _, (_, sent) in rest))}")
        return lines + [f"  {text}" for text in self.without_effect]


def host_memory(spmd: SpmdProgram, names: ArrayNames) -> HostMemory:
    """Reads off a per-device program what it keeps on the host."""
    program, mesh = spmd.program, spmd.mesh
    inputs, results = program.block.inputs, program.block.outputs
    come = [i for i in range(len(inputs)) if is_host_kind(program.input_memory(i))]
    leave = [i for i in range(len(results)) if is_host_kind(program.output_memory(i))]
    arguments = [(inputs[i], spmd.in_shardings[i]) for i in come]
    left = [(results[i], spmd.out_shardings[i]) for i in leave]
    moved = tuple(transfers_of(spmd.jaxpr))
    if moved:
        block = device_program(spmd).block
        own = ArrayNames.of_devices(block, program, names)
        values = [v for e in block.walk() if changes_memory(e) for v in e.inputs[:1] if isinstance(v, Value)]
        if [type_text(v) for v in values] == [t.shape for t in moved]:
            moved = tuple(dataclasses.replace(t, array=own.array(v).alike) for t, v in zip(moved, values, strict=True))
    return HostMemory(_bytes(arguments, mesh), _bytes(left, mesh), moved, tuple(_without_effect(program.block)))


def _without_effect(block: Block) -> Iterator[str]:
    """The constraints of JAX's that name a memory in which their value is not."""
    for e in block.walk():
        kind = getattr(e.params.get("sharding"), "memory_kind", None)
        if e.mark is not None and is_host_kind(kind) and not e.outputs[0].on_host:
            yield (
                f"{e.name} at {e.line} names memory {kind!r}, which has no effect, as in JAX: move the value with "
                "jax.device_put"
            )


def _bytes(arrays: Sequence[tuple[Value | Constant, Sharding]], mesh: Mesh) -> tuple[int, int]:
    """Bytes of some arrays, whole and of one device's parts."""
    whole = sum(math.prod(v.shape) * itemsize(v.dtype) for v, _ in arrays)
    return whole, sum(math.prod(s.local_shape(mesh, v.shape)) * itemsize(v.dtype) for v, s in arrays)
