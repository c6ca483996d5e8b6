"""Roofline: the seconds that one kernel takes on a machine.

A kernel takes the longer of its arithmetic and its memory traffic, and the time to start it:

    max(products / rate + others / vector_flops, moved / memory_bandwidth) + launch

Planning, search, recomputation and explanation price kernels by this function alone. So the plan that is fastest when
it is chosen is the plan that is fastest when it is explained.
"""

from __future__ import annotations

from typing import NamedTuple

from gshard.core.program import Equation, short_dtype
from gshard.device.machine import Machine

# Bytes of the indices into an array of up to eight dimensions, int32 each. XLA computes so few numbers (the position of
# a device, an offset) inside of the kernels that read them, so nothing is launched for them. A result of the program
# has no such kernel: it is launched for, however small.
INDICES = 32


class Roofline(NamedTuple):
    """Seconds of one run of a kernel.

    Attributes:
        compute: of its arithmetic.
        memory: of what it reads and writes. Compute and memory overlap.
        launch: until it starts.
    """

    compute: float
    memory: float
    launch: float

    @property
    def work(self) -> float:
        """Seconds without the launch."""
        return max(self.compute, self.memory)

    @property
    def seconds(self) -> float:
        """Seconds in all."""
        return self.work + self.launch


def roofline(
    machine: Machine,
    dtype: str,
    products: float = 0.0,
    others: float = 0.0,
    moved: float = 0.0,
    *,
    returns: bool = False,
) -> Roofline:
    """Prices one run of a kernel.

    Args:
        machine: one of its devices runs the kernel.
        dtype: short name; products run at its rate.
        products: operations of products.
        others: all other operations.
        moved: bytes read and written.
        returns: whether it writes a result of the program.

    >>> found = roofline(Machine.of("h100:1x1"), "bf16", products=2 * 1024**3, moved=3 * 2 * 1024**2)
    >>> [f"{part * 1e6:.2f} µs" for part in (*found, found.seconds)]
    ['3.10 µs', '2.09 µs', '3.00 µs', '6.10 µs']
    """
    compute = products / machine.rate(dtype) + others / machine.vector_flops
    return Roofline(compute, moved / machine.memory_bandwidth, launch_seconds(machine, moved, returns=returns))


def dtype_of(e: Equation) -> str:
    """The dtype at whose rate the product of an equation runs: that of its first operand."""
    return short_dtype(e.inputs[0].dtype) if e.inputs else "f32"


def launch_seconds(machine: Machine, moved: float, *, returns: bool = False) -> float:
    """Seconds until a kernel starts that reads and writes ``moved`` bytes.

    0 for a few numbers (``INDICES``), unless they are a result of the program (``returns``): no kernel reads that.
    """
    return machine.launch if moved > INDICES or returns else 0.0


def copy_seconds(machine: Machine, array: float) -> float:
    """Seconds of a kernel that copies ``array`` bytes."""
    return 2 * array / machine.memory_bandwidth + launch_seconds(machine, 2 * array)
