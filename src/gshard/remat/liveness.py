"""Liveness: when the buffers of a block are written and read, and the cost of recomputing them.

made[v], last[v]     the kernels that make and last read a buffer, by position
users[v]             all that read it, in order
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from gshard.core.program import Equation, Value
from gshard.device.fusion_model import REGION, Kernel, Kernels
from gshard.rewrite.cse import is_pure

# Seconds of one run of a kernel, bodies and rounds of loops included.
Seconds = Callable[[Kernel], float]


@dataclasses.dataclass(frozen=True, eq=False)
class Liveness:
    """The buffers of one block.

    Attributes:
        kernels: the block's.
        made, last, users: by buffer; a value that leaves the block is last read after the last kernel.
        ends: the buffers that leave the block.
        producer: the equation that makes each value.
        position: of the kernel that an equation is the last of.
    """

    kernels: Kernels
    made: dict[Value, int]
    last: dict[Value, int]
    users: dict[Value, list[int]]
    ends: frozenset[Value]
    producer: dict[Value, Equation]
    position: dict[Equation, int]

    def home(self, v: Value) -> Value:
        """The buffer that holds a value."""
        return self.kernels.home.get(v, v)

    def sliced(self, v: Value) -> Value:
        """The buffer whose slices are those of a value; a view in another shape has slices of its own."""
        home = self.home(v)
        return home if home.shape == v.shape else v

    def is_buffer(self, v: Value) -> bool:
        """Whether a value is in memory by itself: an input of the block, or what a kernel makes."""
        return v not in self.producer or v in self.made

    def available(self, v: Value, at: int, peak: int) -> bool:
        """Whether a buffer can be read at a kernel: it is alive there, or at the peak and may be kept until then."""
        return v not in self.made or self.last[v] >= at or self.last[v] > peak

    def kernel(self, v: Value) -> Kernel:
        """The kernel that makes a buffer."""
        return self.kernels.kernels[self.made[v]]

    def recomputation(self, v: Value, at: int, peak: int) -> list[Kernel] | None:
        """The kernels that recompute a buffer at a later kernel; None if that cannot or should not be done."""
        found: dict[Kernel, None] = {}
        pending = [v]
        while pending:
            kernel = self.kernel(pending.pop())
            if kernel in found:
                continue
            if kernel.kind == REGION or not all(map(is_pure, (kernel.equation, *kernel.fused))):
                return None
            found[kernel] = None
            if len(found) > 64:
                return None
            pending += [u for u in kernel.reads if u is v or not self.available(u, at, peak)]
        return list(found)


def liveness_of(kernels: Kernels) -> Liveness:
    """Follows a block."""
    made: dict[Value, int] = {}
    users: dict[Value, list[int]] = {}
    for i, kernel in enumerate(kernels.kernels):
        for v in kernel.reads:
            users.setdefault(v, []).append(i)
        for v in kernel.writes:
            made[v] = i
    last = {v: -1 for v in made} | {v: at[-1] for v, at in users.items()}
    ends = {kernels.home.get(v, v) for v in kernels.block.outputs if isinstance(v, Value)}
    last.update({v: len(kernels.kernels) for v in ends})
    return Liveness(
        kernels, made, last, users, frozenset(ends),
        {v: e for e in kernels.block.equations for v in e.outputs},
        {kernel.equation: i for i, kernel in enumerate(kernels.kernels)},
    )  # fmt: skip
