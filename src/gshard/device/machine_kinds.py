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

A product of float32 arrays runs in one bfloat16 pass on TPU (JAX's default precision), in TF32 on NVIDIA's GPUs, and in
float32 on AMD's, where XLA does not use TF32. TPUs without a rate for 8-bit integers multiply them as bfloat16.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

RING, LINE, SWITCH, DIRECT = "ring", "line", "switch", "direct"
PERMUTE = "collective_permute"


@dataclasses.dataclass(frozen=True, slots=True)
class Compiler:
    """The behaviour of a compiler on a per-device program, independent of the speed of devices.

    The cost model reads compiler behaviour from these fields only. A measured machine has the compiler of its kind.

    Attributes:
        source: the compiler, its version, and the source of its behaviour.
        combines: the kinds of collectives that it puts into one message with others (``combiner``).
        combined_bytes: the largest such message, in bytes of one device's operands.
        hides: the kinds of collectives that it starts before kernels that do not need them, and ends after these
            (``async_overlap``); None if unknown.
        hides_beside_products: those of them that overlap with products only, because they become part of these.
        fuses_epilogues: whether elementwise work on the result of a product is fused into the product (``epilogues``).
        fused_row: the longest row, in elements, that one kernel both reduces and transforms with the result
            (``compiled_kernels``); 0 if each step is a kernel of its own.
        fuses_elementwise: whether each kernel that reads an elementwise result computes it again if that moves fewer
            bytes, and whether one kernel writes several results (``compiled_kernels``).
        copies_for_collectives: whether arrays are copied before or after a gather or scatter so that its dimension
            comes first (``layout_copies``).
        products_take_layouts: whether products, too, read and write arrays in the layouts of collectives. Then only one
            device's part is copied, before it is gathered or after it is scattered.
        keeps_low_precision_copies: whether products of float32 run in one bfloat16 pass, and arrays that only they read
            are stored in bfloat16 (``bf16_storage``).
        gathers_split_stack_writes: whether a product that overlaps with a gather no longer writes its result directly
            into the stack of a loop (``remat.prefetch``). Six training loops on libtpu gained nothing by prefetching.
        exchanges_in_turn: whether every device sends its parts of an all-to-all to one device after the other, all in
            the same order. At any time messages then go around a ring in one direction (``network``).
        products_slice_stacks: whether a product reads a slice of a loop's stack where it is, if no other product reads
            it, and writes its result into such a stack (``loop_stacks``).
        fills_forward_stacks: whether the stacks of a loop that counts up are filled with zeros before the loop.
        multiplies_groups: whether a product of ragged groups (``lax.ragged_dot``) multiplies all rows with the matrix
            of each group, because there is no kernel for it.
    """

    source: str
    combines: tuple[str, ...] = ("all_reduce",)
    combined_bytes: int = 30 << 20
    hides: tuple[str, ...] | None = None
    hides_beside_products: tuple[str, ...] = ()
    fuses_epilogues: bool = False
    fused_row: int = 0
    fuses_elementwise: bool = False
    copies_for_collectives: bool = True
    products_take_layouts: bool = False
    keeps_low_precision_copies: bool = False
    gathers_split_stack_writes: bool = True
    exchanges_in_turn: bool = False
    products_slice_stacks: bool = False
    fills_forward_stacks: bool = True
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
    """The figures of a chip or GPU.

    Attributes:
        flops, vector_flops, memory_bandwidth, memory, launch: as in ``Machine``, of one device.
        compiler: the behaviour of its compiler.
        peak: the vendor's rates of products, if ``flops`` has the measured share of them.
        source: the source of the figures.
        devices: ``jax.Device.device_kind`` of these devices. Other boards with the same chip (PCIe cards, NVL pairs)
            have other figures.
        link: bytes a second of one link in one direction; for a switch, those that one device can send.
        dimensions: the number of dimensions of the network of chips.
        wraps: a dimension is a ring if its size is a multiple of this; 0 if the network is no torus.
        cores: the number of devices of a chip.
        between_cores: bytes a second from one core of a chip to another; 0 if they exchange through their memory.
        latency: seconds of one hop.
        node: the number of GPUs that are connected without a network card; 0 if there are no nodes.
        inside: the kind of their connection.
        between_nodes: bytes a second that a GPU sends to other nodes.
        host_link: bytes a second between a device and the memory of its host, in one direction; 0 if unknown.
    """

    flops: Mapping[str, float]
    vector_flops: float
    memory_bandwidth: float
    memory: int
    link: float
    dimensions: int
    wraps: int = 0
    cores: int = 1
    between_cores: float = 0.0
    latency: float = 1e-6
    launch: float = 0.0
    node: int = 0
    inside: str = SWITCH
    between_nodes: float = 0.0
    host_link: float = 0.0
    compiler: Compiler = COMPILERS["cpu"]
    peak: Mapping[str, float] = dataclasses.field(default_factory=dict)
    source: str = ""
    devices: tuple[str, ...] = ()


_T, _G, _GIB = 1e12, 1e9, 2**30

# The share of a vendor's figures that XLA's kernels reach on a GPU. On one H100 (docs/gpu.md), 695 of 989 TFLOP/s in
# bfloat16, 371 of 494 in TF32; 2.8 to 3.2 of 3.35 TB/s in elementwise kernels and reductions. Links were not measured.
REACHED_PRODUCTS = 0.7
REACHED_MEMORY = 0.9
# The share of the links of TPU v3 that collectives reach: 0.69 for AllReduces and AllToAlls in figure 9 of the GShard
# paper, without AllReduces on rectangles (docs/benchmarks.md). No other links were measured.
REACHED_LINKS = 0.7


def _tpu(
    bf16: float, s8: float, bandwidth: float, gib: int, link: float, dimensions: int, wraps: int, compiler: Compiler,
    host_link: float = 0.0,
) -> Kind:  # fmt: skip
    # The vector unit does about a sixteenth of the matrix unit's work in float32.
    rates = {"bf16": bf16 * _T, "f32": bf16 * _T, "s8": s8 * _T}
    return Kind(
        rates, bf16 * _T / 16, bandwidth * _G, gib * _GIB, link * _G, dimensions, wraps, compiler=compiler,
        host_link=host_link * _G,
    )  # fmt: skip


def _gpu(
    *,
    f64: float,
    f32: float,
    bf16: float,
    s8: float,
    vector: float,
    memory_bandwidth: float,
    memory: float,
    link: float,
    between_nodes: float,
    node: int = 8,
    inside: str = SWITCH,
    host_link: float = 0.0,
) -> Kind:
    """A vendor's TFLOP/s, GB/s and GB; f32 is the rate of products of float32 arrays in JAX's default precision."""
    peak = {"f64": f64 * _T, "f32": f32 * _T, "bf16": bf16 * _T, "f16": bf16 * _T, "s8": s8 * _T}
    rates = {dtype: rate * REACHED_PRODUCTS for dtype, rate in peak.items()}
    return Kind(
        rates, vector * _T, memory_bandwidth * _G * REACHED_MEMORY, int(memory * _G), link * _G, 1, latency=2e-6,
        launch=3e-6, node=node, inside=inside, between_nodes=between_nodes * _G, host_link=host_link * _G,
        compiler=COMPILERS["gpu"], peak=peak,
    )  # fmt: skip


def _a100(memory_bandwidth: float, memory: float) -> Kind:
    return _gpu(
        f64=19.5, f32=156, bf16=312, s8=624, vector=19.5, memory_bandwidth=memory_bandwidth, memory=memory, link=300,
        between_nodes=25, host_link=32,
    )  # fmt: skip


def _hopper(memory_bandwidth: float, memory: float) -> Kind:
    return _gpu(
        f64=67, f32=494, bf16=989, s8=1979, vector=67, memory_bandwidth=memory_bandwidth, memory=memory, link=450,
        between_nodes=50, host_link=64,
    )  # fmt: skip


def _cdna3(memory_bandwidth: float, memory: float) -> Kind:
    return _gpu(
        f64=163.4, f32=163.4, bf16=1307.4, s8=2614.9, vector=163.4, memory_bandwidth=memory_bandwidth, memory=memory,
        link=64, inside=DIRECT, between_nodes=50, host_link=64,
    )  # fmt: skip


def _cdna4(f64: float, f32: float, bf16: float, s8: float) -> Kind:
    return _gpu(
        f64=f64, f32=f32, bf16=bf16, s8=s8, vector=f32, memory_bandwidth=8000, memory=288, link=76.8, inside=DIRECT,
        between_nodes=50, host_link=64,
    )  # fmt: skip


def _row(source: str, devices: tuple[str, ...], kind: Kind) -> Kind:
    return dataclasses.replace(kind, source=source, devices=devices)


# A core of v3 and tpu7x has half of the chip; both send over the chip's links. Dimensions of v4, v5p and tpu7x close to
# rings when they are made of whole cubes of 4; v3, v5e and v6e close them at the size of a pod.
KINDS = {
    "v3": _row(
        "Jouppi et al., *A domain-specific supercomputer for training deep neural networks*, CACM 2020",
        ("TPU v3",),
        dataclasses.replace(_tpu(61.5, 61.5, 450, 16, 82 * REACHED_LINKS, 2, 32, _V3), cores=2),
    ),
    "v4": _row(
        "Jouppi et al., *TPU v4*, ISCA 2023", ("TPU v4",), _tpu(275, 275, 1200, 32, 50, 3, 4, _libtpu(PERMUTE), 16)
    ),
    "v5e": _row(
        "Google Cloud, *TPU v5e*",
        ("TPU v5 lite", "TPU v5e"),
        _tpu(197, 393, 819, 16, 50, 2, 16, _libtpu(PERMUTE, "all_gather")),
    ),
    "v5p": _row(
        "Google Cloud, *TPU v5p*", ("TPU v5", "TPU v5p"), _tpu(459, 918, 2765, 95, 100, 3, 4, _libtpu(PERMUTE))
    ),
    "v6e": _row(
        "Google Cloud, *TPU v6e*",
        ("TPU v6 lite", "TPU v6e"),
        _tpu(918, 1836, 1638, 32, 100, 2, 16, _libtpu(PERMUTE), 15),
    ),
    "tpu7x": _row(
        "Google Cloud, *TPU7x (Ironwood)*",
        ("TPU7x",),
        dataclasses.replace(
            _tpu(1153.5, 1153.5, 3690, 96, 100, 3, 4, _libtpu(PERMUTE)), cores=2, between_cores=600 * _G
        ),
    ),
    "a100_40gb": _row(
        "NVIDIA, *A100 Tensor Core GPU* and *DGX A100* data sheets", ("NVIDIA A100-SXM4-40GB",), _a100(1555, 40)
    ),
    "a100": _row(
        "NVIDIA, *A100 Tensor Core GPU* and *DGX A100* data sheets", ("NVIDIA A100-SXM4-80GB",), _a100(2039, 80)
    ),
    "h100": _row("NVIDIA, *H100 Tensor Core GPU* data sheet (SXM)", ("NVIDIA H100 80GB HBM3",), _hopper(3350, 80)),
    "h200": _row("NVIDIA, *H200 Tensor Core GPU* data sheet (SXM)", ("NVIDIA H200",), _hopper(4800, 141)),
    "b200": _row(
        "NVIDIA, *HGX Platform*; *DGX B200* data sheet",
        ("NVIDIA B200",),
        _gpu(
            f64=37,
            f32=1125,
            bf16=2250,
            s8=4500,
            vector=75,
            memory_bandwidth=8000,
            memory=180,
            link=900,
            between_nodes=50,
            host_link=64,
        ),
    ),
    "b300": _row(
        "NVIDIA, *HGX Platform*; *DGX B300* and *Blackwell Ultra* data sheets",
        ("NVIDIA B300", "NVIDIA B300 SXM6 AC"),
        _gpu(
            f64=1.25,
            f32=1125,
            bf16=2250,
            s8=150,
            vector=75,
            memory_bandwidth=8000,
            memory=270,
            link=900,
            between_nodes=100,
        ),
    ),
    "gb200": _row(
        "NVIDIA, *GB200 NVL72*",
        ("NVIDIA GB200",),
        _gpu(
            f64=40,
            f32=1250,
            bf16=2500,
            s8=5000,
            vector=80,
            memory_bandwidth=8000,
            memory=186,
            link=900,
            between_nodes=50,
            node=72,
        ),
    ),
    "gb300": _row(
        "NVIDIA, *GB300 NVL72*; *Blackwell Ultra* data sheet",
        ("NVIDIA GB300",),
        _gpu(
            f64=1.3,
            f32=1250,
            bf16=2500,
            s8=165,
            vector=80,
            memory_bandwidth=8000,
            memory=279,
            link=900,
            between_nodes=100,
            node=72,
        ),
    ),
    "mi300x": _row("AMD, *Instinct MI300X* data sheet", ("AMD Instinct MI300X",), _cdna3(5300, 192)),
    "mi325x": _row("AMD, *Instinct MI325X* data sheet", ("AMD Instinct MI325X",), _cdna3(6000, 256)),
    "mi350x": _row("AMD, *Instinct MI350X* data sheet", ("AMD Instinct MI350X",), _cdna4(72.1, 144.2, 2306.9, 4613.7)),
    "mi355x": _row("AMD, *Instinct MI355X* data sheet", ("AMD Instinct MI355X",), _cdna4(78.6, 157.3, 2516.6, 5033.2)),
    "cpu": _row(
        "round numbers for one core of a server",
        (),
        Kind(
            {"f32": 50 * _G, "f64": 25 * _G, "bf16": 10 * _G},
            5 * _G,
            10 * _G,
            4 * _GIB,
            5 * _G,
            1,
            latency=2e-5,
            launch=1e-6,
            host_link=5 * _G,
        ),
    ),
}


# By ``jax.Device.device_kind`` in lower case.
DEVICE_KINDS = {device.lower(): name for name, kind in KINDS.items() for device in kind.devices}
# Suffixes of the name of the same board in another mounting or mode.
SUFFIXES = (" oam", " vf")
