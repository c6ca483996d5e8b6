"""Compiles a program ahead of time with libtpu for a TPU topology, without a TPU (``pip install libtpu``)."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from gshard.api.lowered import Lowered
from gshard.core.errors import GShardError
from gshard.core.mesh import Mesh
from gshard.device.machine import Machine
from gshard.remat.fit import peak_of
from gshard.xla.cycles import estimated_cycles

CYCLES_A_SECOND = {"v3": 940e6}


class PlanningError(GShardError):
    """A model cannot be split over such a machine, or cannot be compiled for it."""


def topology_mesh(machine: Machine) -> Mesh:
    """The devices of a TPU topology that need not exist, in row-major order, from libtpu.

    Raises:
        PlanningError: the machine is no TPU, libtpu is missing, or it does not know the topology.
    """
    if not machine.topology:
        raise PlanningError(f"{machine.name} is no arrangement of TPU chips.", hint="Name chips and shape: v3:8x8.")
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=machine.topology)
    except Exception as error:
        hint = "pip install libtpu (the version that belongs to jaxlib), and name the shape: v3:8x8."
        if "lockfile" in str(error):
            hint = "Another process has libtpu: wait for it, or set ALLOW_MULTIPLE_LIBTPU_LOAD=1 to compile beside it."
        raise PlanningError(
            f"libtpu cannot describe {machine.topology!r}: {str(error).splitlines()[0]}", hint=hint
        ) from error
    every: list[Any] = list(found.devices)
    devices = sorted(every, key=lambda d: (*reversed(d.coords), d.core_on_chip))
    return Mesh.of(jax.sharding.Mesh(np.array(devices, dtype=object), ("devices",)))


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
