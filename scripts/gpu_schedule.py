"""Programs for several GPUs, compiled where there are none: what they send, and what the schedule hides of it.

A part of ``scripts/gpu.py``: its arguments are where the devices come from, how many they are, and the program.

    mocked      one GPU that XLA takes for many (``jax_mock_gpu_topology``): the compiler of this GPU with its autotuner
    described   8 or 32 H100 that are described to XLA: needs JAX's CUDA plugin, and neither GPU nor driver
    virtual     the CPU, as so many devices: only so that the reading is tried, since nothing is asynchronous there

In the text of a scheduled program a collective that is asynchronous has a start and a done. What runs between them
hides it; a pair with no kernel in between hides nothing.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu_step import FREE
from peer import xla_function
from resumable import Asked, Found, answer

import gshard
from gshard.device.machine import Machine
from gshard.tracing.trace import trace
from gshard.xla import hlo_collectives
from gshard.xla.described import described_mesh
from gshard.xla.hlo_parser import Computation, Instruction, read_module
from gshard_m4.config import ModelChoice, TrainConfig
from gshard_m4.step import initial_state, make_step

OF_A_NODE = 8


def devices_of(source: str, count: int) -> list[Any]:
    """The devices, nodes one after the other."""
    nodes = max(count // OF_A_NODE, 1)
    # Slices, hosts of a slice, devices of a host: a mocked host has the one GPU that there is, a slice is a node.
    shape = f"{nodes}x{count // nodes}x1"
    if source == "mocked":
        jax.config.update("jax_mock_gpu_topology", shape)  # before the first use of a device; no environment variable
        found = jax.devices("gpu")
    elif source == "described":
        found = described_mesh(Machine.of(f"h100:{nodes}x{count // nodes}")).devices or ()
    else:
        found = jax.devices("cpu")
    if len(found) != count:
        raise SystemExit(f"{len(found)} devices instead of {count}")
    return list(found)


@dataclasses.dataclass(frozen=True)
class Program:
    """A function with marks, its arguments, and the axes of its mesh."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    axes: Mapping[str, int]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def moe_step(devices: int, tiny: bool) -> Program:
    """A training step of m4 with as many experts as devices, 2,048 tokens a device."""
    words, tokens = (64, 32) if tiny else (8000, 2048)
    sizes: dict[str, Any] = {"model_dim": 32, "hidden_dim": 64} if tiny else {"dtype": "bfloat16"}
    preset: Any = "demo" if tiny else "moe-8e-4l"
    model = ModelChoice(preset, experts=devices, **sizes).transformer(words, words, devices)
    state = jax.eval_shape(lambda: initial_state(model, 0))
    batch = {side: jax.ShapeDtypeStruct((devices * tokens // 32, 32), jnp.int32) for side in ("source", "target")}
    step = make_step(model, TrainConfig())
    return Program(step, (state, batch), {"devices": devices}, {"donate_argnums": 0})


def residual_mlps(devices: int, tiny: bool, mark: Callable[[Any], Any], axes: Mapping[str, int]) -> Program:
    """A step of gradient descent on residual MLPs in a loop, the batch split over the first axis."""
    L, M, H, B = (2, 16, 32, 2 * devices) if tiny else (8, 2048, 8192, 8192 * devices)
    params = {
        "up": jax.ShapeDtypeStruct((L, M, H), jnp.bfloat16),
        "down": jax.ShapeDtypeStruct((L, H, M), jnp.bfloat16),
    }

    def loss(params: Any, x: Any) -> Any:
        def layer(x: Any, w: Any) -> tuple[Any, None]:
            return gshard.split(x + jax.nn.gelu(x @ w["up"]) @ w["down"], 0, "data"), None

        x, _ = jax.lax.scan(layer, gshard.split(x, 0, "data"), params)
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    def step(params: Any, x: Any) -> Any:
        params = mark(params)
        value, gradients = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda w, g: w - (0.1 * g).astype(w.dtype), params, gradients), value

    return Program(step, (params, jax.ShapeDtypeStruct((B, M), jnp.bfloat16)), axes, {"donate_argnums": 0})


def fsdp(devices: int, tiny: bool) -> Program:
    """Weights split over all devices, gathered where they are used."""
    return residual_mlps(devices, tiny, lambda w: gshard.split(w, 1, "data"), {"data": devices})


def tensor_parallel(devices: int, tiny: bool) -> Program:
    """Hidden units split over four devices, the batch over the others."""

    def mark(w: Any) -> Any:
        return {"up": gshard.split(w["up"], 2, "model"), "down": gshard.split(w["down"], 1, "model")}

    return residual_mlps(devices, tiny, mark, {"data": devices // 4, "model": 4})


def in_steps(devices: int, tiny: bool) -> Program:
    """The same with products that run in steps while the next part of an operand travels."""
    made = fsdp(devices, tiny)
    return dataclasses.replace(made, options={**made.options, "collective_matmul": True})


PROGRAMS = {"moe": moe_step, "fsdp": fsdp, "tensor": tensor_parallel, "steps": in_steps}


def schedule(text: str) -> Found:
    """What a scheduled program sends, how much of that is asynchronous, and what runs meanwhile."""
    module = read_module(text)
    sent = {c.itself.name: c for c in hlo_collectives.collectives(text)}
    found: Found = {
        "bytes": 0,
        "times": 0,
        "asynchronous": 0,
        "hidden": 0,
        "hidden_bytes": 0,
        "kinds": {},
        "between": 0,
    }
    runs = [(module.computations[name], times) for name, times, _ in hlo_collectives.computations_run(module)]
    for computation, made, times in ((c, made, times) for c, times in runs for made in c.instructions.values()):
        if made.name not in sent or not made.opcode.removesuffix("-start").startswith(_COLLECTIVE):
            continue
        c = sent[made.name]
        kind = found["kinds"].setdefault(c.kind, [0, 0])
        kind[0] += times
        kind[1] += times * c.bytes_moved
        found["times"] += times
        found["bytes"] += times * c.bytes_moved
        if made.opcode.endswith("-start") and '"is_sync":true' not in made.attributes:
            found["asynchronous"] += times
            meanwhile = kernels_between(computation, made)
            found["between"] += times * meanwhile
            if meanwhile:
                found["hidden"] += times
                found["hidden_bytes"] += times * c.bytes_moved
    return found


_COLLECTIVE = ("all-", "reduce-scatter", "collective-", "ragged-all-to-all")


def kernels_between(computation: Computation, start: Instruction) -> int:
    """Kernels that are scheduled after the start of a collective and before its end."""
    count, begun = 0, False
    for made in computation.instructions.values():
        if made is start:
            begun = True
        elif begun and start.name in made.operands and made.opcode.endswith("-done"):
            return count
        elif begun and made.opcode not in FREE and not made.opcode.endswith(("-start", "-done")):
            count += 1
    return 0  # its end is in another computation


def compiled(make: Callable[[], Any]) -> Found:
    """Compiles a program and reads it; what fails is told."""
    begin = time.perf_counter()
    try:
        made = make()
        memory = made.memory_analysis()
        told = {"seconds": time.perf_counter() - begin, "temporaries": memory.temp_size_in_bytes}
        return {**told, **schedule(made.as_text())}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}".split("\n")[0][:200]}


def topology(asked: Asked) -> Found:
    """One program for so many devices, by gshard and by XLA's own partitioner with the same marks."""
    source, count, name = asked.arguments
    devices = devices_of(source, int(count))
    program = PROGRAMS[name](int(count), asked.tiny)
    mesh = jax.sharding.Mesh(np.array(devices, dtype=object).reshape(tuple(program.axes.values())), tuple(program.axes))
    begin = time.perf_counter()
    lowered = gshard.jit(program.function, mesh=mesh, **program.options).lower(*program.arguments)
    predicted = sum(c.total_bytes for c in lowered.spmd.collectives)
    found: Found = {
        "source": source, "devices": int(count), "kind": devices[0].device_kind, "axes": dict(program.axes),
        "program": (program.function.__doc__ or PROGRAMS[name].__doc__ or name).split("\n")[0].rstrip("."),
        "plan_seconds": time.perf_counter() - begin, "predicted": predicted,
        "sides": {"gshard": compiled(lambda: lowered.executable.compiled)},
    }  # fmt: skip
    compared = "collective_matmul" not in program.options and not (asked.tiny and name == "moe")  # which takes longest
    if compared and asked.goes_on(0.5):
        found["sides"]["XLA"] = compiled(lambda: by_xla(program, mesh, lowered.argument_shardings))
    return found


def by_xla(program: Program, mesh: Any, shardings: Any) -> Any:
    """The same program with its marks as constraints, its arguments placed as gshard found."""
    traced = trace(program.function, *program.arguments)
    first = len(traced.captured)
    leaves = jax.tree.leaves(program.arguments)
    placed = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s) for x, s in zip(leaves, shardings, strict=True)]
    donated = len(jax.tree.leaves(program.arguments[0]))
    jitted = jax.jit(xla_function(traced, gshard.Mesh.of(mesh)), donate_argnums=range(first, first + donated))
    return jitted.lower(*(jax.ShapeDtypeStruct(c.shape, c.dtype) for c in traced.captured), *placed).compile()


if __name__ == "__main__":
    answer({"topology": topology})
