"""Claim: on TPU v5e a call takes no longer than under XLA's own partitioner, which sends while it computes, too.

Training programs are compiled by libtpu for a TPU that need not exist: by ``gshard.jit`` with the machine named, so
that products become collective matmuls where the cost model expects that to be faster; the same without
(``collective_matmul=False``); and by XLA's own partitioner with the same marks and shardings of arguments, which makes
windowed einsums by itself. The benchmark reads from the compiled schedule: the compiler's estimate of cycles, which
counts no collective; the MiB that a device sends while products run, and those for which everything waits; and the
time that both make. For that a collective takes what the links need (``device.network``, the same for all three), less
the cycles that the compiler put between its start and its end; a cycle is what the matrix units do in one over the
peak rate.

    pip install libtpu    # the version that belongs to jaxlib
    python benchmarks/overlap.py [--topology v5e:2x4] [--programs ...]
    python benchmarks/overlap.py --kinds v3:2x2 v4:2x2x1 v5e:2x4 v5p:2x2x2 v6e:2x4   # what a compiler hides
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
# libtpu asks the machine which TPU it is on, and waits for an answer, unless it is told.
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

import jax
import jax.numpy as jnp
import numpy as np
from peer import xla_function
from tpu_schedules import Scheduled, estimated_cycles, schedule

import gshard
from gshard import split
from gshard.device.machine import Machine
from gshard.device.network import seconds_among
from gshard.emit.compile import named_sharding
from gshard.xla.described import described_mesh

# Multiplications and additions that the matrix units of one device finish in a cycle: units of 128 x 128.
MATRIX_UNITS = {"v3": 2, "v5e": 4}


def layer(x: Any, w: Any) -> Any:
    """Weights are split where they are stored (FSDP), tokens everywhere."""
    return split(jax.nn.relu(split(x, 0, "d") @ split(w, 0, "d")), 0, "d")


def fsdp(x: Any, ws: Any) -> Any:
    for w in ws:
        x = layer(x, w)
    return x


def scanned(x: Any, stack: Any) -> Any:
    return jax.lax.scan(lambda x, ws: (fsdp(x, ws), None), x, stack)[0]


def pair(x: Any, w: Any, v: Any) -> Any:
    """A feed-forward layer over split tokens: gathered before, scattered after (Megatron-LM)."""
    h = jax.nn.relu(split(x, 0, "m") @ split(w, 1, "m"))
    return split(split(h, 1, "m") @ split(v, 0, "m"), 0, "m")


def data_parallel(x: Any, ws: Any) -> Any:
    for w in ws:
        x = jax.nn.relu(split(x, 0, "d") @ gshard.replicate(w))
    return x


def gradient(f: Callable[..., Any]) -> Callable[..., Any]:
    """Of all weights."""

    def made(x: Any, *weights: Any) -> Any:
        return jax.grad(lambda *ws: jnp.mean(f(x, *ws).astype(jnp.float32) ** 2), tuple(range(len(weights))))(*weights)

    return made


def array(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


SQUARE = [array(4096, 4096)] * 3
WIDE = array(8192, 4096), array(4096, 16384), array(16384, 4096)
STACK = [array(6, 4096, 4096)] * 2
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, int]]] = {
    "FSDP": (fsdp, (array(16384, 4096), SQUARE), {"d": 8}),
    "FSDP, gradient": (gradient(fsdp), (array(16384, 4096), SQUARE), {"d": 8}),
    "MLP pair": (pair, WIDE, {"m": 8}),
    "MLP pair, gradient": (gradient(pair), WIDE, {"m": 8}),
    "MLP pair on 2 x 4": (
        lambda x, w, v: jax.vmap(lambda x: pair(x, w, v))(split(x, 0, "d")),
        (array(2, 8192, 4096), array(4096, 16384), array(16384, 4096)),
        {"d": 2, "m": 4},
    ),
    "scan of FSDP layers": (scanned, (array(16384, 4096), STACK), {"d": 8}),
    "scan of FSDP layers, gradient": (gradient(scanned), (array(16384, 4096), STACK), {"d": 8}),
    "data parallel, gradient": (gradient(data_parallel), (array(16384, 4096), SQUARE), {"d": 8}),
}
SIDES = "gshard", "at once", "XLA"


def compiled(name: str, machine: Machine, side: str) -> tuple[Any, int]:
    """The compiled program, and how many of its products are collective matmuls of ours."""
    f, arguments, axes = PROGRAMS[name]
    devices = described_mesh(machine).devices
    assert devices is not None
    grid = np.array(devices, dtype=object).reshape(tuple(axes.values()))
    mesh = jax.sharding.Mesh(grid, tuple(axes), axis_types=(jax.sharding.AxisType.Auto,) * len(axes))
    windowed = None if side == "gshard" else False
    lowered = gshard.jit(f, mesh=mesh, machine=machine, collective_matmul=windowed).lower(*arguments)
    if side != "XLA":
        return lowered.executable.compiled, len(lowered.plan.rings)
    given = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in lowered.program.block.inputs]
    where = [named_sharding(lowered.mesh, s) for s in lowered.spmd.in_shardings]
    return jax.jit(xla_function(lowered.program, lowered.mesh), in_shardings=where).lower(*given).compile(), 0


def taken(row: Scheduled, machine: Machine) -> float:
    """Seconds of one execution on the links."""
    if row.kind == "collective_permute":
        return machine.network[-1].latency + row.sent / min(d.bandwidth / d.shared_by for d in machine.network)
    group = row.group or tuple(range(machine.size))
    others = len(group) - 1
    operand = {"all_gather": row.sent / others, "all_reduce": row.sent * len(group) / others / 2}
    return seconds_among(row.kind, int(operand.get(row.kind, row.sent * len(group) / others)), group, machine)


def measured(name: str, machine: Machine, side: str) -> tuple[float, float, float, float, float, int]:
    """Mcycles, MiB beside products, MiB waited for, milliseconds, MiB of temporaries, collective matmuls."""
    program, rings = compiled(name, machine, side)
    text = program.as_text()
    cycles, rows = estimated_cycles(text), schedule(text)
    cycle = 2 * MATRIX_UNITS[machine.kind] * 128 * 128 / machine.rate("bf16")
    waited = sum(max(0.0, taken(r, machine) - r.beside * cycle) * r.times for r in rows)
    beside = sum(r.total_sent for r in rows if r.products)
    alone = sum(r.total_sent for r in rows if not r.products)
    memory = program.memory_analysis().temp_size_in_bytes
    return cycles / 1e6, beside / 2**20, alone / 2**20, 1e3 * (cycles * cycle + waited), memory / 2**20, rings


KINDS: dict[str, Callable[..., Any]] = {
    "collective_permute": lambda y, n: jax.lax.ppermute(y, "d", [(i, (i + 1) % n) for i in range(n)]),
    "all_gather": lambda y, n: jax.lax.all_gather(y, "d", axis=0, tiled=True),
    "reduce_scatter": lambda y, n: jax.lax.psum_scatter(y, "d", scatter_dimension=0, tiled=True),
    "all_reduce": lambda y, n: jax.lax.psum(y, "d"),
    "all_to_all": lambda y, n: jax.lax.all_to_all(y, "d", 0, 1, tiled=True),
}


def hidden_kinds(topology: str) -> dict[str, int]:
    """For each kind of collective how many of two products, which do not need it, run while it is under way."""
    found = {}
    devices = described_mesh(Machine.of(topology)).devices
    assert devices is not None
    n = len(devices)
    mesh = jax.sharding.Mesh(np.array(devices, dtype=object), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    for name, collective in KINDS.items():

        def f(x: Any, w: Any, y: Any, collective: Any = collective) -> Any:
            return (x @ w) @ w, 2 * collective(y, n)

        split, whole = jax.P("d"), jax.P()
        local = jax.shard_map(f, mesh=mesh, in_specs=(split, whole, split), out_specs=(split, split), check_vma=False)
        placed = [
            jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=jax.NamedSharding(mesh, spec))
            for shape, spec in (((4096 * n, 4096), split), ((4096, 4096), whole), ((2048 * n, 4096), split))
        ]
        rows = schedule(jax.jit(local).lower(*placed).compile().as_text())
        found[name] = max((row.products for row in rows), default=0)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="v5e:2x4")
    parser.add_argument("--programs", nargs="*", default=list(PROGRAMS), choices=list(PROGRAMS))
    parser.add_argument("--kinds", nargs="*", default=[], help="topologies; prints nothing else")
    options = parser.parse_args()
    for topology in options.kinds:
        print(topology, hidden_kinds(topology), flush=True)
    if options.kinds:
        return
    machine = Machine.of(options.topology, 8)
    titles = "Mcycles", "beside", "waited for", "ms", "temporaries", "collective matmuls"
    print(f"{options.topology}; jax {jax.__version__}; MiB that a device sends, MiB of temporaries")
    print(f"{'':<32}{'':<10}" + "".join(f"{title:>13}" for title in titles[:-1]) + f"  {titles[-1]}")
    over: dict[str, list[float]] = {side: [] for side in SIDES}
    for name in options.programs:
        for side in SIDES:
            *numbers, rings = measured(name, machine, side)
            print(f"{name:<32}{side:<10}" + "".join(f"{x:>13.3f}" for x in numbers) + f"  {rings}", flush=True)
            over[side].append(numbers[3])
    for side in SIDES[:2]:
        ratios = [ours / theirs for ours, theirs in zip(over[side], over["XLA"], strict=True)]
        mean = statistics.geometric_mean(ratios)
        print(f"{side}: {mean:.3f} of XLA's time in geometric mean, at most {max(ratios):.3f}")


if __name__ == "__main__":
    main()
