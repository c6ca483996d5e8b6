"""Lists the accelerators that gshard models, with their figures and their names in JAX.

Figures are per device and for one direction, without sparsity. A row of ``KINDS`` is everything that gshard needs for a
machine. ``make machines`` writes the rows into ``docs/machines.md``.

    v3        two cores a chip that are devices of their own: 123 TFLOP/s, 900 GB/s and 32 GiB a chip, four links of
              656 Gbit/s; the share of a link that collectives reach and the order of an all-to-all: figure 9 of the
              GShard paper (docs/benchmarks.md)
    v5e, v5p, links are the bandwidth of a chip in both directions divided by its ports and by two
    v6e
    tpu7x     two cores a chip that are devices of their own: 2307 TFLOP/s, 7380 GB/s and 192 GiB a chip, 1200 GB/s over
              six ports; the link between the cores is six times a port
    h100,     450 GB/s of NVLink each way; between nodes one 400 Gbit/s port a GPU
    h200
    b200,     an eighth of a system; 8-bit integers of b300: NVIDIA Blackwell Ultra data sheet
    b300
    gb200,    a 72nd of a rack; 8-bit integers of gb300: NVIDIA Blackwell Ultra data sheet
    gb300
    mi...     seven links, one to each of the others
    cpu       ``gshard calibrate`` measures the machine at hand

Links to the host (``host_link``): PCIe Gen 4 x16 (A100) and Gen 5 x16 (H100, H200, B200, AMD), from the data sheets
below; TPU v4 and v6e: Austin et al., *How to Scale Your Model*, 2025, part 2. The other rows have no figure. On the CPU
the memory of the host is that of the device: a transfer reads and writes it.

Rows of GPUs have the share of the vendor's rates of products and memory that was measured on an H100. No vendor gives
the time of a hop and of a launch. Those of ``h100`` apply to all GPUs, and 1 µs a hop to all TPUs: the AllReduces of
figure 9 agree with that on v3.

Products of 8-bit floats run at twice the rate of bfloat16 on NVIDIA's GPUs from Hopper on, AMD's and TPU7x, by the same
data sheets. Other devices have no rate for them: XLA widens the operands.

A product of float32 arrays runs in one bfloat16 pass on TPU (JAX's default precision), in TF32 on NVIDIA's GPUs, and in
float32 on AMD's, where XLA does not use TF32. TPUs without a rate for 8-bit integers multiply them as bfloat16.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

from gshard.comm.steps import PERMUTE

RING, LINE, SWITCH, DIRECT = "ring", "line", "switch", "direct"


@dataclasses.dataclass(frozen=True, slots=True)
class Compiler:
    """The behaviour of a compiler on a per-device program, independent of the speed of devices.

    The cost model reads compiler behaviour from these fields only. A measured machine has the compiler of its kind.
    """

    source: str  # the compiler, its version, and the source of its behaviour
    # the kinds of collectives that it puts into one message with others (``combiner``)
    combines: tuple[str, ...] = ("all_reduce",)
    combined_bytes: int = 30 << 20  # the largest such message, in bytes of one device's operands
    # the kinds of collectives that it starts before kernels that do not need them, and ends after these
    # (``async_overlap``); None if unknown
    hides: tuple[str, ...] | None = None
    # those of them that overlap with products only, because they become part of these
    hides_beside_products: tuple[str, ...] = ()
    # whether elementwise work on the result of a product is fused into the product (``epilogues``)
    fuses_epilogues: bool = False
    # the longest row, in elements, that one kernel both reduces and transforms with the result (``compiled_kernels``);
    # 0 if each step is a kernel of its own
    fused_row: int = 0
    # whether each kernel that reads an elementwise result computes it again if that moves fewer bytes, and whether one
    # kernel writes several results (``compiled_kernels``)
    fuses_elementwise: bool = False
    # whether arrays are copied before or after a gather or scatter so that its dimension comes first
    # (``layout_copies``)
    copies_for_collectives: bool = True
    # whether products, too, read and write arrays in the layouts of collectives. Then only one device's part is copied,
    # before it is gathered or after it is scattered.
    products_take_layouts: bool = False
    # whether products of float32 run in one bfloat16 pass, and arrays that only they read are stored in bfloat16
    # (``bf16_storage``)
    keeps_low_precision_copies: bool = False
    # whether a product that overlaps with a gather no longer writes its result directly into the stack of a loop
    # (``remat.prefetch``). Six training loops on libtpu gained nothing by prefetching.
    gathers_split_stack_writes: bool = True
    # whether every device sends its parts of an all-to-all to one device after the other, all in the same order. At any
    # time messages then go around a ring in one direction (``network``).
    exchanges_in_turn: bool = False
    # whether a product reads a slice of a loop's stack where it is, if no other product reads it, and writes its result
    # into such a stack (``loop_stacks``)
    products_slice_stacks: bool = False
    # whether the stacks of a loop that counts up are filled with zeros before the loop
    fills_forward_stacks: bool = True
    # whether a product of ragged groups (``lax.ragged_dot``) multiplies all rows with the matrix of each group, because
    # there is no kernel for it
    multiplies_groups: bool = False


def _libtpu(*hides: str, schedules_read: bool = True) -> Compiler:
    return Compiler(
        "libtpu 0.0.42: schedules of compiled programs (benchmarks/overlap.py)",
        hides=hides,
        hides_beside_products=("all_gather",),
        fuses_epilogues=schedules_read,
        copies_for_collectives=False,
        keeps_low_precision_copies=True,
        products_slice_stacks=True,
        fills_forward_stacks=False,
    )


# By ``jax.Device.platform``; other platforms count as the CPU. ``combined_bytes`` is XLA's default of
# ``xla_gpu_all_reduce_combine_threshold_bytes`` and of the related thresholds.
COMPILERS = {
    "cpu": Compiler("XLA:CPU of jaxlib 0.10.2: compiled programs (tests/device/test_cost.py)", multiplies_groups=True),
    "gpu": Compiler(
        "XLA:GPU of jaxlib 0.11.2: programs compiled for H100 (benchmarks/fusions.py); what it combines: its source",
        combines=("all_reduce", "all_gather", "reduce_scatter"),
        fused_row=16_384,
        fuses_elementwise=True,
        products_take_layouts=True,
        multiplies_groups=True,
    ),
    "tpu": dataclasses.replace(_libtpu(schedules_read=False), hides=None),
}


# Inferred, not read: AllToAlls of figure 9 take as long on 32 chips in a ring as they would on 32 in a line.
_V3 = dataclasses.replace(_libtpu(schedules_read=False), exchanges_in_turn=True)


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """The figures of a chip or GPU."""

    # flops, vector_flops, memory_bandwidth, memory, launch: as in ``Machine``, of one device
    flops: Mapping[str, float]
    vector_flops: float
    memory_bandwidth: float
    memory: int
    link: float  # bytes a second of one link in one direction; for a switch, those that one device can send
    dimensions: int  # the number of dimensions of the network of chips
    wraps: int = 0  # a dimension is a ring if its size is a multiple of this; 0 if the network is no torus
    cores: int = 1  # the number of devices of a chip
    # bytes a second from one core of a chip to another; 0 if they exchange through their memory
    between_cores: float = 0.0
    latency: float = 1e-6  # seconds of one hop
    launch: float = 0.0
    node: int = 0  # the number of GPUs that are connected without a network card; 0 if there are no nodes
    inside: str = SWITCH  # the kind of their connection
    between_nodes: float = 0.0  # bytes a second that a GPU sends to other nodes
    host_link: float = 0.0  # bytes a second between a device and the memory of its host, in one direction; 0 if unknown
    compiler: Compiler = COMPILERS["cpu"]  # the behaviour of its compiler
    # the vendor's rates of products, if ``flops`` has the measured share of them
    peak: Mapping[str, float] = dataclasses.field(default_factory=dict)
    source: str = ""  # the source of the figures
    # ``jax.Device.device_kind`` of these devices. Other boards with the same chip (PCIe cards, NVL pairs) have other
    # figures.
    devices: tuple[str, ...] = ()


_T, _G, _GIB = 1e12, 1e9, 2**30

# The share of a vendor's figures that XLA's kernels reach on a GPU. On one H100 (docs/gpu.md), 695 of 989 TFLOP/s in
# bfloat16, 371 of 494 in TF32; 2.8 to 3.2 of 3.35 TB/s in elementwise kernels and reductions. Links were not measured.
REACHED_PRODUCTS = 0.7
REACHED_MEMORY = 0.9
# The share of the links of TPU v3 that collectives reach: 0.69 for AllReduces and AllToAlls in figure 9 of the GShard
# paper, without AllReduces on rectangles (docs/benchmarks.md). No other links were measured.
REACHED_LINKS = 0.7


# The 8-bit floats that products take: those of the Open Compute Project, and those of CDNA 3.
_OCP = "f8e4m3fn", "f8e5m2"
_FNUZ = "f8e4m3fnuz", "f8e5m2fnuz"


def _tpu(
    source: str, devices: tuple[str, ...], bf16: float, s8: float, bandwidth: float, gib: int, link: float,
    dimensions: int, wraps: int, compiler: Compiler, *, cores: int = 1, between_cores: float = 0.0,
    host_link: float = 0.0, f8: tuple[str, ...] = (),
) -> Kind:  # fmt: skip
    # The vector unit does about a sixteenth of the matrix unit's work in float32.
    rates = {"bf16": bf16 * _T, "f32": bf16 * _T, "s8": s8 * _T} | dict.fromkeys(f8, 2 * bf16 * _T)
    return Kind(
        rates, bf16 * _T / 16, bandwidth * _G, gib * _GIB, link * _G, dimensions, wraps, cores, between_cores * _G,
        compiler=compiler, host_link=host_link * _G, source=source, devices=devices,
    )  # fmt: skip


def _gpu(
    source: str, *devices: str, f64: float, f32: float, bf16: float, s8: float, vector: float,
    memory_bandwidth: float, memory: float, link: float, between_nodes: float, node: int = 8, inside: str = SWITCH,
    host_link: float = 0.0, f8: tuple[str, ...] = _OCP,
) -> Kind:  # fmt: skip
    """A vendor's TFLOP/s, GB/s and GB; f32 is the rate of products of float32 arrays in JAX's default precision."""
    peak = {"f64": f64 * _T, "f32": f32 * _T, "bf16": bf16 * _T, "f16": bf16 * _T, "s8": s8 * _T}
    peak |= dict.fromkeys(f8, 2 * bf16 * _T)
    rates = {dtype: rate * REACHED_PRODUCTS for dtype, rate in peak.items()}
    return Kind(
        rates, vector * _T, memory_bandwidth * _G * REACHED_MEMORY, int(memory * _G), link * _G, 1, latency=2e-6,
        launch=3e-6, node=node, inside=inside, between_nodes=between_nodes * _G, host_link=host_link * _G,
        compiler=COMPILERS["gpu"], peak=peak, source=source, devices=devices,
    )  # fmt: skip


_AMPERE = functools.partial(
    _gpu, f64=19.5, f32=156, bf16=312, s8=624, vector=19.5, link=300, between_nodes=25, host_link=32, f8=()
)
_HOPPER = functools.partial(
    _gpu, f64=67, f32=494, bf16=989, s8=1979, vector=67, link=450, between_nodes=50, host_link=64
)
_BLACKWELL = functools.partial(_gpu, memory_bandwidth=8000, link=900)
_OF_SYSTEM = functools.partial(_BLACKWELL, f32=1125, bf16=2250, vector=75)
_OF_RACK = functools.partial(_BLACKWELL, f32=1250, bf16=2500, vector=80, node=72)
_INSTINCT = functools.partial(_gpu, inside=DIRECT, between_nodes=50, host_link=64)
_CDNA3 = functools.partial(_INSTINCT, f64=163.4, f32=163.4, bf16=1307.4, s8=2614.9, vector=163.4, link=64, f8=_FNUZ)
_CDNA4 = functools.partial(_INSTINCT, memory_bandwidth=8000, memory=288, link=76.8)


# A core of v3 and tpu7x has half of the chip; both send over the chip's links. Dimensions of v4, v5p and tpu7x close to
# rings when they are made of whole cubes of 4; v3, v5e and v6e close them at the size of a pod.
KINDS = {
    "v3": _tpu(
        "Jouppi et al., *A domain-specific supercomputer for training deep neural networks*, CACM 2020",
        ("TPU v3",), 61.5, 61.5, 450, 16, 82 * REACHED_LINKS, 2, 32, _V3, cores=2,
    ),
    "v4": _tpu(
        "Jouppi et al., *TPU v4*, ISCA 2023", ("TPU v4",), 275, 275, 1200, 32, 50, 3, 4, _libtpu(PERMUTE), host_link=16,
    ),
    "v5e": _tpu(
        "Google Cloud, *TPU v5e*", ("TPU v5 lite", "TPU v5e"), 197, 393, 819, 16, 50, 2, 16,
        _libtpu(PERMUTE, "all_gather"),
    ),
    "v5p": _tpu(
        "Google Cloud, *TPU v5p*", ("TPU v5", "TPU v5p"), 459, 918, 2765, 95, 100, 3, 4, _libtpu(PERMUTE),
    ),
    "v6e": _tpu(
        "Google Cloud, *TPU v6e*", ("TPU v6 lite", "TPU v6e"), 918, 1836, 1638, 32, 100, 2, 16, _libtpu(PERMUTE),
        host_link=15,
    ),
    "tpu7x": _tpu(
        "Google Cloud, *TPU7x (Ironwood)*", ("TPU7x",), 1153.5, 1153.5, 3690, 96, 100, 3, 4, _libtpu(PERMUTE), cores=2,
        between_cores=600, f8=_OCP,
    ),
    "a100_40gb": _AMPERE(
        "NVIDIA, *A100 Tensor Core GPU* and *DGX A100* data sheets", "NVIDIA A100-SXM4-40GB", memory_bandwidth=1555,
        memory=40,
    ),
    "a100": _AMPERE(
        "NVIDIA, *A100 Tensor Core GPU* and *DGX A100* data sheets", "NVIDIA A100-SXM4-80GB", memory_bandwidth=2039,
        memory=80,
    ),
    "h100": _HOPPER(
        "NVIDIA, *H100 Tensor Core GPU* data sheet (SXM)", "NVIDIA H100 80GB HBM3", memory_bandwidth=3350, memory=80,
    ),
    "h200": _HOPPER(
        "NVIDIA, *H200 Tensor Core GPU* data sheet (SXM)", "NVIDIA H200", memory_bandwidth=4800, memory=141,
    ),
    "b200": _OF_SYSTEM(
        "NVIDIA, *HGX Platform*; *DGX B200* data sheet", "NVIDIA B200", f64=37, s8=4500, memory=180, between_nodes=50,
        host_link=64,
    ),
    "b300": _OF_SYSTEM(
        "NVIDIA, *HGX Platform*; *DGX B300* and *Blackwell Ultra* data sheets", "NVIDIA B300", "NVIDIA B300 SXM6 AC",
        f64=1.25, s8=150, memory=270, between_nodes=100,
    ),
    "gb200": _OF_RACK(
        "NVIDIA, *GB200 NVL72*", "NVIDIA GB200", f64=40, s8=5000, memory=186, between_nodes=50,
    ),
    "gb300": _OF_RACK(
        "NVIDIA, *GB300 NVL72*; *Blackwell Ultra* data sheet", "NVIDIA GB300", f64=1.3, s8=165, memory=279,
        between_nodes=100,
    ),
    "mi300x": _CDNA3("AMD, *Instinct MI300X* data sheet", "AMD Instinct MI300X", memory_bandwidth=5300, memory=192),
    "mi325x": _CDNA3("AMD, *Instinct MI325X* data sheet", "AMD Instinct MI325X", memory_bandwidth=6000, memory=256),
    "mi350x": _CDNA4(
        "AMD, *Instinct MI350X* data sheet", "AMD Instinct MI350X", f64=72.1, f32=144.2, bf16=2306.9, s8=4613.7,
        vector=144.2,
    ),
    "mi355x": _CDNA4(
        "AMD, *Instinct MI355X* data sheet", "AMD Instinct MI355X", f64=78.6, f32=157.3, bf16=2516.6, s8=5033.2,
        vector=157.3,
    ),
    "cpu": Kind(
        {"f32": 50 * _G, "f64": 25 * _G, "bf16": 10 * _G}, 5 * _G, 10 * _G, 4 * _GIB, 5 * _G, 1, latency=2e-5,
        launch=1e-6, host_link=5 * _G, source="round numbers for one core of a server",
    ),
}  # fmt: skip


# By ``jax.Device.device_kind`` in lower case.
DEVICE_KINDS = {device.lower(): name for name, kind in KINDS.items() for device in kind.devices}
# Suffixes of the name of the same board in another mounting or mode.
SUFFIXES = (" oam", " vf")
