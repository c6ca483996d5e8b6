"""Models the combiner: the collectives that XLA sends in one message.

XLA combines all-reduces of one monoid and dtype among the same devices, up to a number of bytes, unless one depends on
the result of another. So the gradients of many weights are one message, whose latency counts once. On GPU, XLA also
combines all-gathers and reduce-scatters (``Compiler.combines``).
"""

from __future__ import annotations

from gshard.comm.collectives import KINDS
from gshard.core.program import Value, short_dtype
from gshard.device.fusion_model import COLLECTIVE, Kernel, Kernels, size
from gshard.device.machine import Machine


class Messages:
    """Assigns collectives to messages. Call ``send`` in the order in which they run."""

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._bytes: list[int] = []
        self._latest: dict[object, int] = {}

    def send(self, key: object, operand_bytes: int, needed: frozenset[int]) -> tuple[int, int]:
        """Adds a collective to a message."""
        message = self._latest.get(key)
        # If the collective depends on a later message, the two messages would depend on each other.
        if (
            message is None
            or self._bytes[message] + operand_bytes > self._largest
            or max(needed, default=-1) >= message
        ):
            message = self._latest[key] = len(self._bytes)
            self._bytes.append(0)
        before = self._bytes[message]
        self._bytes[message] += operand_bytes
        return message, before


def combined(program: Kernels, machine: Machine) -> dict[Kernel, int]:
    """The collectives that join a message, with the bytes of one device's operands in it so far."""
    bytes_before: dict[Kernel, int] = {}
    messages = Messages(machine.compiler.combined_bytes)
    needs: dict[Value, frozenset[int]] = {}  # for each value, the messages on which it depends
    for kernel in program.kernels:
        for body in kernel.bodies:
            bytes_before |= combined(body, machine)
        needed = frozenset[int]().union(*(needs.get(program.home.get(v, v), frozenset()) for v in kernel.reads))
        if kernel.kind == COLLECTIVE and KINDS[kernel.equation.name] in machine.compiler.combines:
            e = kernel.equation
            operand_bytes = sum(size(v) for v in e.inputs if isinstance(v, Value))
            among = str(e.params.get("axes", e.params.get("axis_name")))
            message, sent_before = messages.send(
                (e.name, among, short_dtype(kernel.writes[0].dtype)), operand_bytes, needed
            )
            if sent_before:
                bytes_before[kernel] = sent_before
            needed |= {message}
        needs.update((program.home.get(v, v), needed) for v in kernel.writes)
    return bytes_before
