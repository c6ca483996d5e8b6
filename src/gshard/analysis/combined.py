"""Combined: the sums that XLA finishes in one message.

XLA puts all-reduces of one kind among the same devices together, up to some size, if none needs what another gives: the
gradients of many weights are one message, whose latency counts once.
"""

from __future__ import annotations

from gshard.comm.collectives import KINDS
from gshard.core.program import Value, short_dtype
from gshard.passes.device_program import COLLECTIVE, Kernel, Kernels, size

LARGEST = 30 << 20  # bytes of a message that others may still join: XLA's threshold


def combined(program: Kernels) -> dict[Kernel, int]:
    """The all-reduces that join the message of others, and the bytes of these, of one device's operands."""
    found: dict[Kernel, int] = {}
    messages: list[int] = []  # their bytes
    latest: dict[object, int] = {}
    needs: dict[Value, frozenset[int]] = {}  # which messages a value depends on
    for kernel in program.kernels:
        for body in kernel.bodies:
            found |= combined(body)
        needed = frozenset[int]().union(*(needs.get(program.home.get(v, v), frozenset()) for v in kernel.reads))
        if kernel.kind == COLLECTIVE and KINDS[kernel.equation.name] == "all_reduce":
            own = sum(size(v) for v in kernel.equation.inputs if isinstance(v, Value))
            key = kernel.equation.name, str(kernel.equation.params.get("axes")), short_dtype(kernel.writes[0].dtype)
            message = latest.get(key)
            # What depends on a message that was begun later would make the two depend on each other.
            if message is not None and messages[message] + own <= LARGEST and max(needed, default=-1) < message:
                found[kernel] = messages[message]
                messages[message] += own
            else:
                message = latest[key] = len(messages)
                messages.append(own)
            needed |= {message}
        needs.update((program.home.get(v, v), needed) for v in kernel.writes)
    return found
