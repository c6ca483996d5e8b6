"""Prices kernels by their roofline: the seconds that one kernel takes on a machine.

A kernel takes ``max(products / rate + others / vector_flops, moved / memory_bandwidth) + launch``. Planning, search,
recomputation and explanation price kernels with this function only, so they agree.
"""

from __future__ import annotations

from typing import NamedTuple

from gshard.core.program import Equation, itemsize, short_dtype
from gshard.device.machine import Machine

# Bytes of the indices into an array of up to eight dimensions, int32 each. XLA computes so few numbers (the position of
# a device, an offset) inside the kernels that read them, without a launch. A result of the program has no such kernel,
# so it needs a launch however small it is.
INDICES = 32


class Roofline(NamedTuple):
    """Seconds of one run of a kernel."""

    compute: float  # seconds of arithmetic
    memory: float  # seconds of reads and writes. Compute and memory overlap.
    launch: float  # seconds until the kernel starts

    @property
    def work(self) -> float:
        """Seconds without the launch."""
        return max(self.compute, self.memory)

    @property
    def bound(self) -> str:
        """The cause of the work (``cost.BOUNDS``): the longer of the two."""
        return "compute" if self.compute >= self.memory else "memory"

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

    >>> found = roofline(Machine.of("h100:1x1"), "bf16", products=2 * 1024**3, moved=3 * 2 * 1024**2)
    >>> [f"{part * 1e6:.2f} µs" for part in (*found, found.seconds)]
    ['3.10 µs', '2.09 µs', '3.00 µs', '6.10 µs']
    """
    compute = products / machine.rate(dtype) + others / machine.vector_flops
    return Roofline(compute, moved / machine.memory_bandwidth, launch_seconds(machine, moved, returns=returns))


def host_seconds(machine: Machine, array: float) -> float:
    """Seconds in which a device moves ``array`` bytes to the memory of its host, or from there, without the launch.

    A machine without a figure of that link (``Machine.host_link``) counts the array as a copy in its own memory.
    """
    return array / machine.host_link if machine.host_link else 2 * array / machine.memory_bandwidth


def kernel_roofline(
    machine: Machine, e: Equation, products: float = 0.0, others: float = 0.0, moved: float = 0.0, *,
    returns: bool = False,
) -> Roofline:  # fmt: skip
    """Prices one run of the kernel of an equation as the machine's compiler makes it; arguments as of ``roofline``."""
    return roofline(machine, dtype_of(e), products * repeats(e, machine), others, moved, returns=returns)


def repeats(e: Equation, machine: Machine) -> int:
    """How often a product multiplies each row: with the matrix of each group if the compiler does so, else once."""
    return e.rule.groups if e.rule is not None and machine.compiler.multiplies_groups else 1


def dtype_of(e: Equation) -> str:
    """The short name of the dtype at whose rate an equation's product runs: the wider one of its two operands."""
    return short_dtype(max((x.dtype for x in e.inputs[:2]), key=itemsize)) if e.inputs else "f32"


def launch_seconds(machine: Machine, moved: float, *, returns: bool = False) -> float:
    """Seconds until a kernel starts that reads and writes ``moved`` bytes.

    0 for a few numbers (``INDICES``) unless they are a result of the program (``returns``), which no kernel reads.
    """
    return machine.launch if moved > INDICES or returns else 0.0


def copy_seconds(machine: Machine, array: float) -> float:
    """Seconds of a kernel that copies ``array`` bytes."""
    return 2 * array / machine.memory_bandwidth + launch_seconds(machine, 2 * array)
