"""TPUs that need not exist: their devices, as libtpu describes them (``pip install libtpu``)."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from gshard.core.errors import GShardError
from gshard.core.mesh import Mesh
from gshard.device.machine import Machine


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
