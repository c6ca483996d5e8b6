"""Describes a machine: rates, memory, network and compiler of the devices that a program runs on.

    >>> tpu = Machine.of("v3:4x4")              # 16 chips of two cores each: 32 devices
    >>> tpu.size, [d.size for d in tpu.network]
    (32, [4, 4, 2])

The network is a grid of dimensions, major to minor, in the order of the mesh's devices. A dimension is a ring, a line,
a switch, or a link between any two devices. The costs of section 5.3 of the GShard paper follow from it: on a torus of
D devices, an AllReduce of n bytes sends 2 n (D - 1) / D bytes over a fixed number of links per device, O(1). In an
AllToAll, every device sends n bytes over O(sqrt(D)) hops, and the number of links per device is fixed too, so it takes
O(sqrt(D)).

``machine_kinds`` has the figures of each kind, with their sources. A name is a label: a model depends on the other
fields only.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gshard.core.errors import GShardError
from gshard.core.jax_adapter import user_line
from gshard.core.jax_adapter_tracebacks import without_our_frames
from gshard.device.machine_kinds import COMPILERS, DIRECT, KINDS, LINE, RING, SWITCH, Compiler, Kind


class MachineError(GShardError):
    """There is no such machine, or its number of devices differs from the mesh's."""


@dataclasses.dataclass(frozen=True, slots=True)
class Dimension:
    """One dimension of the network."""

    size: int  # devices along it
    # ``ring``, ``line``, ``switch`` (one link from each device into the middle) or ``direct`` (one link between any two
    # devices)
    kind: str
    bandwidth: float  # bytes a second of one link in one direction; for a switch, those that one device can send
    latency: float  # seconds of one hop
    shared_by: int = 1  # the number of devices that share a link: the cores of a chip

    @property
    def is_one_hop(self) -> bool:
        """Whether any device is one hop away from any other."""
        return self.kind in (SWITCH, DIRECT)

    def sent_among(self, members: int) -> float:
        """Bytes a second that one of ``members`` devices sends to the others together, if all are one hop away."""
        return self.bandwidth * (members - 1 if self.kind == DIRECT else 1)


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """Devices of one kind and their network.

    Attributes:
        name: the name in messages; nothing else depends on it.
        flops: operations a second in products, by dtype as XLA writes it; for other dtypes see ``rate``.
        vector_flops: operations a second outside of products.
        memory_bandwidth: bytes a second that a device reads and writes.
        memory: bytes of a device.
        network: dimensions, major to minor; the product of their sizes is the number of devices.
        launch: seconds of a kernel launch.
        host_link: bytes a second between a device and the memory of its host, in one direction; 0 if unknown.
        measured: whether ``calibrate`` made it.
        compiler: the behaviour of its compiler.
        kind: the kind of the devices: a kind that ``of`` reads, or the name in JAX. Modelled times are compared on
            machines of one kind.
        topology: the name of this arrangement of chips in libtpu; empty if it has none.
    """

    name: str
    flops: Mapping[str, float] = dataclasses.field(hash=False)  # a dictionary has no hash
    vector_flops: float
    memory_bandwidth: float
    memory: int
    network: tuple[Dimension, ...]
    launch: float = 0.0
    host_link: float = 0.0
    measured: bool = False
    compiler: Compiler = COMPILERS["cpu"]
    kind: str = ""
    topology: str = ""

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(d.size for d in self.network)

    def rate(self, dtype: str) -> float:
        """Operations a second of products in a dtype (short name).

        A rate that was not measured has the ratio to bfloat16 that it has in the figures of the kind. XLA widens floats
        of fewer than 16 bits that have no rate. Other dtypes run at the rate of ``f32``.
        """
        known, dtype = KINDS[self.kind].flops if self.kind in KINDS else {}, dtype.replace("_", "")
        if dtype in known and dtype not in self.flops and "bf16" in self.flops:
            return self.flops["bf16"] * known[dtype] / known["bf16"]
        return _rate(self.flops, dtype)

    def peak(self, dtype: str) -> float:
        """The vendor's rate of products in a dtype, to which MFU relates; ``rate`` if no vendor gives one."""
        vendor = KINDS[self.kind].peak if self.kind in KINDS else {}
        return _rate(vendor, dtype.replace("_", "")) if vendor else self.rate(dtype)

    @staticmethod
    @without_our_frames
    def of(text: str, devices: int | None = None) -> Machine:
        """Reads ``kind:shape``, or the file that ``gshard calibrate`` wrote.

        Args:
            text: ``v3:32x32`` and ``v4:4x4x4`` name chips; ``h100:4x8`` nodes and GPUs of a node; ``cpu:8`` devices;
                capitals do not matter. A path that ends in ``.json`` is read.
            devices: the number of devices. Required if the text has no shape; it must equal that of a shape.

        Raises:
            MachineError: there is no such machine, or it has another number of devices.

        >>> Machine.of("h100", 16).network[1].size
        8
        """
        text = str(text)  # of any type: what is no machine is refused below
        if text.endswith(".json"):
            return _fitted(_load(Path(text)), devices, f"Name a machine of {devices} devices.")
        match = re.fullmatch(r"(\w+)(?::(\d+(?:x\d+)*))?", text.lower())
        if not match or match[1] not in KINDS:
            near = difflib.get_close_matches(match[1], KINDS, n=1) if match else []
            meant = f"Did you mean {near[0]!r}? " if near else ""
            raise MachineError(
                f"no machine is called {text!r}.",
                user_line(),
                got=f"machines: {', '.join(KINDS)}",
                hint=f"{meant}Write v3:32x32 (chips), h100:4x8 (nodes and GPUs), cpu:8, or a file of gshard calibrate.",
            )
        kind = KINDS[match[1]]
        shape = tuple(int(n) for n in match[2].split("x")) if match[2] else _shape_for(kind, text, devices)
        return _fitted(_build(match[1], kind, shape), devices, _hint(match[1], kind, devices))

    @staticmethod
    def read(given: str | Machine, devices: int) -> Machine:
        """The given machine, or the one that ``of`` reads; errors as in ``of``."""
        return given if isinstance(given, Machine) else Machine.of(given, devices)

    def dump(self, path: Path) -> None:
        """Writes the machine to a file as JSON, for ``Machine.of``."""
        path.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n", "utf-8")

    def __str__(self) -> str:
        grid = " x ".join(f"{d.size} ({d.kind})" for d in self.network)
        name = f"{self.name}, measured" if self.measured else self.name
        return (
            f"{name}: {self.size} devices, {grid}; {self.rate('bf16') / 1e12:.4g} TFLOP/s in bf16, "
            f"{self.memory_bandwidth / 1e9:.4g} GB/s, {self.memory / 2**30:.4g} GiB"
        )


def _rate(rates: Mapping[str, float], dtype: str) -> float:
    if dtype not in rates and re.match(r"f[468]e", dtype):
        return max(rates["f32"], rates.get("bf16", 0.0))
    return rates.get(dtype) or rates["f32"]


def _shape_for(kind: Kind, text: str, devices: int | None) -> tuple[int, ...]:
    """The most square grid of chips with this number of devices."""
    if devices is None:
        raise MachineError(f"{text!r} does not say how many devices.", hint=f"Write {text}:8, for example.")
    if devices % kind.cores:
        raise MachineError(
            f"{text!r} has {kind.cores} devices on each chip, which do not make {devices}.",
            hint=f"Use a multiple of {kind.cores} devices.",
        )
    if kind.node:
        inside = max(n for n in range(1, min(kind.node, devices) + 1) if devices % n == 0)
        return devices // inside, inside
    chips, shape = devices // kind.cores, []
    for left in range(kind.dimensions, 0, -1):
        root = max(d for d in range(1, chips + 1) if chips % d == 0 and d**left <= chips)
        shape.append(root)
        chips //= root
    return tuple(reversed(shape))


def _build(called: str, kind: Kind, shape: tuple[int, ...]) -> Machine:
    name = f"{called}:{'x'.join(map(str, shape))}"
    if kind.node:
        nodes, gpus = math.prod(shape[:-1]), shape[-1]
        network = [Dimension(nodes, SWITCH, kind.between_nodes, 2 * kind.latency)] if nodes > 1 else []
        network.append(Dimension(gpus, kind.inside, kind.link, kind.latency))
    elif kind.wraps:
        if len(shape) > kind.dimensions:
            raise MachineError(f"{name!r} has {len(shape)} dimensions.", got=f"its network has {kind.dimensions}")
        network = [
            Dimension(n, RING if n >= kind.wraps and n % kind.wraps == 0 else LINE, kind.link, kind.latency, kind.cores)
            for n in shape
        ]
        if kind.cores > 1:
            between = kind.between_cores or kind.memory_bandwidth / 2  # what goes through memory is written and read
            network.append(Dimension(kind.cores, SWITCH, between, kind.latency))
    else:
        network = [Dimension(math.prod(shape), SWITCH, kind.link, kind.latency)]
    return Machine(
        name, dict(kind.flops), kind.vector_flops, kind.memory_bandwidth, kind.memory, tuple(network), kind.launch,
        kind.host_link, compiler=kind.compiler, kind=called, topology=name if kind.wraps else "",
    )  # fmt: skip


def _load(path: Path) -> Machine:
    hint = "Make one with: gshard calibrate --out machine.json"
    try:
        data: dict[str, Any] = json.loads(path.read_text("utf-8"))
        network = tuple(Dimension(**d) for d in data.pop("network"))
        if data.get("measured") and not (data.get("kind") and "compiler" in data):
            raise MachineError(f"{path} is of an older version, which did not write what the compiler does.", hint=hint)
        if "compiler" in data:
            lists = {name: tuple(x) for name, x in data["compiler"].items() if isinstance(x, list)}
            data["compiler"] = Compiler(**data["compiler"] | lists)
        return Machine(network=network, **data)
    except OSError as error:
        raise MachineError(f"{path} cannot be read: {error.strerror}.", hint=hint) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise MachineError(f"{path} does not describe a machine: {error}.", hint=hint) from error


def _hint(name: str, kind: Kind, devices: int | None) -> str:
    """A hint with the text of a machine with this number of devices."""
    try:
        shape = "x".join(map(str, _shape_for(kind, name, devices)))
    except MachineError:
        return f"{name} has {kind.cores} devices on each chip: use a mesh of a multiple of {kind.cores}."
    return f"Write {name}:{shape}, or leave out the shape: {name}."


def _fitted(machine: Machine, devices: int | None, hint: str) -> Machine:
    if devices is not None and machine.size != devices:
        what = f"{machine.name} has {machine.size} devices, and the mesh has {devices}."
        raise MachineError(what, user_line(), hint=hint)
    return machine
