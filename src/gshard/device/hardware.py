"""Finds the machine of a mesh's devices, and handles devices without a model.

    kind_of_devices(mesh)      "h100"; None for an accelerator that ``machine_kinds`` does not have
    machine_of(mesh)           its machine; an error for such an accelerator, because its times are unknown
    machine_to_order(mesh)     the same; for such an accelerator, after one warning, a machine that counts bytes
    machine_to_plan_for(mesh)  the same; None for such an accelerator, and for CPUs

CPUs are ``cpu``, and so is an abstract mesh, which has no devices.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

from gshard.core.mesh import Mesh
from gshard.device.machine import Dimension, Machine, MachineError
from gshard.device.machine_kinds import COMPILERS, DEVICE_KINDS, KINDS, SUFFIXES, SWITCH, Compiler

# One byte of memory traffic counts as much as this many operations. These are about the middle of ``machine_kinds``: in
# the time to read a byte, most accelerators there do 150 to 320 operations of a bfloat16 product; in the time to send a
# byte, they read 4 to 12 bytes.
OPERATIONS_A_BYTE = 256
OTHER_OPERATIONS_A_BYTE = 16
BYTES_FOR_ONE_SENT = 8
_A_SECOND = 1e12  # bytes a second: only ratios of times have a meaning there


class UnknownMachineWarning(UserWarning):
    """There is no model of the devices: gshard counts bytes and operations instead of seconds."""


def kind_called(device_kind: str, platform: str) -> str | None:
    """The kind of machine of a device; None if it is unknown.

    >>> kind_called("NVIDIA H100 80GB HBM3", "gpu"), kind_called("TPU v5 lite", "tpu"), kind_called("cpu", "cpu")
    ('h100', 'v5e', 'cpu')
    >>> kind_called("NVIDIA H100 PCIe", "gpu") is None  # other clocks, other memory, other links
    True
    """
    if platform == "cpu":
        return "cpu"
    called = device_kind.lower()
    for suffix in SUFFIXES:
        called = called.removesuffix(suffix)
    return DEVICE_KINDS.get(called)


def kind_of_devices(mesh: Mesh) -> str | None:
    """The kind of machine of a mesh's devices; None if it is unknown."""
    if mesh.devices is None:
        return "cpu"
    return kind_called(str(mesh.devices[0].device_kind), str(mesh.devices[0].platform))


def compiler_of(device: Any) -> Compiler:
    """The behaviour of a device's compiler, which depends on its platform."""
    return COMPILERS.get(str(device.platform), COMPILERS["cpu"])


def unknown_devices(mesh: Mesh) -> str | None:
    """The name of a mesh's devices in JAX, if there is no model of them; otherwise None."""
    if mesh.devices is None or kind_of_devices(mesh) is not None:
        return None
    return str(mesh.devices[0].device_kind)


def machine_of(mesh: Mesh) -> Machine:
    """The machine of a mesh's devices."""
    kind = kind_of_devices(mesh)
    if kind is None:
        raise MachineError(f"there is no model of {unknown_devices(mesh)}, so that no times are known.", hint=_HINT)
    return Machine.of(kind, mesh.size)


def machine_to_plan_for(mesh: Mesh) -> Machine | None:
    """The machine for whose times gshard plans if the user names none: that of the mesh's devices.

    None, so that gshard plans by bytes, for CPUs and abstract meshes, for accelerators without a model, and for a
    number of devices that makes no whole chips.
    """
    kind = None if mesh.devices is None else kind_of_devices(mesh)
    if kind is None or kind == "cpu" or mesh.size % KINDS[kind].cores:
        return None
    return machine_of(mesh)


def machine_to_order(mesh: Mesh) -> Machine:
    """A machine whose times only rank alternatives: that of the devices, or one that counts bytes."""
    called = unknown_devices(mesh)
    if called is None:
        return machine_of(mesh)
    _warn(called)
    assert mesh.devices is not None, "an abstract mesh is known"
    operations = OPERATIONS_A_BYTE * _A_SECOND
    return Machine(
        f"{called} (no model)",
        {"f32": operations},
        OTHER_OPERATIONS_A_BYTE * _A_SECOND,
        _A_SECOND,
        memory_of(mesh.devices[0]) or sys.maxsize,
        (Dimension(mesh.size, SWITCH, _A_SECOND / BYTES_FOR_ONE_SENT, 0.0),),
        compiler=compiler_of(mesh.devices[0]),
        kind=called,
    )


def memory_of(device: Any) -> int | None:
    """Bytes of a device that XLA may use; None if the device does not report them."""
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return None if limit is None else int(limit)


_HINT = (
    'Give machine= a kind that is near, such as "h100", or measure these devices: gshard calibrate --out machine.json, '
    'and machine="machine.json".'
)


_WARNED: set[str] = set()


def _warn(called: str) -> None:
    """Warns once in a process."""
    if called in _WARNED:
        return
    warnings.warn(
        f"there is no model of {called}: what is recomputed to fit is chosen by bytes and operations. {_HINT}",
        UnknownMachineWarning,
        stacklevel=3,
    )
    _WARNED.add(called)
