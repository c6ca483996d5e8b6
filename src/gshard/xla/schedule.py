"""Schedule: reads which computation overlaps with the collectives of a compiled TPU program.

A computation's instructions stand in the order in which they run. Between the start of an asynchronous collective and
its end others run; one that does not come in two halves stops everything. Some all-gathers become a chain of fusions
that carry it on while they multiply.

    >>> schedule("HloModule empty")
    ()
"""

from __future__ import annotations

import dataclasses
import re

from gshard.xla.cycles import cycles_of
from gshard.xla.hlo_collectives import OPCODE, collective_of, computations_run
from gshard.xla.hlo_parser import Computation, Instruction, Module, read_module

_CHANNEL = re.compile(r"\bchannel_id=(\d+)")


@dataclasses.dataclass(frozen=True, slots=True)
class Scheduled:
    """One collective of a compiled program.

    Attributes:
        kind: as of ``hlo_collectives.CompiledCollective``.
        sent: bytes that each device sends in one execution.
        times: how often it runs in one call.
        asynchronous: whether it comes in two halves.
        beside: cycles of what runs between them, by the compiler's estimate, in one execution.
        products: how many of the kernels between them multiply.
        group: the devices that device 0 runs it with; none for permutations.
    """

    kind: str
    sent: int
    times: int
    asynchronous: bool
    beside: int = 0
    products: int = 0
    group: tuple[int, ...] = ()

    @property
    def total_sent(self) -> int:
        """Bytes in one call."""
        return self.sent * self.times


def schedule(text: str) -> tuple[Scheduled, ...]:
    """The collectives of ``compiled.as_text()``, in the order in which they end."""
    module = read_module(text)
    if not module.entry:
        return ()
    return tuple(
        found
        for computation, times in computations_run(module)
        for found in _of_computation(module, computation, times)
    )


def _of_computation(module: Module, computation: Computation, times: int) -> list[Scheduled]:
    rows = [(made, *_inside(module, computation, made)) for made in computation.instructions.values()]
    last = {channel: i for i, (_, _, channel) in enumerate(rows) if channel}
    under_way: dict[str, Scheduled] = {}
    found: list[Scheduled] = []
    for i, (made, seen, channel) in enumerate(rows):
        done = made.opcode.endswith("-done") and made.operands[0] in under_way
        ends = channel if channel in under_way and last[channel] == i else made.operands[0] if done else ""
        if ends and done:
            found.append(under_way.pop(ends))
            continue
        spent, product = cycles_of(module, computation, made), _multiplies(module, made)
        for key, x in under_way.items():
            under_way[key] = dataclasses.replace(x, beside=x.beside + spent, products=x.products + product)
        if ends:
            found.append(under_way.pop(ends))
        elif seen is not None and channel not in under_way:
            key = made.name if made.opcode.endswith("-start") else channel
            if made.opcode.endswith("-start") or last.get(channel, i) > i:
                under_way[key] = dataclasses.replace(seen, times=times, asynchronous=True)
            else:
                found.append(dataclasses.replace(seen, times=times))
    return found


def _inside(module: Module, computation: Computation, made: Instruction) -> tuple[Scheduled | None, str]:
    """The collective that an instruction is or, as a fusion, holds, and for a fusion its channel."""
    if match := OPCODE.fullmatch(made.opcode):
        read = collective_of(module, computation, made, match[1], bool(match[2]), 1, True)
        return Scheduled(read.kind, read.bytes_moved, 1, False, group=read.group), ""
    if made.opcode != "fusion":
        return None, ""
    for name in made.called("calls"):
        inner = module.computations[name]
        for x in inner.instructions.values():
            if match := OPCODE.fullmatch(x.opcode):
                read = collective_of(module, inner, x, match[1], False, 1, True)
                channel = _CHANNEL.search(x.attributes)
                scatters = read.kind == "all_reduce" and name.startswith("all-reduce-scatter")
                kind, sent = ("reduce_scatter", read.bytes_moved // 2) if scatters else (read.kind, read.bytes_moved)
                return Scheduled(kind, sent, 1, False, group=read.group), channel[1] if channel else made.name
    return None, ""


def _multiplies(module: Module, made: Instruction) -> bool:
    names = made.called("calls") if made.opcode == "fusion" else ()
    inner = [x.opcode for name in names for x in module.computations[name].instructions.values()]
    return bool({"convolution", "dot"} & {made.opcode, *inner})
