"""Claim: the paper's scaling follows from the paper's marks alone: memory and program constant, step time sublinear.

Tables of what our planner says beside what the paper says in numbers. Our times are those of the cost model on TPU v3,
not measurements; where the paper gives a curve without numbers, the column is empty. Figure 9 is the exception: its
points are read off the image (``figure9.py``).

    python benchmarks/paper.py [--plot FOLDER] [table1 figure2 figure7 figure8 figure9 figure9_cpu table4 dense]

``figure9_cpu`` is measured: the same collectives among 2 to 16 virtual CPU devices, which share the cores, so that the
time of each is divided by their number. `benchmarks/paper_against_xla.py` compares with XLA's own partitioner.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=16"

import jax
import jax.numpy as jnp
from figure9 import CORES, DISPATCH_AND_COMBINE, DISPATCHED_MIB, MICROSECONDS
from jax.sharding import NamedSharding, PartitionSpec
from paper_models import PlannedModel, arguments, configured, lower, plan, training_step

import gshard
from gshard.core.mark import Schedule
from gshard.device.network import seconds
from gshard.moe.config import TABLE_1
from gshard.moe.param import parameter_count
from gshard.moe.transformer import param_specs

# Table 1, billions of parameters; table 3, steps per second. Sections 5.2 and 5.3: ratios that the text names.
PARAMETERS = {
    "MoE(2048E, 36L)": 600, "MoE(2048E, 12L)": 200, "MoE(512E, 36L)": 150, "MoE(512E, 12L)": 50,
    "MoE(128E, 36L)": 37, "MoE(128E, 12L)": 12.5, "MoE(2048E, 60L)": 1000, "T(96L)": 2.3,
}  # fmt: skip
STEPS_A_SECOND = {
    "MoE(2048E, 36L)": 0.72, "MoE(2048E, 12L)": 2.15, "MoE(512E, 36L)": 1.05, "MoE(512E, 12L)": 3.28,
    "MoE(128E, 36L)": 0.67, "MoE(128E, 12L)": 2.16,
}  # fmt: skip
SIZES = (128, 512, 2048)
TOKENS = 2048  # of a device and side, the same for every size: what figures 7 and 8 compare
Rows = list[tuple[Any, ...]]


@functools.cache
def planned(name: str) -> PlannedModel:
    return plan(name, "v3", remat=True, tokens_of_device=TOKENS)


def table1() -> tuple[tuple[str, ...], Rows]:
    rows: Rows = []
    for name, config in TABLE_1.items():
        ours = parameter_count(param_specs(config)) / 1e9
        rows.append((name, config.experts, config.moe_layers * config.experts, f"{ours:.1f}", PARAMETERS[name]))
    return ("model", "experts a layer", "experts", "ours, 1e9 weights", "paper, 1e9 weights"), rows


def figure2() -> tuple[tuple[str, ...], Rows]:
    """One program for all devices, so its size does not grow; one program for each device would be that many."""
    rows: Rows = []
    for devices in (8, 128, 512, 2048):
        config, _ = configured("MoE(2048E, 12L)", f"v3:{max(devices // 64, 2)}x{min(devices // 4, 32)}", remat=True)
        lowered, _ = lower(config, gshard.Mesh.abstract(devices=devices), tokens_of_device=TOKENS * 2048 // devices)
        start = time.process_time()
        spmd = lowered.spmd
        taken = time.process_time() - start
        equations = sum(1 for _ in _equations(spmd.jaxpr.jaxpr))
        rows.append((devices, equations, equations * devices, f"{taken:.2f}"))
    rows.append(("2048 by 8", f"{rows[-1][1] / rows[0][1]:.2f}", "", f"{float(rows[-1][3]) / float(rows[0][3]):.2f}"))
    return ("devices", "equations", "with a program for each device", "CPU seconds to plan and partition"), rows


def _equations(jaxpr: Any) -> Any:
    for e in jaxpr.eqns:
        yield e
        for value in e.params.values():
            for body in value if isinstance(value, tuple | list) else (value,):
                body = getattr(body, "jaxpr", body)
                if hasattr(body, "eqns"):
                    yield from _equations(body)


def figure7() -> tuple[tuple[str, ...], Rows]:
    rows: Rows = []
    for layers in (12, 36):
        for experts in SIZES:
            found = planned(f"MoE({experts}E, {layers}L)")
            parts = (found.replicated, found.distributed, found.activations, found.cost.peak)
            rows.append((found.name, *(f"{n / 2**30:.2f}" for n in parts)))
        peaks = [float(row[-1]) for row in rows[-len(SIZES) :]]
        rows.append((f"largest by smallest, {layers}L", "", "", "", f"{max(peaks) / min(peaks):.3f}"))
    return ("model", "replicated weights, GiB", "distributed weights", "activations", "all"), rows


def figure8() -> tuple[tuple[str, ...], Rows]:
    found = [planned(f"MoE({experts}E, 12L)") for experts in SIZES]
    classes = found[-1].seconds_by_class
    rows: Rows = [(c, *(f"{1e3 * f.seconds_by_class.get(c, 0.0):.1f}" for f in found)) for c in classes]
    rows.append(("a step", *(f"{1e3 * f.cost.seconds:.1f}" for f in found)))
    rows.append(("products at peak rate, %", *(f"{100 * f.roofline_seconds / f.cost.seconds:.0f}" for f in found)))
    rows.append(("... by that of 128E", *(f"{f.cost.seconds / found[0].cost.seconds:.2f}" for f in found)))
    rows.append(("paper, layer by that of 128E", "1.00", "", "1.7"))
    return ("class, modelled ms of a step", *(f"{n}E" for n in SIZES)), rows


def figure9() -> tuple[tuple[str, ...], Rows]:
    """Modelled and measured milliseconds (``figure9.py``); figure 8 has two AllToAlls of 8 MB for each layer."""
    rows: Rows = []
    for i, cores in enumerate(CORES):
        row: list[Any] = [cores]
        for (kind, size), measured in MICROSECONDS.items():
            row += [f"{1e3 * _modelled(kind, size, cores):.3f}", f"{measured[i] / 1e3:.3f}"]
        rows.append(tuple(row))
    first, last = rows[0], rows[-1]
    rows.append(("2048 by 16", *(f"{float(b) / float(a):.1f}" for a, b in zip(first[1:], last[1:], strict=True))))
    for cores, measured in DISPATCH_AND_COMBINE.items():
        ours = 2e3 * _modelled("all_to_all", DISPATCHED_MIB, cores)
        rows.append((f"figure 8, {cores}E", "", "", "", "", f"{ours:.3f}", f"{measured / 1e3:.3f}", "", ""))
    columns = ("AllReduce 8 MB, ms", "AllReduce 32 MB", "AllToAll 8 MB", "AllToAll 32 MB")
    return ("cores", *(head for name in columns for head in (name, "measured"))), rows


def _modelled(kind: str, size: int, cores: int) -> float:
    mesh, machine = gshard.Mesh.abstract(devices=cores), gshard.Machine.of("v3", cores)
    return seconds(kind, size << 20, mesh, machine, mesh.atoms)


def figure9_cpu() -> tuple[tuple[str, ...], Rows]:
    """Measured, for shape; a device's share of the time that all of them take on shared cores."""
    rows: Rows = []
    for devices in (2, 4, 8, 16):
        mesh = jax.make_mesh((devices,), ("d",), devices=jax.devices()[:devices])
        times = [1e3 * _measured(kind, size << 18, mesh) / devices for kind in _CPU for size in (1, 4)]
        rows.append((devices, *(f"{t:.3f}" for t in times)))
    first, last = rows[0], rows[-1]
    rows.append(("16 by 2", *(f"{float(b) / float(a):.1f}" for a, b in zip(first[1:], last[1:], strict=True))))
    return ("devices", "AllReduce 1 MB, ms", "4 MB", "AllToAll 1 MB, ms", "4 MB"), rows


_CPU: dict[str, Callable[[Any], Any]] = {
    "all_reduce": lambda x: jax.lax.psum(x, "d"),
    "all_to_all": lambda x: jax.lax.all_to_all(x, "d", 0, 0, tiled=True),
}


def _measured(kind: str, elements: int, mesh: Any) -> float:
    """Seconds of a collective over all devices, each with so many float32: the median of nine runs."""
    run = jax.jit(
        jax.shard_map(_CPU[kind], mesh=mesh, in_specs=PartitionSpec("d"), out_specs=PartitionSpec("d"), check_vma=False)
    )
    x = jax.device_put(jnp.ones(elements * mesh.size), NamedSharding(mesh, PartitionSpec("d")))
    times = []
    for _ in range(10):
        start = time.perf_counter()
        jax.block_until_ready(run(x))
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[4]


def _matmul_contracted(n: int) -> Any:
    return lambda a, b: gshard.split(a, 1, n) @ b, ((64, 16 * n), (16 * n, 64))


def _matmul_rows(n: int) -> Any:
    return lambda a, b: gshard.split(a, 0, n) @ b, ((16 * n, 64), (64, 64))


def _add(n: int) -> Any:
    return lambda a, b: gshard.split(a, 0, n) + b, ((16 * n,), (16 * n,))


def _reduce_kept(n: int) -> Any:
    return lambda a: jnp.sum(gshard.split(a, 0, n), 1), ((16 * n, 64),)


def _reduce_split(n: int) -> Any:
    return lambda a: jnp.sum(gshard.split(a, 0, n), 0), ((16 * n, 64),)


def _dispatch(n: int) -> Any:
    def f(a: Any, b: Any) -> Any:
        return gshard.split(jnp.einsum("GSEC,GSM->EGCM", gshard.split(a, 0, n), gshard.split(b, 0, n)), 0, n)

    # C is 2S/E: slots of all experts together stay the same.
    return f, ((n, 256, n, 512 // n), (n, 256, 64))


def _convolution(n: int) -> Any:
    def f(x: Any, w: Any) -> Any:
        numbers = ("NCHW", "HWIO", "NCHW")
        return gshard.split(
            jax.lax.conv_general_dilated(gshard.split(x, 2, n), w, (1, 1), "SAME", dimension_numbers=numbers), 2, n
        )

    return f, ((1, 8, 16 * n, 32), (3, 3, 8, 8))


# Table 4: operator, dimensions that grow with the devices, and the paper's order of communication.
OPERATORS: dict[str, tuple[Callable[[int], Any], str]] = {
    "Add(A, A -> A), A": (_add, "0"),
    "Matmul(AB, BC -> AC), B": (_matmul_contracted, "O(1) AR"),
    "Matmul(AB, BC -> AC), A": (_matmul_rows, "0"),
    "Reduce(AB -> A), A": (_reduce_kept, "0"),
    "Reduce(AB -> B), A": (_reduce_split, "O(1) AR"),
    "Einsum(GSEC, GSM -> EGCM), G E": (_dispatch, "O(sqrt D) AA"),
    "Convolution(BIXY, xyIO -> BOXY), X": (_convolution, "O(1) CP"),
}


def table4() -> tuple[tuple[str, ...], Rows]:
    rows: Rows = []
    for name, (make, paper) in OPERATORS.items():
        costs = []
        for n in (32, 128, 512):
            f, dims = make(n)
            shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in dims]
            found = gshard.explain(f, *shapes, mesh=gshard.Mesh.abstract(devices=n))
            costs.append((found, found.cost("v3")))
        kinds = ", ".join(sorted(costs[-1][0].bytes_by_kind)) or "0"
        sent = " ".join(f"{c.sent}" for _, c in costs)
        work = " ".join(f"{c.flops}" for _, c in costs)
        rows.append((name, work, kinds, sent, paper))
    return (
        "operator, O(D) dimensions",
        "FLOP of a device: 32, 128, 512",
        "ours",
        "bytes a device sends",
        "paper",
    ), rows


# Table 3 and its footnote: T(96L) took 235.5 core years for 300,000 steps of four million tokens, on 2,048 cores, by
# GPipe.
T96_SECONDS = 235.5 * 365.25 * 86_400 / 2048 / 300_000


def dense() -> tuple[tuple[str, ...], Rows]:
    """T(96L), which the paper trained by GPipe: as pipelines from a mark, and without stages."""
    config, machine = configured("T(96L)", "v3:32x32")
    config = dataclasses.replace(config, partitions=1)
    step, rows = training_step(config), list[tuple[Any, ...]]()
    for stages, micro_batches in ((1, 1), (4, 16), (8, 32), (16, 32)):

        def staged(state: Any, batch: Any, number: Any, stages: int = stages, parts: int = micro_batches) -> Any:
            if stages > 1:
                blocks = ["encoder/blocks", "decoder/blocks"]
                state = gshard.pipeline(state, "stage", micro_batches=parts, paths=blocks)
            return step(state, gshard.split(batch, 0, "data"), number)

        mesh = gshard.Mesh.abstract(data=machine.size // stages, stage=stages)
        found = gshard.explain(jax.jit(staged, donate_argnums=0), *arguments(config, 2**15, 128), mesh=mesh)
        cost, pipelines = found.cost(machine), found.plan.program.pipelines
        schedule = Schedule("stage", micro_batches)
        rows.append((
            f"{stages} stages, {micro_batches} micro-batches" if stages > 1 else "no stages, data parallel",
            f"{cost.seconds:.2f}", f"{cost.flops / 1e12:.1f}", f"{cost.sent / 2**30:.1f}", f"{cost.peak / 2**30:.1f}",
            f"{100 * schedule.bubble(stages):.0f} %", len(pipelines),
        ))  # fmt: skip
    rows.append(("paper, GPipe", f"{T96_SECONDS:.1f}", "", "", "", "", ""))
    return ("T(96L) on 2,048 cores", "s a step", "TFLOP", "GiB sent", "GiB peak", "bubble", "pipelines"), rows


PARTS = {f.__name__: f for f in (table1, figure2, figure7, figure8, figure9, figure9_cpu, table4, dense)}


# Rows that compare others, and so are no points of a curve.
_NO_POINTS = ("2048 by", "figure 8", "16 by", "largest by", "paper", "...", "products at")


def show(name: str, heads: tuple[str, ...], rows: Rows) -> None:
    texts = [tuple(map(str, row)) for row in (heads, *rows)]
    wide = [max(map(len, column)) for column in zip(*texts, strict=True)]
    print(f"\n{name}")
    for row in texts:
        print("  " + "  ".join(text.ljust(n) for text, n in zip(row, wide, strict=True)))


def draw(name: str, heads: tuple[str, ...], rows: Rows, folder: Path) -> None:
    """Every column of numbers as a line over the first; what is no number is left out."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for i, head in enumerate(heads[1:], 1):
        points = [(str(row[0]), _number(row[i])) for row in rows]
        kept = [(x, y) for x, y in points if y is not None]
        if kept:
            axes.plot([x for x, _ in kept], [y for _, y in kept], marker="o", label=head)
    axes.set_title(name)
    axes.set_yscale("log" if name in ("figure2", "figure9", "figure9_cpu", "table1") else "linear")
    axes.tick_params(axis="x", rotation=30)
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(folder / f"{name}.png", dpi=120)
    plt.close(figure)


def _number(text: Any) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[], help="all by default")
    parser.add_argument("--plot", type=Path, help="folder for plots (needs matplotlib)")
    options = parser.parse_args()
    print(f"model on TPU v3; jax {jax.__version__}")
    if options.plot:
        options.plot.mkdir(parents=True, exist_ok=True)
    for name in options.parts or PARTS:
        heads, rows = PARTS[name]()
        show(name, heads, rows)
        if options.plot and name != "table4":
            kept = [row for row in rows if not str(row[0]).startswith(_NO_POINTS)]
            draw(name, heads, kept, options.plot)


if __name__ == "__main__":
    main()
