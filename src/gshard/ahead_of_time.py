"""Compiles a program ahead of time with libtpu for a TPU that need not exist, and reads what the compiler tells."""

from __future__ import annotations

import jax

from gshard.api.lowered import Lowered
from gshard.device.machine import Machine
from gshard.remat.fit import peak_of
from gshard.xla.cycles import estimated_cycles

CYCLES_A_SECOND = {"v3": 940e6}


def compiled_by_libtpu(lowered: Lowered, machine: Machine) -> dict[str, str]:
    """What libtpu's compiler says of the program, which may be that it does not fit."""
    try:
        made = lowered.executable.compiled
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return {"does not fit": str(error).splitlines()[0].partition("RESOURCE_EXHAUSTED: ")[2]}
    cycles = estimated_cycles(made.as_text())
    found = {
        "peak memory": f"{peak_of(made) / 2**30:.2f} GiB",
        "estimated cycles": f"{cycles:,}",
    }
    if machine.kind in CYCLES_A_SECOND and cycles:
        found["estimated step"] = f"{1e3 * cycles / CYCLES_A_SECOND[machine.kind]:.1f} ms"
    return found
