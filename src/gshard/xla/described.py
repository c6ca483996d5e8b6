"""Described devices: the TPUs and GPUs of a machine, for which XLA compiles although they need not exist.

libtpu describes TPUs, and JAX's CUDA plugin compiles for GPUs whose figures it is given.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from gshard.core.errors import GShardError
from gshard.core.mesh import Mesh
from gshard.device.machine import KINDS, Machine

# Of each generation: compute capability, cores, arithmetic units of a core, KiB of its shared memory and MiB of the
# second-level cache, and GHz, from the device descriptions in XLA's source (xla/backends/gpu/target_config/specs).
_AMPERE, _HOPPER = (8, 0, 108, 64, 164, 40, 1.41), (9, 0, 132, 128, 228, 50, 1.98)
_BLACKWELL, _ULTRA = (10, 0, 148, 128, 228, 126, 1.965), (10, 3, 152, 128, 228, 129, 2.07)
_GPUS = dict.fromkeys(("a100", "a100_40gb"), _AMPERE) | dict.fromkeys(("h100", "h200"), _HOPPER)
_GPUS |= dict.fromkeys(("b200", "gb200"), _BLACKWELL) | dict.fromkeys(("b300", "gb300"), _ULTRA)
_GPU = """
gpu_device_info {{
  cuda_compute_capability {{ major: {0} minor: {1} }} core_count: {2} fpus_per_core: {3}
  shared_memory_per_core: {shared} shared_memory_per_block_optin: {most} shared_memory_per_block: 49152
  l2_cache_size: {cache} clock_rate_ghz: {6} memory_bandwidth: {bandwidth} device_memory_size: {memory}
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 12 }} runtime_version {{ major: 13 }}
device_description_str: "{name}"
"""


class PlanningError(GShardError):
    """A model cannot be split over such a machine, or cannot be compiled for it."""


def described_mesh(machine: Machine) -> Mesh:
    """The devices of a machine that need not exist, in row-major order, as one axis.

    Raises:
        PlanningError: no compiler for them is installed, or none compiles for devices that do not exist.
    """
    if not machine.topology and machine.kind not in _GPUS:
        raise PlanningError(
            f"XLA compiles for {machine.name} only where these devices are.",
            hint=f"Without devices it compiles for TPUs, such as v5e:8x8, and for {', '.join(_GPUS)}.",
        )
    try:
        found = topologies.get_topology_desc(**_description(machine)).devices
    except Exception as error:
        package = "libtpu" if machine.topology else "JAX's CUDA plugin"
        raise PlanningError(
            f"{package} cannot describe {machine.name!r}: {str(error).splitlines()[0]}", hint=_hint(machine, str(error))
        ) from error
    devices: list[Any] = list(found)
    if machine.topology:
        devices.sort(key=lambda d: (*reversed(d.coords), d.core_on_chip))
    return Mesh.of(jax.sharding.Mesh(np.array(devices, dtype=object), ("devices",)))


def _description(machine: Machine) -> dict[str, str]:
    if machine.topology:
        one_device = {"chip_config_name": "megacore"} if machine.kind == "v4" else {}  # of both cores of a chip
        return {"platform": "tpu", "topology_name": machine.topology, **one_device}
    chip, kind = _GPUS[machine.kind], KINDS[machine.kind]
    config = _GPU.format(
        *chip, shared=chip[4] << 10, most=(chip[4] - 1) << 10, cache=chip[5] << 20,
        bandwidth=int(kind.memory_bandwidth), memory=kind.memory, name=kind.devices[0],
    )  # fmt: skip
    in_node = machine.network[-1].size
    return {
        "platform": "cuda", "target_config": config, "topology_name": "",
        "topology": f"{machine.size // in_node}x{in_node}x1",  # nodes, GPUs of a node
    }  # fmt: skip


def _hint(machine: Machine, error: str) -> str:
    if not machine.topology:
        return 'pip install "jax[cuda13]": it compiles for GPUs that need not exist.'
    if "lockfile" in error:
        return "Another process has libtpu: wait for it, or set ALLOW_MULTIPLE_LIBTPU_LOAD=1 to compile beside it."
    if "not installed" in error:
        return "pip install libtpu (the version that belongs to jaxlib): it describes TPUs that need not exist."
    return "pip install libtpu (the version that belongs to jaxlib), and name the shape: v3:8x8."
