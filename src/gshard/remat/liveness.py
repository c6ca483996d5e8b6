"""Computes when the buffers of a block are written and read, and which kernels recompute them.

made[v], last[v]     the kernels that write and last read a buffer, by position
users[v]             all kernels that read it, in order
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from gshard.core.program import Equation, Value
from gshard.device.fusion_model import REGION, Kernel, Kernels
from gshard.rewrite.cse import is_pure

# Seconds of one run of a kernel, including bodies and iterations of loops.
Seconds = Callable[[Kernel], float]


@dataclasses.dataclass(frozen=True, eq=False)
class Liveness:
    """The buffers of one block."""

    kernels: Kernels  # the kernels of the block
    made: dict[Value, int]  # for each buffer, the position of the kernel that writes it
    # for each buffer, the position of the last kernel that reads it; after the last kernel for outputs
    last: dict[Value, int]
    users: dict[Value, list[int]]  # for each buffer, the positions of the kernels that read it
    ends: frozenset[Value]  # the buffers that are outputs of the block
    producer: dict[Value, Equation]  # for each value, the equation that computes it
    position: dict[Equation, int]  # for the last equation of each kernel, the position of the kernel

    def home(self, v: Value) -> Value:
        """The buffer that holds a value."""
        return self.kernels.home.get(v, v)

    def sliced(self, v: Value) -> Value:
        """The buffer with the same slices as a value: its home, unless that has another shape."""
        home = self.home(v)
        return home if home.shape == v.shape else v

    def is_buffer(self, v: Value) -> bool:
        """Whether a value is a buffer: an input of the block, or written by a kernel."""
        return v not in self.producer or v in self.made

    def available(self, v: Value, at: int, peak: int) -> bool:
        """Whether a kernel can read a buffer: it is alive there, or alive at the peak and can be kept until then."""
        return v not in self.made or self.last[v] >= at or self.last[v] > peak

    def kernel(self, v: Value) -> Kernel:
        """The kernel that writes a buffer."""
        return self.kernels.kernels[self.made[v]]

    def recomputation(self, v: Value, at: int, peak: int) -> list[Kernel] | None:
        """The kernels that recompute a buffer for a later kernel; None if that is impossible or too long."""
        kernels_needed: dict[Kernel, None] = {}
        pending = [v]
        while pending:
            kernel = self.kernel(pending.pop())
            if kernel in kernels_needed:
                continue
            if kernel.kind == REGION or not all(map(is_pure, (kernel.equation, *kernel.fused))):
                return None
            kernels_needed[kernel] = None
            if len(kernels_needed) > 64:
                return None
            pending += [u for u in kernel.reads if u is v or not self.available(u, at, peak)]
        return list(kernels_needed)


def liveness_of(kernels: Kernels) -> Liveness:
    """Computes the liveness of a block."""
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
