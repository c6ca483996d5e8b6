"""Claim: a training step takes no more time than under XLA's own partitioner with the same marks.

Twelve steps (loss, gradients, Adam or Adafactor, state donated) of four kinds of models, small and large batches, on 8
virtual CPU devices:

    mlp     784-512-512-10 and 256-1024-256, the batch split
    cnn     five convolutions on 32 by 32 pixels, the batch split
    gpt     a decoder of two layers: the batch split; weights and state split too (FSDP); batch and heads split (2 by 4)
    moe     the MoE Transformer of gshard.moe with its own marks, experts and groups split

Both sides are one function each, ``gshard.jit`` and ``jax.jit``, given the same ``NamedSharding`` for every argument
and result; marks inside the MoE model are sharding constraints for XLA (``peer.py``). Both train from the
same state on the same batch, and losses are compared. They run in turns in this process, several steps at a time; a
ratio is the median of pairs that ran next to each other. Beside it stand, ours over XLA's: FLOPs that a device executes
(``tests/flops.py``), bytes that it sends (``hlo_collectives``), and temporary memory (``memory_analysis``).

    python benchmarks/wall_clock.py [--only gpt] [--pairs 9] [--json out.json]
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    " --xla_cpu_collective_call_terminate_timeout_seconds=600"
    " --xla_cpu_collective_call_warn_stuck_timeout_seconds=300"
)
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from peer import xla_function

import flops
import gshard
from gshard import moe
from gshard.tracing.trace import trace
from gshard.xla import hlo_collectives
from gshard_m4 import optimizer

TARGET, LIMIT = 1.0, 1.1  # of the geometric mean, and of any program
SECONDS = 0.1  # of the steps that are timed at once, at least
NEAR = 1e-3  # losses of the first steps, relatively
PAGE, FEW = 4096, 4096  # less temporary memory, and fewer FLOPs or bytes, count as that many
LINE, GRID = {"data": 8}, {"data": 2, "model": 4}

State = Any
Batch = Any


@dataclasses.dataclass(frozen=True)
class Training:
    """A step of a state and a batch that returns the new state and the loss, and how its arguments are placed.

    ``specs`` are those of the state and of the batch; None leaves all to the marks inside the step.
    """

    step: Callable[[State, Batch], tuple[State, Any]]
    state: State
    batch: Batch
    axes: Mapping[str, int]
    specs: tuple[Any, Any] | None


def adam(loss: Callable[[Any, Batch], Any]) -> Callable[[State, Batch], tuple[State, Any]]:
    """A step of Adam on a loss of parameters and batch."""

    def step(state: State, batch: Batch) -> tuple[State, Any]:
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        count = state["count"] + 1
        mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mu"], grads)
        nu = jax.tree.map(lambda n, g: 0.999 * n + 0.001 * g * g, state["nu"], grads)
        scale = 1e-3 * jnp.sqrt(1 - 0.999**count) / (1 - 0.9**count)
        params = jax.tree.map(lambda p, m, n: p - scale * m / (jnp.sqrt(n) + 1e-8), state["params"], mu, nu)
        return {"params": params, "mu": mu, "nu": nu, "count": count}, value

    return step


def state_of(params: Any) -> State:
    zeros = jax.tree.map(np.zeros_like, params)
    return {"params": params, "mu": zeros, "nu": jax.tree.map(np.zeros_like, params), "count": np.float32(0)}


def state_specs(params: Any) -> Any:
    return {"params": params, "mu": params, "nu": params, "count": P()}


def weights(rng: np.random.Generator, *shape: int) -> np.ndarray:
    fan_in = math.prod(shape[:-1])
    return (rng.standard_normal(shape) / math.sqrt(fan_in)).astype(np.float32)


def cross_entropy(logits: Any, labels: Any) -> Any:
    picked = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)


def mlp(sizes: tuple[int, ...], batch: int) -> Training:
    rng = np.random.default_rng(0)
    params = [{"w": weights(rng, a, b), "b": np.zeros(b, np.float32)} for a, b in itertools.pairwise(sizes)]

    def loss(params: Any, batch: Batch) -> Any:
        h = batch["x"]
        for layer in params[:-1]:
            h = jax.nn.relu(h @ layer["w"] + layer["b"])
        return cross_entropy(h @ params[-1]["w"] + params[-1]["b"], batch["y"])

    x = rng.standard_normal((batch, sizes[0])).astype(np.float32)
    data = {"x": x, "y": rng.integers(0, sizes[-1], batch).astype(np.int32)}
    whole = jax.tree.map(lambda _: P(), params)
    return Training(adam(loss), state_of(params), data, LINE, (state_specs(whole), {"x": P("data"), "y": P("data")}))


def cnn(batch: int) -> Training:
    rng = np.random.default_rng(0)
    channels = (3, 16, 32, 32, 64, 64)
    layers = [
        {"w": weights(rng, 3, 3, a, b), "scale": np.ones(b, np.float32), "bias": np.zeros(b, np.float32)}
        for a, b in itertools.pairwise(channels)
    ]
    params = {"layers": layers, "head": weights(rng, channels[-1], 10)}

    def loss(params: Any, batch: Batch) -> Any:
        h = batch["x"]
        for i, layer in enumerate(params["layers"]):
            stride = 2 if i % 2 else 1
            h = jax.lax.conv_general_dilated(
                h, layer["w"], (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            mean, var = jnp.mean(h, (0, 1, 2)), jnp.var(h, (0, 1, 2))  # batch normalization: over the whole batch
            h = jax.nn.relu((h - mean) * jax.lax.rsqrt(var + 1e-5) * layer["scale"] + layer["bias"])
        return cross_entropy(jnp.mean(h, (1, 2)) @ params["head"], batch["y"])

    x = rng.standard_normal((batch, 32, 32, 3)).astype(np.float32)
    data = {"x": x, "y": rng.integers(0, 10, batch).astype(np.int32)}
    whole = jax.tree.map(lambda _: P(), params)
    return Training(adam(loss), state_of(params), data, LINE, (state_specs(whole), {"x": P("data"), "y": P("data")}))


# How each weight of the decoder is split, by name; the layers are stacked.
WHOLE = dict.fromkeys(("embed", "place", "qkv", "out", "up", "down", "norms", "last"), P())
FSDP = WHOLE | {
    "embed": P("data"), "qkv": P(None, "data"), "out": P(None, None, None, "data"), "up": P(None, "data"),
    "down": P(None, "data"),
}  # fmt: skip
HEADS = WHOLE | {
    "qkv": P(None, None, None, "model"), "out": P(None, "model"), "up": P(None, None, "model"),
    "down": P(None, "model"),
}  # fmt: skip


def gpt(
    batch: int, length: int, dim: int, specs: Mapping[str, Any] = WHOLE, axes: Mapping[str, int] = LINE
) -> Training:
    vocabulary, layers, heads = 512, 2, 4
    rng = np.random.default_rng(0)
    params = {
        "embed": weights(rng, vocabulary, dim),
        "place": weights(rng, length, dim),
        "qkv": np.stack([weights(rng, dim, 3 * dim) for _ in range(layers)]).reshape(layers, dim, 3, heads, -1),
        "out": np.stack([weights(rng, dim, dim) for _ in range(layers)]).reshape(layers, heads, -1, dim),
        "up": np.stack([weights(rng, dim, 4 * dim) for _ in range(layers)]),
        "down": np.stack([weights(rng, 4 * dim, dim) for _ in range(layers)]),
        "norms": np.ones((layers, 2, dim), np.float32),
        "last": np.ones(dim, np.float32),
    }

    def norm(x: Any, scale: Any) -> Any:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale

    def block(x: Any, layer: Any) -> tuple[Any, None]:
        q, k, v = jnp.moveaxis(jnp.einsum("bld,dthe->btlhe", norm(x, layer["norms"][0]), layer["qkv"]), 1, 0)
        scores = jnp.einsum("blhe,bmhe->bhlm", q, k) / math.sqrt(dim // heads)
        scores = jnp.where(jnp.tri(length, dtype=bool), scores, -1e9)
        mixed = jnp.einsum("bhlm,bmhe->blhe", jax.nn.softmax(scores), v)
        x = x + jnp.einsum("blhe,hed->bld", mixed, layer["out"])
        return x + jax.nn.gelu(norm(x, layer["norms"][1]) @ layer["up"]) @ layer["down"], None

    def loss(params: Any, batch: Batch) -> Any:
        tokens = batch["tokens"]
        x = params["embed"][tokens[:, :-1]] + params["place"]
        x, _ = jax.lax.scan(block, x, {k: params[k] for k in ("qkv", "out", "up", "down", "norms")})
        return cross_entropy(norm(x, params["last"]) @ params["embed"].T, tokens[:, 1:])

    tokens = rng.integers(0, vocabulary, (batch, length + 1)).astype(np.int32)
    return Training(
        adam(loss), state_of(params), {"tokens": tokens}, axes, (state_specs(dict(specs)), {"tokens": P("data")})
    )


def mixture(sentences: int, dim: int, dispatch: str = "gather") -> Training:
    config = moe.TransformerConfig(
        source_vocabulary=1000, target_vocabulary=1000, model_dim=dim, hidden_dim=4 * dim, heads=4, head_dim=dim // 4,
        encoder_layers=2, decoder_layers=2, experts=8, group_size=None, partitions=8, dispatch=dispatch,
    )  # fmt: skip
    specs = moe.param_specs(config)

    def step(state: State, batch: Batch) -> tuple[State, Any]:
        key = jax.random.fold_in(jax.random.key(0), state["number"])
        loss = functools.partial(moe.loss, config, batch=batch, key=key)
        (value, _), grads = jax.value_and_grad(loss, has_aux=True)(state["params"])
        params, second = optimizer.update(grads, state["optimizer"], state["params"], state["number"], specs)
        return {"params": params, "optimizer": second, "number": state["number"] + 1}, value

    state = {
        "params": moe.init(config, jax.random.key(0)),
        "optimizer": optimizer.init(specs),
        "number": jnp.int32(5),
    }
    rng = np.random.default_rng(0)
    batch = {k: rng.integers(2, 1000, (sentences, 32)).astype(np.int32) for k in ("source", "target")}
    return Training(step, jax.tree.map(np.asarray, state), batch, LINE, None)


PROGRAMS: dict[str, Callable[[], Training]] = {
    "mlp 784-512-512-10, batch 64": lambda: mlp((784, 512, 512, 10), 64),
    "mlp 784-512-512-10, batch 1024": lambda: mlp((784, 512, 512, 10), 1024),
    "mlp 256-1024-256, batch 512": lambda: mlp((256, 1024, 256), 512),
    "cnn, batch 16": lambda: cnn(16),
    "cnn, batch 64": lambda: cnn(64),
    "gpt D128, batch 8": lambda: gpt(8, 64, 128),
    "gpt D256, batch 32": lambda: gpt(32, 32, 256),
    "gpt D256, batch 16, FSDP": lambda: gpt(16, 32, 256, FSDP),
    "gpt D256, batch 16, heads": lambda: gpt(16, 32, 256, HEADS, GRID),
    "moe M64, 32 sentences": lambda: mixture(32, 64),
    "moe M128, 64 sentences": lambda: mixture(64, 128),
    "moe M128, 64 sentences, einsum": lambda: mixture(64, 128, "einsum"),
}


class Side:
    """A compiled step, and the state that it has trained so far."""

    def __init__(self, step: Callable[[State, Batch], tuple[State, Any]], compiled: Any, state: State, batch: Batch):
        text = compiled.as_text()
        self.step, self.state, self.batch = step, state, batch
        self.losses: list[Any] = []
        self.flops = flops.executed(compiled)
        self.bytes = sum(c.total_bytes for c in hlo_collectives.collectives(text))
        self.temporaries = compiled.memory_analysis().temp_size_in_bytes

    def train(self, steps: int) -> float:
        """Seconds of some steps."""
        begin = time.perf_counter()
        for _ in range(steps):
            self.state, loss = self.step(self.state, self.batch)
            self.losses.append(loss)
        jax.block_until_ready((self.state, loss))
        return time.perf_counter() - begin


def sides_of(made: Training) -> tuple[Side, Side]:
    """The same training under gshard and under XLA's partitioner."""
    mesh = Mesh(np.array(jax.devices()).reshape(tuple(made.axes.values())), tuple(made.axes))
    arguments = (made.state, made.batch)
    options: dict[str, Any] = {"donate_argnums": 0}
    if made.specs is None:  # the marks say where arguments and results are; XLA is told what came of it
        ours, theirs = gshard.jit(made.step, mesh=mesh, **options), constrained(made, mesh)
        placed = jax.tree.unflatten(jax.tree.structure(arguments), ours.lower(*arguments).argument_shardings)
    else:
        placed = jax.tree.map(lambda s: NamedSharding(mesh, s), made.specs, is_leaf=lambda s: isinstance(s, P))
    options |= {"in_shardings": placed, "out_shardings": (placed[0], NamedSharding(mesh, P()))}
    if made.specs is not None:
        ours, theirs = gshard.jit(made.step, mesh=mesh, **options), made.step
    xla = jax.jit(theirs, **options)
    mine, its = jax.device_put(arguments, placed), jax.device_put(arguments, placed)
    return (
        Side(ours, ours.lower(*mine).executable.compiled, *mine),
        Side(xla, xla.lower(*its).compile(), *its),
    )


def constrained(made: Training, mesh: Mesh) -> Callable[[State, Batch], tuple[State, Any]]:
    """The step with its marks as sharding constraints."""
    program = trace(made.step, made.state, made.batch)
    flat = xla_function(program, gshard.Mesh.of(mesh))

    def step(state: State, batch: Batch) -> tuple[State, Any]:
        return jax.tree.unflatten(program.out_tree, flat(*program.captured, *jax.tree.leaves((state, batch))))

    return step


def measure(made: Training, pairs: int) -> dict[str, float]:
    ours, xla = sides_of(made)
    for side in (ours, xla):
        side.train(2)
    first = [[float(x) for x in side.losses[:2]] for side in (ours, xla)]
    np.testing.assert_allclose(first[0], first[1], rtol=NEAR)
    steps = max(1, round(SECONDS / min(ours.train(1), xla.train(1))))
    seconds: dict[str, list[float]] = {"ours": [], "xla": []}
    for pair in range(pairs):
        for name, side in sorted({"ours": ours, "xla": xla}.items(), reverse=pair % 2 == 1):
            seconds[name].append(side.train(steps) / steps)
    return {
        "seconds": statistics.median(seconds["xla"]),
        "time": statistics.median(a / b for a, b in zip(seconds["ours"], seconds["xla"], strict=True)),
        "flops": max(FEW, ours.flops) / max(FEW, xla.flops),
        "bytes": max(FEW, ours.bytes) / max(FEW, xla.bytes),
        "temporaries": max(PAGE, ours.temporaries) / max(PAGE, xla.temporaries),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="programs whose name contains this")
    parser.add_argument("--pairs", type=int, default=9, help="timed pairs of each program")
    parser.add_argument("--json", type=Path, help="write all that was measured")
    options = parser.parse_args()
    names = [name for name in PROGRAMS if not options.only or any(text in name for text in options.only)]
    kinds = ("time", "flops", "bytes", "temporaries")
    print(f"{'ours over XLA':<34}{'XLA ms':>9}" + "".join(f"{kind:>13}" for kind in kinds))
    found: dict[str, dict[str, float]] = {}
    for name in names:
        found[name] = r = measure(PROGRAMS[name](), options.pairs)
        above = "  above" if r["time"] > LIMIT else ""
        print(f"{name:<34}{r['seconds'] * 1e3:>9.1f}" + "".join(f"{r[k]:>13.2f}" for k in kinds) + above, flush=True)
    means = [math.exp(statistics.fmean(math.log(r[kind]) for r in found.values())) for kind in kinds]
    print(f"{'geometric mean':<34}{'':>9}" + "".join(f"{m:>13.2f}" for m in means))
    slow = sum(r["time"] > LIMIT for r in found.values())
    print(f"\ntarget: mean time {TARGET}, none above {LIMIT}; above it {slow} of {len(found)}, jax {jax.__version__}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
