"""What a compiled program takes on a machine: read off its HLO, whoever partitioned it.

Each instruction that XLA did not fuse into another one is a kernel: it takes the longer of its arithmetic and its
memory traffic, and its start. A collective takes what the network takes, among the devices that it runs over; those
that the compiler of the machine makes one message of, and the one for CPU does not, what the message takes. Nothing
overlaps. That is how ``gshard.device.cost`` prices our own programs; here both sides are read from what XLA compiled
(for CPU, whose fusions are not those of an accelerator), so that only ratios mean anything.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

import flops
from gshard.device.fusion_model import Messages
from gshard.device.machine import Machine
from gshard.device.network import permutation_seconds, seconds_among
from gshard.device.roofline import launch_seconds, roofline
from gshard.xla import hlo_collectives
from gshard.xla.hlo_parser import Computation, Instruction, Module, read_module, trip_count, type_bytes

FREE = frozenset(
    """
    parameter constant tuple get-tuple-element bitcast while conditional call after-all opt-barrier partition-id
    replica-id domain add-dependency async-update
    """.split()
)
NAMES = {"f32": "f32", "f64": "f64", "bf16": "bf16", "f16": "bf16", "s8": "s8", "u8": "s8"}


def seconds(text: str, machine: Machine) -> float:
    """Of one call, on the device that is in the first group of every collective."""
    module = read_module(text)
    sent = {c.itself.name: c for c in hlo_collectives.collectives(text)}
    joined = {name: before for c in module.computations.values() for name, before in joins(c, sent, machine)}
    total = 0.0
    cutting: set[tuple[int, str]] = set()
    for computation, made, times in kernels(module, module.computations[module.entry], 1):
        if made.name in sent:
            total += times * collective_seconds(made, sent[made.name], machine, joined.get(made.name, 0))
        elif (
            made.opcode not in FREE
            and not is_part_of_all_to_all(module, computation, made)
            and not is_read_as_another_type(made, machine)
            and not made.opcode.endswith("-done")
        ):
            total += times * kernel_seconds(module, computation, made, machine)
            whole = id(computation), is_cut_for(computation, made)
            if whole[1] and whole in cutting:  # begun already
                total -= times * launch_seconds(machine, bytes_moved(module, computation, made))
            cutting.add(whole)
    return total


def kernels(module: Module, computation: Computation, times: int) -> Iterator[tuple[Computation, Instruction, int]]:
    """Every instruction that runs by itself, and how often; of a conditional, its first branch."""
    for made in computation.instructions.values():
        yield computation, made, times
        if made.opcode == "while":
            rounds = trip_count(module, computation, made)
            inner = [(name, 1 if rounds is None else rounds) for name in made.called("body")]
        elif made.opcode == "conditional":
            branches = (*made.called("branch_computations"), *made.called("true_computation"))
            inner = [(name, 1) for name in branches[:1]]
        else:
            inner = [(name, 1) for name in made.called("to_apply")] if made.opcode == "call" else []
        for name, rounds in inner:
            yield from kernels(module, module.computations[name], times * rounds)


def joins(
    computation: Computation, sent: Mapping[str, hlo_collectives.CompiledCollective], machine: Machine
) -> Iterator[tuple[str, int]]:
    """The collectives that join the message of others, and the bytes of these; sums are in one message already."""
    messages = Messages(machine.compiler.combined_bytes)
    needs: dict[str, frozenset[int]] = {}
    for made in computation.instructions.values():
        needed = frozenset[int]().union(*(needs.get(o, frozenset()) for o in made.operands))
        c = sent.get(made.name)
        if c is not None and c.kind != "all_reduce" and c.kind in machine.compiler.combines:
            key = c.kind, c.group, c.group_size, "" if c.kind == "all_gather" else made.type.split("[")[0]
            message, before = messages.send(key, c.operand_bytes, needed)
            if before:
                yield made.name, before
            needed |= {message}
        needs[made.name] = needed


def is_read_as_another_type(made: Instruction, machine: Machine) -> bool:
    """Whether it only reads the same bits as another type: XLA:GPU makes no kernel of that."""
    return machine.compiler.platform == "gpu" and made.name.startswith("wrapped_bitcast-convert")


def is_part_of_all_to_all(module: Module, computation: Computation, made: Instruction) -> bool:
    """Whether it only cuts or joins what an all-to-all moves: on CPU a kernel for each array, elsewhere on the way."""
    if _does_only(module, made, "concatenate"):
        parts = [computation.instructions[o] for o in made.operands]
        return all(p.opcode == "get-tuple-element" and _is_all_to_all(computation, p.operands[0]) for p in parts)
    users = [i.name for i in computation.instructions.values() if made.name in i.operands]
    return _does_only(module, made, "slice") and bool(users) and all(_is_all_to_all(computation, u) for u in users)


def _does_only(module: Module, made: Instruction, opcode: str) -> bool:
    """Whether an instruction is a slice, or a concatenation, or a fusion of one that takes its array as it is stored.

    What is cut along the first dimension is a run of bytes, whatever views of other shapes there are: it is sent so.
    """
    if made.opcode != "fusion" or made.name.startswith(f"wrapped_{opcode}"):
        return made.opcode in (opcode, "fusion")
    inside = list(module.computations[made.called("calls")[0]].instructions.values())
    found, *more = [i for i in inside if i.opcode not in ("parameter", "bitcast")] or inside
    if found.opcode != opcode or more:
        return False
    whole = found.type if opcode == "concatenate" else next(i.type for i in inside if i.name == found.operands[0])
    sizes = _sizes(whole)
    entered = [i.type for i in inside if i.opcode == "parameter"]
    if opcode == "slice" and [n for n in sizes if n > 1] == [n for n in _sizes(entered[0]) if n > 1]:
        return True  # on CPU a dimension of one is put in front
    if opcode == "concatenate":
        first = int(re.search(r"\bdimensions=\{(\d+)\}", found.attributes)[1])
    else:
        cut = re.findall(r"\[(\d+):(\d+)\]", re.search(r"\bslice=\{([^}]*)\}", found.attributes)[1])
        first = max((d for d, (a, b) in enumerate(cut) if int(b) - int(a) < sizes[d]), default=0)
    return math.prod(sizes[:first]) == 1


def _sizes(type_: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", re.search(r"\[([\d,]*)\]", type_)[1])]


def is_cut_for(computation: Computation, made: Instruction) -> str:
    """The all-to-all that a fusion computes an operand of: on CPU each by itself, elsewhere all at once."""
    users = [i.name for i in computation.instructions.values() if made.name in i.operands]
    return users[0] if made.opcode == "fusion" and len(users) == 1 and _is_all_to_all(computation, users[0]) else ""


def _is_all_to_all(computation: Computation, name: str) -> bool:
    return computation.instructions[name].opcode == "all-to-all"


def collective_seconds(
    made: Instruction, c: hlo_collectives.CompiledCollective, machine: Machine, joined: int = 0
) -> float:
    """Of one run; of one that joins a message of so many bytes, what that takes longer."""
    if c.kind == "collective_permute":
        listed = re.search(r"\bsource_target_pairs=\{((?:\{\d+,\d+\},?\s*)+)\}", made.attributes)
        pairs = [(int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)\}", listed[1])] if listed else []
        return permutation_seconds(c.bytes_moved, pairs, machine)
    group = c.group or tuple(range(c.group_size))
    before = seconds_among(c.kind, joined, group, machine)
    return seconds_among(c.kind, joined + c.operand_bytes, group, machine) - before


def kernel_seconds(module: Module, computation: Computation, made: Instruction, machine: Machine) -> float:
    moved = bytes_moved(module, computation, made)
    everything = flops.of_instruction(module, computation, made)
    products, dtype = flops.products_of(module, computation, made)
    return roofline(machine, NAMES.get(dtype, "f32"), products, everything - products, moved).seconds


def bytes_moved(module: Module, computation: Computation, made: Instruction) -> int:
    """Bytes that a kernel reads and writes; of what it takes a slice of, or writes a slice into, the slice."""
    if made.opcode == "fusion":
        body = module.computations[made.called("calls")[0]]
        read = flops.elements_read(body)
        entered = [i for i in body.instructions.values() if i.opcode == "parameter"]
        return sum(_read(body, i, read) for i in entered) + _written(body, body.instructions[body.root])
    operands = [computation.instructions[o] for o in made.operands if o in computation.instructions]
    if made.opcode in ("slice", "dynamic-slice", "gather"):
        return 2 * type_bytes(made.type)
    if made.opcode == "dynamic-update-slice":
        return 2 * type_bytes(operands[1].type)
    return sum(type_bytes(x.type) for x in operands) + type_bytes(made.type)


def _read(body: Computation, value: Instruction, read: Mapping[str, float]) -> int:
    """Bytes that a fusion reads of one of its operands; ``read``: how many elements of it and of what it becomes."""
    whole = type_bytes(value.type)
    elements = flops.elements_of(value.type)
    total, whole = 0, int(whole * read.get(value.name, 0.0) / elements) if elements else 0
    for user in body.instructions.values():
        if value.name not in user.operands:
            continue
        if user.opcode in ("slice", "dynamic-slice", "gather") and user.operands[0] == value.name:
            total += type_bytes(user.type)
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == value.name:
            continue
        elif user.opcode == "bitcast":
            total += _read(body, user, read)
        else:
            return whole
    return min(total, whole)


def _written(body: Computation, root: Instruction) -> int:
    """Bytes that a fusion writes."""
    if root.opcode == "dynamic-update-slice":
        return type_bytes(body.instructions[root.operands[1]].type)
    if root.opcode in ("tuple", "bitcast"):
        return sum(_written(body, body.instructions[o]) for o in root.operands)
    return type_bytes(root.type)
