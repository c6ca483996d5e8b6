"""Claim: planning grows with the program and not with the devices: 5,000 equations in under 3 seconds on one core.

The gradient of Transformers of growing depth, without loops, marked in three places, is propagated and partitioned for
meshes of 8 to 4,096 devices that need not exist. The peer is JAX's own tracing of the same function in this process.

    python benchmarks/growth.py [--layers 5 10 20 45 90] [--repeats 1]
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import gshard
from gshard.core.program import Program
from gshard.emit.partition import partition
from gshard.planning.propagate import propagate
from gshard.tracing.trace import trace

MESHES = ((2, 4), (4, 16), (16, 32), (64, 64))


def layer(x: Any, p: dict[str, Any]) -> Any:
    """Attention and a feed-forward layer, with the normalisation in front."""
    h = x - jnp.mean(x, -1, keepdims=True)
    h = h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6)
    q, k, v = (jnp.einsum("bsm,mhd->bshd", h, p[name]) for name in "qkv")
    weights = jax.nn.softmax(jnp.einsum("bshd,bthd->bhst", q, k), -1)
    x = x + jnp.einsum("bhst,bthd,hdm->bsm", weights, v, p["o"])
    return x + jax.nn.gelu(x @ gshard.shard(p["wi"], P(None, "model"))) @ p["wo"]


def loss(layers: list[dict[str, Any]], x: Any) -> Any:
    """Mean square of the last layer's output."""
    x = gshard.split(x, 0, "data")
    for p in layers:
        x = layer(x, p)
    return jnp.mean(x * x)


def arguments(depth: int) -> tuple[Any, Any]:
    """Shapes alone: nothing is computed."""
    shapes = {"q": (64, 8, 16), "k": (64, 8, 16), "v": (64, 8, 16), "o": (8, 16, 64), "wi": (64, 256), "wo": (256, 64)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    return [params] * depth, jax.ShapeDtypeStruct((64, 32, 64), jnp.float32)


def seconds(program: Program, mesh: gshard.Mesh) -> tuple[float, float, int]:
    """Time to propagate and to partition, and equations of the per-device program."""
    start = time.process_time()
    plan = propagate(program, mesh)
    planned = time.process_time()
    spmd = partition(plan)
    (body,) = (e.params["jaxpr"] for e in spmd.jaxpr.jaxpr.eqns if e.primitive.name == "shard_map")
    return planned - start, time.process_time() - planned, len(body.eqns)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[5, 10, 20, 45, 90])
    parser.add_argument("--repeats", type=int, default=1, help="the fastest of so many runs counts")
    options = parser.parse_args()
    print(f"gradient of a Transformer without loops, jax {jax.__version__}")
    print(
        f"{'equations':>9} {'devices':>8} {'propagate':>10} {'partition':>10} "
        f"{'a 1,000 eq.':>12} {'/ tracing':>10} {'emitted':>8}"
    )
    for depth in options.layers:
        params, x = arguments(depth)
        start = time.process_time()
        jax.make_jaxpr(jax.grad(loss))(params, x)
        tracing = time.process_time() - start
        program = trace(jax.grad(loss), params, x)
        equations = sum(1 for _ in program.block.walk())
        for data, model in MESHES:
            mesh = gshard.Mesh.abstract(data=data, model=model)
            runs = [seconds(program, mesh) for _ in range(options.repeats)]
            planning, emitting, emitted = min(runs, key=lambda run: run[0] + run[1])
            both = planning + emitting
            print(
                f"{equations:9,} {data * model:8,} {planning:8.2f} s {emitting:8.2f} s "
                f"{1000 * both / equations:10.2f} s {both / tracing:10.2f} {emitted:8,}"
            )


if __name__ == "__main__":
    main()
