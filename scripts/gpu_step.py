"""The training step on one accelerator: numbers against CPU, time and memory under ``gshard.jit`` and ``jax.jit``.

Each function is a part of ``scripts/gpu.py`` or of ``scripts/gpu_scaling.py``. Speed is measured as programs are run,
with JAX's default precision of products (TF32 for float32 on a GPU; the models here compute in bfloat16); numbers are
compared at the highest. On one device ``gshard.jit`` has a mesh of one device and a layout that names the dimensions
of the MoE layers, so that its whole way is taken: marks, plan, per-device program.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import runpy
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu_checks import EXACT, accelerator
from resumable import ROOT, Asked, Found, answer

import gshard
from gshard import moe
from gshard.device.cost import cost
from gshard.device.machine import Machine, kind_called
from gshard.moe.feed_forward import feed_forward, feed_forward_specs
from gshard_m4.config import ModelChoice, TrainConfig
from gshard_m4.step import initial_state, make_step

sys.path.insert(0, str(ROOT / "tests"))  # flops, for priced_hlo
sys.path.insert(0, str(ROOT / "benchmarks"))

from priced_hlo import FREE, kernels

from gshard.xla.hlo_parser import Instruction, read_module

WORDS, TOKENS, LENGTH, GROUP = 32_000, 16_384, 64, 1024
PAIRS = 15


@dataclasses.dataclass(frozen=True)
class Training:
    """A model, and the shape of its batches."""

    model: moe.TransformerConfig
    rows: int
    length: int

    @property
    def tokens(self) -> int:
        """Of a batch on each side."""
        return self.rows * self.length

    def batches(self, count: int) -> dict[str, np.ndarray]:
        """So many batches of random ids without padding."""
        sides = ("source", "target") if self.model.encoder_layers else ("target",)
        rng = np.random.default_rng(0)
        shape = (count, self.rows, self.length)
        return {side: rng.integers(2, self.model.target_vocabulary, shape).astype(np.int32) for side in sides}


def training(preset: str, dispatch: str = "gather", tiny: bool = False) -> Training:
    """A preset of m4 on one device, or in its place a decoder of one layer."""
    if tiny:
        experts = 0 if preset.startswith("dense") else 4
        model = moe.TransformerConfig.decoder_only(
            64, 1, model_dim=32, hidden_dim=32, heads=2, head_dim=16, experts=experts, group_size=64, dispatch=dispatch
        )
        return Training(model, 16, 16)
    model = ModelChoice(preset, dtype="bfloat16").transformer(WORDS, WORDS, 1)  # type: ignore[arg-type]
    model = dataclasses.replace(model, group_size=GROUP, groups=None, dispatch=dispatch)
    return Training(model, TOKENS // LENGTH, LENGTH)


def partitioned(f: Callable[..., Any], **options: Any) -> Any:
    """``gshard.jit`` on the accelerator alone, the dimensions of the MoE layers named."""
    layout = gshard.Layout(groups="x", experts="x", tokens=None, model=None, gates=None)
    mesh = jax.sharding.Mesh(np.array([accelerator()]), ("x",))
    return gshard.jit(f, mesh=mesh, layout=layout, **options)


def train(asked: Asked) -> Found:
    """Losses of a training run of the MoE Transformer, the same steps on CPU and on the accelerator."""
    steps = 3 if asked.tiny else 30
    made = training("demo", tiny=True)
    if not asked.tiny:
        made = Training(ModelChoice("demo", groups=8).transformer(8000, 8000, 1), 64, 32)
    step = make_step(made.model, TrainConfig(learning_rate=0.4))
    on, batches = accelerator(), made.batches(steps)

    def losses(run: Any, device: Any) -> list[float]:
        found = []
        with jax.default_device(device):
            state = jax.device_put(initial_state(made.model, 0), device)
            for i in range(steps):
                state, metrics = run(state, {side: ids[i] for side, ids in batches.items()})
                found.append(float(metrics["loss"]))
        return found

    plain = jax.jit(step, donate_argnums=0)
    with EXACT:
        sides = {"`jax.jit` on CPU": losses(plain, jax.devices("cpu")[0])}
        sides["`jax.jit`, highest precision"] = losses(plain, on)
        sides["`gshard.jit`, highest precision"] = losses(partitioned(step, donate_argnums=0), on)
    if on.platform != "cpu":  # which has one precision
        sides["`jax.jit`, default precision"] = losses(plain, on)
    what = "a decoder of one layer" if asked.tiny else "`demo`"
    return {"model": what, "steps": steps, "tokens": made.tokens, "losses": sides}


def what_runs(text: str) -> dict[str, int]:
    """Kernels of one call of a compiled program by kind, loops with all their rounds."""
    module = read_module(text)
    counts: dict[str, int] = {}
    for _, made, times in kernels(module, module.computations[module.entry], 1):
        if made.opcode not in FREE and not made.opcode.endswith("-done"):
            counts[_kind(made)] = counts.get(_kind(made), 0) + times
    return dict(sorted(counts.items(), key=lambda pair: -pair[1]))


def _kind(made: Instruction) -> str:
    if made.opcode == "custom-call":
        target = made.attributes.partition('custom_call_target="')[2].partition('"')[0]
        return target.strip("_") or "custom call"
    if made.opcode == "fusion" and "kind=kCustom" in made.attributes:
        return "gemm fusion" if "gemm" in made.attributes else "custom fusion"
    return made.opcode


class Side:
    """A step compiled in one way, its state, and what was measured of it."""

    def __init__(self, name: str, compiled: Any, run: Callable[..., Any], state: Any, seconds: float) -> None:
        memory = compiled.memory_analysis()
        self.name, self.run, self.state = name, run, state
        self.seconds: list[float] = []
        self.losses: list[float] = []
        kept = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        self.found: Found = {
            "compile_seconds": seconds, "temporaries": memory.temp_size_in_bytes, "kept": kept,
            "kernels": what_runs(compiled.as_text()),
        }  # fmt: skip

    def step(self, batch: Mapping[str, Any]) -> float:
        """Seconds of a step."""
        begin = time.perf_counter()
        self.state, metrics = self.run(self.state, batch)
        jax.block_until_ready((self.state, metrics))
        taken = time.perf_counter() - begin
        self.losses.append(float(metrics["loss"]))
        return taken

    def told(self, tokens: int) -> Found:
        """What was measured."""
        median = statistics.median(self.seconds)
        return {**self.found, "seconds": median, "tokens_per_second": tokens / median, "losses": self.losses[:3]}


def layer_alone(model: moe.TransformerConfig) -> tuple[Callable[..., Any], Any]:
    """Gradient descent on one MoE or feed-forward layer, and its state: what stands for a step where time is short."""
    specs = moe.expert_specs(model) if model.experts else feed_forward_specs(model, model.hidden_dim)

    def loss(params: Any, x_BLM: jax.Array) -> jax.Array:
        made = moe.expert_layer(model, params, x_BLM)[0] if model.experts else feed_forward("swiglu", params, x_BLM)
        return jnp.mean(jnp.square(made - x_BLM))

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        x_BLM = jax.nn.one_hot(batch["target"], model.model_dim)
        value, gradients = jax.value_and_grad(loss)(state["params"], x_BLM)
        params = jax.tree.map(lambda w, g: w - 0.1 * g, state["params"], gradients)
        return {"params": params}, {"loss": value}

    return step, {"params": moe.init_params(specs, jax.random.key(0))}


def measured(made: Training, asked: Asked) -> Found:
    """A step under ``jax.jit`` and under ``gshard.jit``, in turns, each with a state of its own."""
    device = accelerator()
    if asked.tiny:
        step, state = layer_alone(made.model)
    else:
        step, state = make_step(made.model, TrainConfig()), initial_state(made.model, 0)
    batch = jax.device_put({side: ids[0] for side, ids in made.batches(1).items()}, device)
    state = jax.device_put(state, device)
    copied = functools.partial(jax.tree.map, lambda x: x.copy())

    begin = time.perf_counter()
    plain = jax.jit(step, donate_argnums=0).lower(state, batch).compile()
    between = time.perf_counter()
    ours = partitioned(step, donate_argnums=0)
    lowered = ours.lower(state, batch)
    planned = time.perf_counter() - between
    compiled = lowered.executable.compiled
    sides = [
        Side("jax.jit", plain, plain, copied(state), between - begin),
        Side("gshard.jit", compiled, ours, copied(state), time.perf_counter() - between),
    ]
    del state
    modelled = None
    kind = None if device.platform == "cpu" else kind_called(device.device_kind, device.platform)
    if kind is not None:
        modelled = cost(lowered.spmd, Machine.of(kind, 1), lowered.donated).seconds
    flops = cost(lowered.spmd, Machine.of("h100:1x1"), lowered.donated).flops
    pairs = 2 if asked.tiny else PAIRS
    for pair in range(pairs + 2):
        for side in sides if pair % 2 else sides[::-1]:
            taken = side.step(batch)
            if pair >= 2:  # the first ones are still warming up
                side.seconds.append(taken)
        if len(sides[0].seconds) >= 3 and not asked.goes_on():
            break
    ratio = statistics.median(b / a for a, b in zip(*(side.seconds for side in sides), strict=True))
    return {
        "tokens": made.tokens, "flops": flops, "modelled": modelled, "plan_seconds": planned, "ratio": ratio,
        "sides": {side.name: side.told(made.tokens) for side in sides},
        "peak": (device.memory_stats() or {}).get("peak_bytes_in_use", 0),
        "weights": sum(x.size for x in jax.tree.leaves(sides[0].state["params"])),
    }  # fmt: skip


def step(asked: Asked) -> Found:
    """One row of a table: a preset, and how tokens get to their experts."""
    preset, dispatch = (*asked.arguments, "gather")[:2]
    return {"preset": preset, "dispatch": dispatch, **measured(training(preset, dispatch, asked.tiny), asked)}


def routing(asked: Asked) -> Found:
    """What ``benchmarks/routing.py`` prints here."""
    sizes = ("64", "16", "16", "4", "1") if asked.tiny else ("16384", "1024", "4096", "8", "15")
    options = [
        f"--{n}={size}" for n, size in zip(("tokens", "model", "hidden", "experts", "pairs"), sizes, strict=True)
    ]
    sys.argv = ["routing.py", *options]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(ROOT / "benchmarks" / "routing.py"), run_name="__main__")
    return {"line": shlex.join(["python", "benchmarks/routing.py", *options]), "text": printed.getvalue().strip()}


if __name__ == "__main__":
    answer({"train": train, "step": step, "routing": routing})
