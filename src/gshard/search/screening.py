"""Estimates a step before it is planned: its time and memory if devices shared all work and all arrays evenly.

The estimate of a step takes a fraction of a second, so that of many configurations only the promising ones are
searched. Two figures are bounds: no plan holds less than its share of the arguments, and in the simplified model of the
search no plan takes less than the share of its products.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from gshard.core.mesh import Mesh
from gshard.core.planning_tables import with_tables
from gshard.core.program import Equation, Program, Value
from gshard.core.rule import PARALLEL, REDUCE
from gshard.device.compiled_kernels import as_compiled
from gshard.device.cost import cost_of_kernels
from gshard.device.fusion_model import PRODUCT, Kernel, kernels_of
from gshard.device.machine import Machine
from gshard.device.roofline import kernel_roofline


@dataclasses.dataclass(frozen=True, slots=True)
class Estimate:
    """The figures of one device if all work and all arrays were shared evenly."""

    seconds: float  # of a call. Nothing is sent.
    peak: float  # bytes at the peak
    least_bytes: float  # bytes of arguments and results that every plan holds at least
    least_seconds: float  # seconds that every plan takes at least in the simplified model of the search


@with_tables
def estimated(program: Program, mesh: Mesh, machine: Machine, donated: Iterable[int]) -> Estimate:
    """Estimates a traced program."""
    devices, first = machine.size, len(program.captured)
    whole = cost_of_kernels(kernels_of(program.block), mesh, machine, [first + i for i in donated])
    memory = whole.memory
    kept = memory.arguments + memory.results - memory.shared
    least = 0.0
    if all(e.rule is None or e.rule.is_free for e in program.block.walk()):
        from_nothing = {v for e in program.block.walk() if not _operands(e) for v in e.outputs}
        kernels = as_compiled(kernels_of(program.block, windows=False), machine.compiler)
        least = sum(
            times * _least(kernel, machine)
            for kernel, times in kernels.walk()
            # A product with a table may become another operation (``rewrite.banded_product``).
            if len(_operands(kernel.equation)) > 1 and from_nothing.isdisjoint(_operands(kernel.equation))
        )
    else:  # parts that are written for one device run once on each
        kept = 0
    return Estimate(whole.seconds / devices, whole.peak / devices, kept / devices, least)


def _operands(e: Equation) -> list[Value]:
    return [v for v in e.inputs if isinstance(v, Value)]


def _least(kernel: Kernel, machine: Machine) -> float:
    """Seconds of one run of a kernel in the simplified model, at least: the share of a product that is a roofline."""
    e, devices = kernel.equation, machine.size
    if e.rule is None or kernel.kind != PRODUCT or not all(f.kind in (PARALLEL, REDUCE) for f in e.rule.factors):
        return 0.0
    shares = kernel.product_flops / devices, kernel.vector_flops / devices, kernel.moved / devices
    return kernel_roofline(machine, e, *shares).work
