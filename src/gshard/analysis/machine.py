"""Machine: what a device can do in a second, and how far away the others are.

    >>> tpu = Machine.of("v3:4x4")              # 16 chips of two cores each: 32 devices
    >>> tpu.size, [d.size for d in tpu.network]
    (32, [4, 4, 2])

The network is a grid of dimensions, major to minor, in the order of the mesh's devices. A dimension is a ring, a
line or a switch. From it follow the costs of section 5.3 of the GShard paper: on a torus of D devices an AllReduce of n
bytes sends 2 n (D - 1) / D bytes over links whose number per device is fixed, O(1); in an AllToAll every device sends n
bytes over O(sqrt(D)) hops and the links per device are fixed too, so it takes O(sqrt(D)).

Sources, all per device and one direction:

    v3        Jouppi et al., A domain-specific supercomputer for training deep neural networks, CACM 2020: two cores a
              chip that are devices of their own, 123 TFLOP/s, 900 GB/s and 32 GiB a chip, four links of 656 Gbit/s
    v4        Jouppi et al., TPU v4, ISCA 2023: 275 TFLOP/s, 1200 GB/s, 32 GiB, six links of 50 GB/s
    v5e, v5p, Google Cloud's pages "TPU v5e", "TPU v5p", "TPU v6e": peak, memory; links are the bandwidth of a chip in
    v6e       both directions divided by its ports and by two
    h100,     NVIDIA's data sheets of the SXM modules, without sparsity: 450 GB/s of NVLink each way; between nodes
    h200      one 400 Gbit/s port a GPU
    cpu       round numbers for one core of a server; ``gshard calibrate`` measures the machine at hand

What a TPU's compiler lets run beside products is read from the schedules of libtpu 0.0.42 (``benchmarks/overlap.py``).

A product of float32 arrays runs in one bfloat16 pass on TPU (JAX's default precision) and in TF32 on GPU.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gshard.core.errors import GShardError
from gshard.core.mesh import Mesh

RING, LINE, SWITCH = "ring", "line", "switch"
PERMUTE = "collective_permute"
_NUMBERS = 32  # bytes of a few numbers: of the indices into an array of up to eight dimensions, int32 each


class MachineError(GShardError):
    """There is no such machine, or it does not have as many devices as the mesh."""


@dataclasses.dataclass(frozen=True, slots=True)
class Dimension:
    """One dimension of the network.

    Attributes:
        size: devices along it.
        kind: ``ring``, ``line``, or ``switch`` (everybody at the same distance).
        bandwidth: bytes a second of one link in one direction; of a switch, what one device can send.
        latency: seconds of one hop.
        shared_by: devices that share a link: the cores of a chip.
    """

    size: int
    kind: str
    bandwidth: float
    latency: float
    shared_by: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """Devices of one kind and their network.

    Attributes:
        name: as asked for.
        flops: operations a second in products, by short dtype; others run at the rate of ``f32``.
        vector_flops: operations a second of everything that is no product.
        memory_bandwidth: bytes a second that a device reads and writes.
        memory: bytes of a device.
        network: dimensions, major to minor; the product of their sizes is the number of devices.
        launch: seconds that starting an operator takes.
        measured: whether ``calibrate`` made it.
        hides: the kinds of collectives that the compiler begins before products which do not need them, and ends after;
            None if that is not known.
    """

    name: str
    flops: Mapping[str, float] = dataclasses.field(hash=False)  # a dictionary has no hash
    vector_flops: float
    memory_bandwidth: float
    memory: int
    network: tuple[Dimension, ...]
    launch: float = 0.0
    measured: bool = False
    hides: tuple[str, ...] | None = None

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(d.size for d in self.network)

    def rate(self, dtype: str) -> float:
        """Operations a second of products in a dtype (short name)."""
        return self.flops.get(dtype) or self.flops["f32"]

    def starting(self, moved: float) -> float:
        """Seconds that starting an operator takes which reads and writes so many bytes.

        What is made of a few numbers (the place of a device, an offset) is computed where it is needed.
        """
        return self.launch if moved > _NUMBERS else 0.0

    def copying(self, array: float) -> float:
        """Seconds that a copy of so many bytes takes, a kernel by itself."""
        return 2 * array / self.memory_bandwidth + self.starting(2 * array)

    @property
    def keeps_low_precision_copies(self) -> bool:
        """Whether the compiler keeps bfloat16 copies of the float32 stacks that products in loops read in slices.

        libtpu does: the products run in one bfloat16 pass.
        """
        return re.match(r"v\d", self.name) is not None

    @property
    def combines(self) -> frozenset[str]:
        """The kinds of collectives of which the compiler puts several into one message (``combined``)."""
        gpu = re.match(r"[hb]\d", self.name) is not None
        return frozenset(("all_reduce", "all_gather", "reduce_scatter") if gpu else ("all_reduce",))

    @property
    def copies_for_collectives(self) -> bool:
        """Whether what is gathered or scattered has that dimension first, so that arrays are copied (``copied``).

        XLA on CPU and GPU; libtpu gathers along any dimension where it lies.
        """
        return re.match(r"v\d", self.name) is None

    @staticmethod
    def of(text: str, devices: int | None = None) -> Machine:
        """Reads ``kind:shape``, or the file that ``gshard calibrate`` wrote.

        Args:
            text: ``v3:32x32`` and ``v4:4x4x4`` name chips; ``h100:4x8`` nodes and GPUs of a node; ``cpu:8`` devices. A
                path that ends in ``.json`` is read.
            devices: how many devices are meant; needed where no shape is given, refused if it differs.

        Raises:
            MachineError: no such machine, or not as many devices.

        >>> Machine.of("h100", 16).network[1].size
        8
        """
        if text.endswith(".json"):
            return _fitted(_load(Path(text)), devices, f"Name a machine of {devices} devices.")
        match = re.fullmatch(r"(\w+)(?::(\d+(?:x\d+)*))?", text)
        if not match or match[1] not in _KINDS:
            raise MachineError(
                f"no machine is called {text!r}.",
                got=f"machines: {', '.join(_KINDS)}",
                hint="Write v3:32x32 (chips), h100:4x8 (nodes and GPUs), cpu:8, or a file of gshard calibrate.",
            )
        kind = _KINDS[match[1]]
        shape = tuple(int(n) for n in match[2].split("x")) if match[2] else _shape_for(kind, text, devices)
        made = _build(f"{match[1]}:{'x'.join(map(str, shape))}", kind, shape)
        return _fitted(made, devices, _hint(match[1], kind, devices))

    def dump(self, path: Path) -> None:
        """Writes the machine as JSON, to be read by ``Machine.of``."""
        path.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n", "utf-8")

    def __str__(self) -> str:
        grid = " x ".join(f"{d.size} ({d.kind})" for d in self.network)
        return (
            f"{self.name}: {self.size} devices, {grid}; {self.rate('bf16') / 1e12:.3g} TFLOP/s in bf16, "
            f"{self.memory_bandwidth / 1e9:.4g} GB/s, {self.memory / 2**30:.4g} GiB"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Kind:
    """What a chip or GPU is like; ``wraps``: a dimension closes to a ring from this size on."""

    flops: Mapping[str, float]
    vector_flops: float
    memory_bandwidth: float
    memory: int
    link: float
    dimensions: int
    wraps: int = 0
    cores: int = 1
    latency: float = 1e-6
    launch: float = 0.0
    node: int = 0
    between_nodes: float = 0.0
    hides: tuple[str, ...] | None = None


_T, _G, _GIB = 1e12, 1e9, 2**30


def _tpu(
    bf16: float, s8: float, bandwidth: float, gib: int, link: float, dimensions: int, wraps: int, *hides: str
) -> _Kind:
    # The vector unit does about a sixteenth of the matrix unit's work in float32.
    rates = {"bf16": bf16 * _T, "f32": bf16 * _T, "s8": s8 * _T}
    return _Kind(rates, bf16 * _T / 16, bandwidth * _G, gib * _GIB, link * _G, dimensions, wraps, hides=hides)


def _gpu(memory_bandwidth: float, memory: float) -> _Kind:
    rates = {"f64": 67 * _T, "f32": 494 * _T, "bf16": 989 * _T, "f16": 989 * _T, "s8": 1979 * _T}
    memory_bytes = int(memory * _G)
    return _Kind(
        rates, 67 * _T, memory_bandwidth * _G, memory_bytes, 450 * _G, 1, latency=2e-6, launch=3e-6, node=8,
        between_nodes=50 * _G,
    )  # fmt: skip


# A core of v3 has half of the chip; both send over the chip's links. Dimensions of v4 and v5p close to rings when they
# are made of whole cubes of 4; v3, v5e and v6e close them at the size of a pod.
_KINDS = {
    "v3": dataclasses.replace(_tpu(61.5, 61.5, 450, 16, 82, 2, 32), cores=2),
    "v4": _tpu(275, 275, 1200, 32, 50, 3, 4, PERMUTE),
    "v5e": _tpu(197, 393, 819, 16, 50, 2, 16, PERMUTE, "all_gather"),
    "v5p": _tpu(459, 918, 2765, 95, 100, 3, 4, PERMUTE),
    "v6e": _tpu(918, 1836, 1638, 32, 100, 2, 16, PERMUTE),
    "h100": _gpu(3350, 80),
    "h200": _gpu(4800, 141),
    "cpu": _Kind(
        {"f32": 50 * _G, "f64": 25 * _G, "bf16": 10 * _G}, 5 * _G, 10 * _G, 4 * _GIB, 5 * _G, 1, latency=2e-5,
        launch=1e-6,
    ),
}  # fmt: skip


# What JAX calls the devices of a kind; the first that fits.
_CALLED = {"v5 lite": "v5e", "v6 lite": "v6e", "v5": "v5p", "v4": "v4", "v3": "v3", "h100": "h100", "h200": "h200"}


def kind_of_devices(mesh: Mesh) -> str:
    """The name of the kind of machine that a mesh's devices are; ``cpu`` for those that are not known."""
    called = "" if mesh.devices is None else str(mesh.devices[0].device_kind).lower()
    return next((name for part, name in _CALLED.items() if part in called), "cpu")


def hides_of(kind: str) -> tuple[str, ...] | None:
    """``Machine.hides`` of a kind of machine, whatever its shape."""
    return _KINDS[kind].hides


def _shape_for(kind: _Kind, text: str, devices: int | None) -> tuple[int, ...]:
    """The most square grid of chips with so many devices."""
    if devices is None:
        raise MachineError(f"{text!r} does not say how many devices.", hint=f"Write {text}:8, for example.")
    if devices % kind.cores:
        raise MachineError(
            f"{text!r} has {kind.cores} devices on each chip, which do not make {devices}.",
            hint=f"Use a multiple of {kind.cores} devices.",
        )
    if kind.node:
        return (devices // kind.node, kind.node) if devices % kind.node == 0 else (1, devices)
    chips, shape = devices // kind.cores, []
    for left in range(kind.dimensions, 0, -1):
        root = max(d for d in range(1, chips + 1) if chips % d == 0 and d**left <= chips)
        shape.append(root)
        chips //= root
    return tuple(reversed(shape))


def _build(name: str, kind: _Kind, shape: tuple[int, ...]) -> Machine:
    if kind.node:
        nodes, gpus = math.prod(shape[:-1]), shape[-1]
        network = [Dimension(nodes, SWITCH, kind.between_nodes, 2 * kind.latency)] if nodes > 1 else []
        network.append(Dimension(gpus, SWITCH, kind.link, kind.latency))
    elif kind.wraps:
        if len(shape) > kind.dimensions:
            raise MachineError(f"{name!r} has {len(shape)} dimensions.", got=f"its network has {kind.dimensions}")
        network = [
            Dimension(n, RING if n >= kind.wraps and n % kind.wraps == 0 else LINE, kind.link, kind.latency, kind.cores)
            for n in shape
        ]
        if kind.cores > 1:
            # Cores of a chip exchange through their memory.
            network.append(Dimension(kind.cores, SWITCH, kind.memory_bandwidth / 2, kind.latency))
    else:
        network = [Dimension(math.prod(shape), SWITCH, kind.link, kind.latency)]
    return Machine(
        name, dict(kind.flops), kind.vector_flops, kind.memory_bandwidth, kind.memory, tuple(network), kind.launch,
        hides=kind.hides,
    )  # fmt: skip


def _load(path: Path) -> Machine:
    hint = "Make one with: gshard calibrate --out machine.json"
    try:
        data: dict[str, Any] = json.loads(path.read_text("utf-8"))
        network = tuple(Dimension(**d) for d in data.pop("network"))
        hides = data.pop("hides", None)
        return Machine(network=network, hides=None if hides is None else tuple(hides), **data)
    except OSError as error:
        raise MachineError(f"{path} cannot be read: {error.strerror}.", hint=hint) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise MachineError(f"{path} does not describe a machine: {error}.", hint=hint) from error


def _hint(name: str, kind: _Kind, devices: int | None) -> str:
    """How to write a machine of so many devices."""
    try:
        shape = "x".join(map(str, _shape_for(kind, name, devices)))
    except MachineError:
        return f"{name} has {kind.cores} devices on each chip: use a mesh of a multiple of {kind.cores}."
    return f"Write {name}:{shape}, or leave out the shape: {name}."


def _fitted(machine: Machine, devices: int | None, hint: str) -> Machine:
    if devices is not None and machine.size != devices:
        raise MachineError(f"{machine.name} has {machine.size} devices, and the mesh has {devices}.", hint=hint)
    return machine
