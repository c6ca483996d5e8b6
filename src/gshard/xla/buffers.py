"""Buffers: what a device holds while a compiled program runs, and which arrays make the peak.

A scheduled program lists the instructions of a computation in the order in which they run. Each result is held from
there to its last use. What updates an array in place, passes it on or names an element of it needs no buffer of its
own: slices of a loop's state, bitcasts, tuples. The compiler may share buffers in more ways, and keeps some of its own,
so its figure (``compiled.memory_analysis()``), where it is known, is the one to trust; this one tells what holds it.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple

from gshard.device.memory import MemoryTotals
from gshard.xla.dataflow import ELEMENTWISE, Array
from gshard.xla.hlo_parser import Computation, Instruction, Module
from gshard.xla.kernels import FREE, arrays_of, bytes_in_memory

_ALIAS = re.compile(r"\{(\d*)\}: \((\d+), \{")
_Buffers = tuple[int, ...]  # one for each element of a result; -1 for what takes no memory here


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """An array that a device holds."""

    array: Array  # which
    bytes: int  # of it
    type: str  # ``f32[8,4]``


class Moment(NamedTuple):
    """What is held while an instruction runs."""

    bytes: int  # of temporaries
    computation: str  # computation, name: of the instruction
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class _Peak:
    """The most bytes of temporaries in a computation, those of the computations that it runs included."""

    bytes: int = 0
    alive: Sequence[Held] = ()
    moments: Sequence[Moment] = ()


@dataclasses.dataclass(frozen=True)
class HeldMemory(MemoryTotals):
    """What a device holds in one call."""

    alive: tuple[Held, ...]  # what makes the moment with most temporaries, largest first
    # the bytes of temporaries while each instruction runs, in order; each body of a loop once
    moments: tuple[Moment, ...] = ()


def held_by(module: Module) -> HeldMemory:
    """Reads what a scheduled program holds; arrays on the chip and on the host do not count."""
    entry = module.computations[module.entry]
    arguments = {i.number: bytes_in_memory(i.type) for i in entry.instructions.values() if i.opcode == "parameter"}
    results = [a.bytes for a in arrays_of(entry.instructions[entry.root].type)]
    shared = sum(results[out] for out in aliased_results(module) if out < len(results))
    peak = _peak(module, module.entry, is_entry=True)
    ordered = tuple(sorted(peak.alive, key=lambda h: -h.bytes))
    return HeldMemory(sum(arguments.values()), sum(results), shared, peak.bytes, ordered, tuple(peak.moments))


def aliased_results(module: Module) -> dict[int, int]:
    """The results that take the memory of an argument, by number, with the number of the argument."""
    start = module.header.find("input_output_alias={")
    if start < 0:
        return {}
    end = module.header.find("entry_computation_layout", start)
    found = _ALIAS.findall(module.header[start : end if end > 0 else None])
    return {int(out or 0): int(argument) for out, argument in found}


def _peak(module: Module, name: str, *, is_entry: bool = False) -> _Peak:
    """What one computation holds."""
    computation = module.computations[name]
    order = list(computation.instructions.values())
    held: list[Held] = []
    of: dict[str, _Buffers] = {}
    last: dict[int, int] = {}
    made_at: list[int] = []
    for i, made in enumerate(order):
        of[made.name] = _buffers(module, name, computation, made, of, held)
        last |= {buffer: i for buffer in range(len(made_at), len(held))}
        made_at += [i] * (len(held) - len(made_at))
        for operand in made.operands:
            last.update(dict.fromkeys(of.get(operand, ()), i))
    # The results of the whole program count by themselves; those of a body are the state that its caller holds.
    returned = set(of.get(computation.root, ()))
    ends: dict[int, list[int]] = {}
    for buffer, i in last.items():
        ends.setdefault(i, []).append(buffer)
    now, most = 0, _Peak()
    live: set[int] = set()
    moments: list[Moment] = []
    counted = 0
    for i, made in enumerate(order):
        while counted < len(held) and made_at[counted] == i:
            if not (is_entry and counted in returned):
                if made.opcode == "fusion" or made.opcode in ELEMENTWISE:
                    # Each element is read before it is written: an operand of that size that nothing else reads is the
                    # buffer of the result.
                    size = held[counted].bytes
                    ending = (b for b in ends.get(i, ()) if b in live and held[b].bytes == size)
                    for taken in itertools.islice((b for b in ending if is_entry or b not in returned), 1):
                        live.discard(taken)
                        now -= size
                live.add(counted)
                now += held[counted].bytes
            counted += 1
        inside = _inside(module, made)
        if now + inside.bytes > most.bytes:
            most = _Peak(now + inside.bytes, [*(held[b] for b in live), *inside.alive])
        if inside.moments:
            moments += [moment._replace(bytes=moment.bytes + now) for moment in inside.moments]
        elif made.opcode not in FREE:
            moments.append(Moment(now, name, made.name))
        for buffer in ends.get(i, ()):
            if buffer in live and (is_entry or buffer not in returned):
                live.discard(buffer)
                now -= held[buffer].bytes
    return dataclasses.replace(most, moments=moments)


def _inside(module: Module, made: Instruction) -> _Peak:
    """The most that the computations hold that an instruction runs."""
    # The body of a loop, if its condition holds as much.
    return max((_peak(module, name) for name in reversed(made.bodies)), key=lambda found: found.bytes, default=_Peak())


def _buffers(
    module: Module, name: str, computation: Computation, made: Instruction, of: dict[str, _Buffers], held: list[Held]
) -> _Buffers:
    """The buffers of an instruction's result: those of its operands where it passes them on, and new ones."""
    operands = [of.get(operand, ()) for operand in made.operands]
    match made.opcode:
        case "parameter":
            return (-1,) * max(1, len(arrays_of(made.type)))
        case "tuple":
            return tuple(b for buffers in operands for b in buffers)
        case "get-tuple-element":
            return _elements(computation, made, operands[0])
        case "while" | "bitcast" | "opt-barrier" | "add-dependency" | "domain" | "copy-done" | "async-update":
            return operands[0]
        case "constant" | "after-all" | "partition-id" | "replica-id":
            return (-1,)
        case "dynamic-update-slice" | "scatter":
            return operands[0]
    if made.opcode.endswith("-done"):
        return operands[0][-1:] if len(arrays_of(made.type)) == 1 else operands[0]
    types = arrays_of(made.type)
    kept = types[-1:] if made.opcode.endswith("-start") else types  # what starts lists its operands, too
    updated = _updated(module, made) if made.opcode in ("fusion", "fusion-start") else {}
    found = []
    for i, array in enumerate(kept):
        given = updated.get(i)
        if given is not None and given < len(operands) and operands[given]:
            found.append(operands[given][0])
        elif array.is_on_chip or not array.bytes:
            found.append(-1)
        else:
            held.append(Held(Array(name, made.name, i if len(kept) > 1 else None), array.bytes, str(array)))
            found.append(len(held) - 1)
    return tuple(found)


def _elements(computation: Computation, made: Instruction, buffers: _Buffers) -> _Buffers:
    """Those of one element of a tuple, which may be a tuple itself."""
    source = computation.instructions[made.operands[0]]
    if len(buffers) <= 1 or "((" in source.type:
        return buffers[-1:]
    return buffers[made.number : made.number + 1]


def _updated(module: Module, made: Instruction) -> dict[int, int]:
    """The results of a fusion that update an operand in place: the number of the operand."""
    (name,) = made.called("calls")
    inner = module.computations[name]
    root = inner.instructions[inner.root]
    roots = [inner.instructions[o] for o in root.operands] if root.opcode == "tuple" else [root]
    found = {}
    for i, part in enumerate(roots):
        while part.opcode in ("bitcast", "copy", "convert") and part.operands[0] in inner.instructions:
            part = inner.instructions[part.operands[0]]
        while part.opcode in ("dynamic-update-slice", "scatter", "bitcast"):
            part = inner.instructions[part.operands[0]]
            if part.opcode == "parameter":
                found[i] = part.number
                break
    return found
