"""Bytes that a compiled program sends, at the width of the program's own dtypes.

XLA for CPU converts bfloat16 to float32, and floats of 8 bits to float16, before a collective, and back after it.
Accelerators do not. A collective counts at the narrow width if its operand was just converted from such a dtype, or if
all users of its result convert it to one (XLA leaves out the first conversion where a product made the operand). The
same holds for programs of gshard and of XLA's partitioner.
"""

from __future__ import annotations

from gshard.xla.hlo_collectives import collectives_of
from gshard.xla.hlo_parser import Computation, Instruction, Module, read_module, type_bytes

NARROW = "bf16", "f8"
MOVES = frozenset("bitcast copy transpose reshape slice dynamic-slice concatenate pad".split())


def bytes_sent(text: str) -> int:
    """Bytes that each device sends in one call of ``compiled.as_text()``."""
    module, total = read_module(text), 0.0
    for sent in collectives_of(module):
        c, computation, made = sent, module.computations[sent.inside], sent.itself
        operands = [computation.instructions[o] for o in made.operands if o in computation.instructions]
        back = is_narrowed(module, computation, made.name)
        sizes = [type_bytes(x.type) / (1 + (back or is_widened(module, computation, x.name))) for x in operands]
        total += c.total_bytes * (sum(sizes) / c.operand_bytes if sizes and c.operand_bytes else 1)
    return round(total)


def is_widened(module: Module, computation: Computation, name: str) -> bool:
    """Whether the value of an instruction was converted from a narrow dtype, and since then only moved."""
    made = computation.instructions[name]
    while made.opcode in MOVES:
        made = computation.instructions[made.operands[0]]
    if made.opcode in ("fusion", "call"):
        body = module.computations[(made.called("calls") or made.called("to_apply"))[0]]
        return is_widened(module, body, body.root)
    return made.opcode == "convert" and computation.instructions[made.operands[0]].type.startswith(NARROW)


def is_narrowed(module: Module, computation: Computation, name: str) -> bool:
    """Whether all that reads the value of an instruction converts it to a narrow dtype first."""
    users = [user for user in computation.instructions.values() if name in user.operands]

    def narrows(user: Instruction) -> bool:
        if user.opcode in ("fusion", "call"):
            body = module.computations[(user.called("calls") or user.called("to_apply"))[0]]
            entered = {i.literal: i.name for i in body.instructions.values() if i.opcode == "parameter"}
            where = (str(k) for k, operand in enumerate(user.operands) if operand == name)
            return all(is_narrowed(module, body, entered[k]) for k in where)
        if user.opcode in (*MOVES, "get-tuple-element"):
            return is_narrowed(module, computation, user.name)
        return user.opcode == "convert" and user.type.startswith(NARROW)

    return bool(users) and all(map(narrows, users))
