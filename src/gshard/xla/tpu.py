"""TPUs that need not exist: their devices, and the compiler's own estimate of a program's time (libtpu)."""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from gshard.core.errors import GShardError
from gshard.core.mesh import Mesh
from gshard.device.machine import Machine
from gshard.xla.hlo_parser import Computation, Instruction, Module, read_module, trip_count

# Topology: the devices of a TPU that need not exist, as libtpu describes them (``pip install libtpu``).


class PlanningError(GShardError):
    """A model cannot be split over such a machine, or cannot be compiled for it."""


def topology_mesh(machine: Machine) -> Mesh:
    """The devices of a TPU topology that need not exist, in row-major order, from libtpu."""
    if not machine.topology:
        raise PlanningError(f"{machine.name} is no arrangement of TPU chips.", hint="Name chips and shape: v3:8x8.")
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=machine.topology)
    except Exception as error:
        hint = "pip install libtpu (the version that belongs to jaxlib), and name the shape: v3:8x8."
        if "not installed" in str(error):
            hint = "pip install libtpu (the version that belongs to jaxlib): it describes TPUs that need not exist."
        if "lockfile" in str(error):
            hint = "Another process has libtpu: wait for it, or set ALLOW_MULTIPLE_LIBTPU_LOAD=1 to compile beside it."
        raise PlanningError(
            f"libtpu cannot describe {machine.topology!r}: {str(error).splitlines()[0]}", hint=hint
        ) from error
    every: list[Any] = list(found.devices)
    devices = sorted(every, key=lambda d: (*reversed(d.coords), d.core_on_chip))
    return Mesh.of(jax.sharding.Mesh(np.array(devices, dtype=object), ("devices",)))


# Cycles: reads the TPU compiler's own estimate of a program's time.

_NOTE = re.compile(r'"estimated_cycles":"(\d+)"')


def estimated_cycles(program: str | Module) -> int:
    """The sum over a compiled program; 0 where the compiler notes nothing. Of branches the longer counts."""
    module = read_module(program) if isinstance(program, str) else program
    return _of(module, module.computations[module.entry]) if module.entry else 0


def _of(module: Module, computation: Computation) -> int:
    return sum(cycles_of(module, computation, made) for made in computation.instructions.values())


def cycles_of(module: Module, computation: Computation, made: Instruction) -> int:
    """The estimate of one instruction of a computation, and of what it calls."""
    inner = [_of(module, module.computations[name]) for name in made.bodies]
    if made.opcode == "while":
        return sum(inner) * (trip_count(module, computation, made) or 1)
    if inner:
        return max(inner)
    note = _NOTE.search(made.attributes)
    return int(note[1]) if note else 0
