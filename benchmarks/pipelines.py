"""A step of Llama's layers on 8 H100: pipelines by the mark of a stack, of separate layers, written by hand, and FSDP.

    python benchmarks/pipelines.py

Prints bytes that a device sends, operations, the modelled peak of memory and the modelled time of a training step
without an optimizer: the loss is the mean square of the results. Nothing runs, so no device is necessary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import gshard

LAYERS, UNITS, HIDDEN, HEADS, KV_HEADS = 32, 4096, 14_336, 32, 8  # Llama 3 8B
ROWS, LENGTH, STAGES, MICRO_BATCHES = 64, 2048, 8, 16
MACHINES = "h100:1x8", "h100:8x1"  # one host, and eight hosts
BF16 = jnp.bfloat16


def layer(x: Any, w: Any) -> tuple[Any, None]:
    """Attention and a gated feed-forward."""
    x = x + attention(norm(x, w["before_attention"]), w)
    h = norm(x, w["before_feed_forward"])
    return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"], None


def norm(x: Any, scale: Any) -> Any:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-5)).astype(x.dtype) * scale


def attention(x: Any, w: Any) -> Any:
    heads = lambda y, count: y.reshape(*y.shape[:2], count, UNITS // HEADS)  # noqa: E731
    q, k, v = heads(x @ w["q"], HEADS), heads(x @ w["k"], KV_HEADS), heads(x @ w["v"], KV_HEADS)
    y = gshard.attention(q, k, v, is_causal=True)
    return y.reshape(x.shape) @ w["o"]


def weights() -> dict[str, Any]:
    narrow = UNITS * KV_HEADS // HEADS
    shapes = {
        "q": (UNITS, UNITS), "k": (UNITS, narrow), "v": (UNITS, narrow), "o": (UNITS, UNITS),
        "gate": (UNITS, HIDDEN), "up": (UNITS, HIDDEN), "down": (HIDDEN, UNITS),
        "before_attention": (UNITS,), "before_feed_forward": (UNITS,),
    }  # fmt: skip
    return {name: jax.ShapeDtypeStruct((LAYERS, *shape), BF16) for name, shape in shapes.items()}


def by_mark(**arguments: Any) -> Callable[[Any, Any], Any]:
    def run(w: Any, x: Any) -> Any:
        if arguments.get("rounds", 1) > 1:  # the stack is kept as [rounds, layers of a round, ...]
            w = jax.tree.map(lambda v: v.reshape(-1, *v.shape[2:]), gshard.split(w, 1, "devices"))
        w = gshard.pipeline(w, "devices", micro_batches=MICRO_BATCHES, **arguments)
        return jax.lax.scan(jax.checkpoint(layer), x, w)[0]

    return run


def separate(**arguments: Any) -> Callable[[Any, Any], Any]:
    """Layers with weights of their own, stacked in the step."""

    def run(layers: Any, x: Any) -> Any:
        w = jax.tree.map(lambda *w: jnp.stack(w), *layers)
        w = gshard.pipeline(w, "devices", micro_batches=MICRO_BATCHES, **arguments)
        return jax.lax.scan(jax.checkpoint(layer), x, w)[0]

    return run


def by_hand(w: Any, x: Any) -> Any:
    w = gshard.split(jax.tree.map(lambda v: v.reshape(STAGES, -1, *v.shape[1:]), w), 0, "devices")
    micro = x.reshape(MICRO_BATCHES, -1, *x.shape[1:])
    entering = jnp.concatenate([micro, jnp.zeros((STAGES - 1, *micro.shape[1:]), x.dtype)])
    stage = lambda w, x: jax.lax.scan(jax.checkpoint(layer), x, w)[0]  # noqa: E731

    def turn(state: Any, new: Any) -> Any:
        handed_on = jnp.concatenate([new[None], state[:-1]])
        state = gshard.shard(jax.vmap(stage)(w, handed_on), jax.P("devices"))
        return state, state

    _, made = jax.lax.scan(turn, jnp.zeros((STAGES, *micro.shape[1:]), x.dtype), entering)
    return made[STAGES - 1 :, -1].reshape(x.shape)


def fsdp(w: Any, x: Any) -> Any:
    w = {name: gshard.split(v, 1, "devices") for name, v in w.items()}
    return jax.lax.scan(jax.checkpoint(layer), gshard.split(x, 0, "devices"), w)[0]


PROGRAMS: dict[str, Callable[[Any, Any], Any]] = {
    "`gshard.pipeline`": by_mark(),
    "the same, 2 rounds": by_mark(rounds=2),
    "separate layers": separate(),
    "separate layers, 2 rounds": separate(rounds=2),
    "written by hand": by_hand,
    "FSDP": fsdp,
}


def main() -> None:
    x = jax.ShapeDtypeStruct((ROWS, LENGTH, UNITS), BF16)
    print(f"| program | sent, GiB | operations, PFLOP | peak of memory, GiB | {', '.join(MACHINES)}: modelled ms |")
    print("|---|---|---|---|---|")
    for name, program in PROGRAMS.items():
        w: Any = weights()
        if "separate" in name:
            w = [{k: jax.ShapeDtypeStruct(v.shape[1:], v.dtype) for k, v in w.items()}] * LAYERS
        elif "rounds" in name:
            w = {k: jax.ShapeDtypeStruct((2, LAYERS // 2, *v.shape[1:]), v.dtype) for k, v in w.items()}
        step = jax.value_and_grad(lambda w, x, program=program: (program(w, x).astype(jnp.float32) ** 2).mean())
        mesh = gshard.Mesh.abstract(devices=STAGES)
        found = [gshard.explain(step, w, x, mesh=mesh, machine=machine) for machine in MACHINES]
        cost = [each.cost(machine) for each, machine in zip(found, MACHINES, strict=True)]
        milliseconds = ", ".join(f"{1e3 * each.seconds:.0f}" for each in cost)
        sent, peak = found[0].total_bytes / 2**30, cost[0].peak / 2**30
        print(f"| {name} | {sent:.1f} | {cost[0].flops / 1e15:.2f} | {peak:.1f} | {milliseconds} |", flush=True)


if __name__ == "__main__":
    main()
