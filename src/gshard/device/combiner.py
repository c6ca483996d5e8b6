"""Combiner: the collectives that XLA sends in one message.

XLA combines all-reduces of one monoid and dtype among the same devices, up to a number of bytes, unless one needs the
result of another: the gradients of many weights are one message, and its latency counts once. On GPU it also combines
all-gathers and reduce-scatters (``Compiler.combines``).
"""

from __future__ import annotations

from gshard.comm.collectives import KINDS
from gshard.core.program import Value, short_dtype
from gshard.device.fusion_model import COLLECTIVE, Kernel, Kernels, size
from gshard.device.machine import Machine


class Messages:
    """Which collectives join which message: send them in the order in which they run.

    Args:
        largest: bytes of one device's operands in one message, at most.
    """

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._bytes: list[int] = []
        self._latest: dict[object, int] = {}

    def send(self, key: object, own: int, needed: frozenset[int]) -> tuple[int, int]:
        """The message in which a collective is sent, and the bytes that others send in it already.

        Args:
            key: collectives with equal keys may be sent together.
            own: bytes of one device's operands.
            needed: the messages that it depends on.
        """
        message = self._latest.get(key)
        # What depends on a message that was begun later would make the two depend on each other.
        if message is None or self._bytes[message] + own > self._largest or max(needed, default=-1) >= message:
            message = self._latest[key] = len(self._bytes)
            self._bytes.append(0)
        before = self._bytes[message]
        self._bytes[message] += own
        return message, before


def combined(program: Kernels, machine: Machine) -> dict[Kernel, int]:
    """The collectives that join the message of others, and the bytes of these, of one device's operands."""
    found: dict[Kernel, int] = {}
    messages = Messages(machine.compiler.combined_bytes)
    needs: dict[Value, frozenset[int]] = {}  # which messages a value depends on
    for kernel in program.kernels:
        for body in kernel.bodies:
            found |= combined(body, machine)
        needed = frozenset[int]().union(*(needs.get(program.home.get(v, v), frozenset()) for v in kernel.reads))
        if kernel.kind == COLLECTIVE and KINDS[kernel.equation.name] in machine.compiler.combines:
            e = kernel.equation
            own = sum(size(v) for v in e.inputs if isinstance(v, Value))
            among = str(e.params.get("axes", e.params.get("axis_name")))
            message, before = messages.send((e.name, among, short_dtype(kernel.writes[0].dtype)), own, needed)
            if before:
                found[kernel] = before
            needed |= {message}
        needs.update((program.home.get(v, v), needed) for v in kernel.writes)
    return found
