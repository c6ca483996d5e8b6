"""Claim: what is searched without a mark is no slower than what people mark by hand, and provably near the best.

Training steps (loss, gradients, the update of a state) on machines that need not be here, each beside the marks that
its literature has. Both are priced as they would run (``gshard cost``); ratios are searched over marked:

    megatron      residual MLPs with a batch too small for the devices (Shoeybi et al. 2019)
    experts       a MoE layer whose tokens come by group (Lepikhin et al. 2020, Algorithm 2)
    one trick     AlexNet: convolutions by sample, large weights not (Krizhevsky 2014)
    vgg           VGG-16, the same way (Jia et al. 2018 have it as their largest gain)
    stripes       a U-Net on one large image, by its rows, halos between them (Jin et al. 2018; the paper, section 4.4)
    square        one product of 16,384 rows on 4 x 4 devices that cannot hold an operand (van de Geijn and Watts 1997)
    vocabulary    an embedding and its logits, split by word
    tables        a recommendation model: tables over devices, layers by sample (Naumov et al. 2019)
    zero          Adam whose state does not fit whole (Rajbhandari et al. 2020): shares of what data parallelism needs
    transformer   a layer of GPT-2 medium with gradients and Adam; all 24 of them on 32 devices

    python benchmarks/search.py                     all, some minutes on one core
    python benchmarks/search.py --only experts
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import gshard
from gshard.analysis.cost import cost

_NHWC = ("NHWC", "HWIO", "NHWC")
NEAR = 1.001  # of the time by hand: more is slower
GAP = 0.005


@dataclasses.dataclass(frozen=True)
class Case:
    """A step with a state, as it is and as people mark it.

    Attributes:
        name: what it is.
        step: of the state and the data, to the new state.
        marked: the same with marks.
        arguments: state and data, as shapes.
        mesh: sizes of axes.
        machine: the devices.
        arrive: how arguments are sharded that cannot come otherwise.
        share: of what data parallelism needs, the memory there is; None for all of the machine's.
        limit: bytes of memory that there are.
    """

    name: str
    step: Callable[..., Any]
    marked: Callable[..., Any]
    arguments: tuple[Any, ...]
    mesh: Mapping[str, int]
    machine: str
    arrive: Any = None
    share: float | None = None
    limit: int | None = None


def f32(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def s32(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.int32)


def descended(loss: Callable[..., Any]) -> Callable[..., Any]:
    """A step of gradient descent."""

    def step(weights: Any, *data: Any) -> Any:
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, *data))

    return step


def adam(loss: Callable[..., Any]) -> Callable[..., Any]:
    """A step of Adam; the state is (weights, first moments, second moments)."""

    def step(state: Any, *data: Any) -> Any:
        w, m, v = state
        g = jax.grad(loss)(w, *data)
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, g)
        v = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, v, g)
        return jax.tree.map(lambda w, m, v: w - 1e-3 * m / (jnp.sqrt(v) + 1e-8), w, m, v), m, v

    return step


def megatron() -> Case:
    def loss(marked: bool) -> Callable[..., Any]:
        def f(weights: Any, x: Any) -> Any:
            for a, b in weights:
                if marked:
                    a, b = gshard.split(a, 1, 8), gshard.split(b, 0, 8)
                x = x + jax.nn.relu(x @ a) @ b
            return jnp.mean(x**2)

        return f

    weights = [(f32(2048, 8192), f32(8192, 2048)) for _ in range(4)]
    arguments = (weights, f32(4, 2048))
    return Case("megatron", descended(loss(False)), descended(loss(True)), arguments, {"x": 8}, "h100:1x8")


def experts() -> Case:
    def loss(marked: bool) -> Callable[..., Any]:
        def at(x: Any) -> Any:
            return gshard.split(x, 0, 8) if marked else x

        def f(weights: Any, tokens: Any) -> Any:
            wi, wo = weights
            h = at(jax.nn.relu(jnp.einsum("GCEM,EMH->EGCH", at(tokens), wi)))
            return jnp.mean(at(jnp.einsum("EGCH,EHM->GCEM", h, wo)) ** 2)

        return f

    arguments = ((f32(64, 1024, 4096), f32(64, 4096, 1024)), f32(64, 32, 64, 1024))
    step, marked = descended(loss(False)), descended(loss(True))
    return Case("experts", step, marked, arguments, {"x": 8}, "h100:1x8", (None, P("x")))


def one_trick() -> Case:
    kernels = ((11, 3, 96, 4), (5, 96, 256, 1), (3, 256, 384, 1), (3, 384, 384, 1), (3, 384, 256, 1))
    pooled = (True, True, False, False, True)
    sizes = ((9216, 4096), (4096, 4096), (4096, 1000))

    def loss(marked: bool) -> Callable[..., Any]:
        def f(weights: Any, images: Any, labels: Any) -> Any:
            convolutions, layers = weights
            x = gshard.split(images, 0, 8) if marked else images
            for (size, _, _, stride), pool, w in zip(kernels, pooled, convolutions, strict=True):
                x = lax.conv_general_dilated(x, w, (stride, stride), "SAME" if size < 11 else "VALID",
                                             dimension_numbers=_NHWC)  # fmt: skip
                x = jax.nn.relu(x)
                if pool:
                    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "VALID")
            x = x.reshape(x.shape[0], -1)
            for i, w in enumerate(layers):
                if marked:
                    w = gshard.split(w, 1 - i % 2, 8)
                x = x @ w if i == 2 else jax.nn.relu(x @ w)
            return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(x), labels[:, None], 1))

        return f

    weights = ([f32(k, k, i, o) for k, i, o, _ in kernels], [f32(*s) for s in sizes])
    arguments = (weights, f32(1024, 227, 227, 3), s32(1024))
    return Case("one trick", descended(loss(False)), descended(loss(True)), arguments, {"x": 8}, "h100:1x8")


def vgg() -> Case:
    blocks = ((3, 64, 2), (64, 128, 2), (128, 256, 3), (256, 512, 3), (512, 512, 3))
    sizes = ((25088, 4096), (4096, 4096), (4096, 1000))

    def loss(marked: bool) -> Callable[..., Any]:
        def f(weights: Any, images: Any, labels: Any) -> Any:
            convolutions, layers = weights
            x = gshard.split(images, 0, 16) if marked else images
            for block in convolutions:
                for w in block:
                    x = jax.nn.relu(lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=_NHWC))
                x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
            x = x.reshape(x.shape[0], -1)
            for i, w in enumerate(layers):
                w = gshard.split(w, 1 - i % 2, 16) if marked and i < 2 else w
                x = x @ w if i == 2 else jax.nn.relu(x @ w)
            return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(x), labels[:, None], 1))

        return f

    convolutions = [[f32(3, 3, i if k == 0 else o, o) for k in range(n)] for i, o, n in blocks]
    arguments = ((convolutions, [f32(*s) for s in sizes]), f32(512, 224, 224, 3), s32(512))
    return Case("vgg", descended(loss(False)), descended(loss(True)), arguments, {"x": 16}, "h100:2x8")


def stripes() -> Case:
    channels = {"fine": (4, 32), "coarse": (32, 64), "deep": (64, 64), "up": (128, 64), "out": (96, 4)}

    def convolve(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=_NHWC)

    def pool(x: Any) -> Any:
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")

    def twice(x: Any) -> Any:
        return jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)

    def loss(marked: bool) -> Callable[..., Any]:
        def f(params: Any, image: Any) -> Any:
            image = gshard.split(image, 1, 8) if marked else image
            fine = jax.nn.relu(convolve(image, params["fine"]))
            coarse = jax.nn.relu(convolve(pool(fine), params["coarse"]))
            deep = jax.nn.relu(convolve(pool(coarse), params["deep"]))
            coarse = jax.nn.relu(convolve(jnp.concatenate([twice(deep), coarse], -1), params["up"]))
            return jnp.mean(convolve(jnp.concatenate([twice(coarse), fine], -1), params["out"]) ** 2)

        return f

    params = {n: f32(3, 3, *c) for n, c in channels.items()}
    arguments = (params, f32(1, 4096, 2048, 4))
    step, marked = descended(loss(False)), descended(loss(True))
    return Case("stripes", step, marked, arguments, {"x": 8}, "h100:1x8", (None, P(None, "x")))


def square() -> Case:
    def marked(a: Any, b: Any) -> Any:
        a, b = gshard.shard(a, P("x", "y")), gshard.shard(b, P("x", "y"))
        return gshard.shard(gshard.shard(a, P("x")) @ gshard.shard(b, P(None, "y")), P("x", "y"))

    def product(a: Any, b: Any) -> Any:
        return a @ b

    arguments = f32(16384, 16384), f32(16384, 16384)
    given = P("x", "y"), P("x", "y")
    return Case("square", product, marked, arguments, {"x": 4, "y": 4}, "h100:2x8", given, limit=800 << 20)


def vocabulary() -> Case:
    def loss(marked: bool) -> Callable[..., Any]:
        def f(table: Any, tokens: Any, targets: Any) -> Any:
            table = gshard.split(table, 0, 8) if marked else table
            logits = jnp.tanh(table[tokens]) @ table.T
            found = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)
            return -jnp.mean(found)

        return f

    arguments = (f32(262144, 1024), s32(16, 32), s32(16, 32))
    return Case("vocabulary", descended(loss(False)), descended(loss(True)), arguments, {"x": 8}, "h100:1x8")


def tables() -> Case:
    rows, width, batch = (1_000_000,) * 4 + (100_000,) * 8, 128, 8192

    def loss(marked: bool) -> Callable[..., Any]:
        def f(weights: Any, dense: Any, ids: Any) -> Any:
            looked, layers = weights
            if marked:
                looked = [gshard.split(t, 1, 8) for t in looked]
                dense, ids = gshard.split(dense, 0, 8), ids
            found = [t[ids[:, i]] for i, t in enumerate(looked)]
            x = jnp.concatenate([dense, *found], 1)
            x = gshard.split(x, 0, 8) if marked else x
            for w in layers:
                x = jax.nn.relu(x @ w)
            return jnp.mean(x)

        return f

    inside = width * (len(rows) + 1)
    layers = [f32(inside, 1024), f32(1024, 512), f32(512, 1)]
    arguments = (([f32(n, width) for n in rows], layers), f32(batch, width), s32(batch, len(rows)))
    return Case("tables", descended(loss(False)), descended(loss(True)), arguments, {"x": 8}, "h100:1x8")


def zero(share: float | None) -> Case:
    def loss(weights: Any, x: Any, y: Any) -> Any:
        for a, b in weights:
            x = x + jax.nn.relu(x @ a) @ b
        return jnp.mean((x - y) ** 2)

    def marked(state: Any, x: Any, y: Any) -> Any:
        def cut(state: Any) -> Any:
            return gshard.split(state, 0, 8)

        return cut(adam(loss)(cut(state), gshard.split(x, 0, 8), gshard.split(y, 0, 8)))

    weights = [(f32(1024, 4096), f32(4096, 1024)) for _ in range(6)]
    arguments = ((weights, weights, weights), f32(4096, 1024), f32(4096, 1024))
    name = "zero" if share is None else f"zero, {share:.0%}"
    return Case(name, adam(loss), marked, arguments, {"x": 8}, "h100:1x8", share=share)


def transformer(layers: int, mesh: Mapping[str, int], machine: str) -> Case:
    model, heads, hidden, words, batch, length = 1024, 16, 4096, 50304, 32, 1024

    def norm(x: Any, w: Any) -> Any:
        return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * w

    def block(x: Any, p: Any, marked: bool) -> Any:
        if marked:
            p = {**p, **{k: gshard.split(p[k], 1, "model") for k in ("q", "k", "v", "up")}}
            p = {**p, **{k: gshard.split(p[k], 0, "model") for k in ("out", "down")}}
        h = norm(x, p["n1"])
        q, k, v = (jnp.reshape(h @ p[c], (batch, length, heads, -1)) for c in "qkv")
        earlier = jnp.tril(jnp.ones((length, length), bool))
        scores = jnp.where(earlier, jnp.einsum("bqhd,bkhd->bhqk", q, k) / 8, -1e9)
        x = x + jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(x.shape) @ p["out"]
        return x + jax.nn.gelu(norm(x, p["n2"]) @ p["up"]) @ p["down"]

    def loss(marked: bool) -> Callable[..., Any]:
        def f(p: Any, tokens: Any, targets: Any) -> Any:
            tokens = gshard.split(tokens, 0, "data") if marked else tokens
            x = p["table"][tokens] + p["positions"]
            for layer in p["layers"]:
                x = block(x, layer, marked)
            found = jax.nn.log_softmax(x @ p["table"].T)
            return -jnp.mean(jnp.take_along_axis(found, targets[..., None], -1))

        return f

    layer = {c: f32(model, model) for c in ("q", "k", "v", "out")}
    layer |= {"up": f32(model, hidden), "down": f32(hidden, model), "n1": f32(model), "n2": f32(model)}
    p = {"table": f32(words, model), "positions": f32(length, model), "layers": [layer] * layers}
    arguments = ((p, p, p), s32(batch, length), s32(batch, length))
    name = "transformer" if layers == 1 else f"{layers} layers"
    return Case(name, adam(loss(False)), adam(loss(True)), arguments, mesh, machine)


def cases() -> Iterator[Case]:
    yield from (megatron(), experts(), one_trick(), vgg(), stripes(), square(), vocabulary(), tables())
    yield transformer(1, {"data": 4, "model": 2}, "h100:1x8")
    yield transformer(24, {"data": 8, "model": 4}, "h100:4x8")
    yield from map(zero, (None, 0.4, 0.25))


def data_parallel_peak(case: Case, mesh: gshard.Mesh, machine: gshard.Machine) -> int:
    state, *data = case.arguments
    by_batch = gshard.jit(
        case.step, mesh=mesh, donate_argnums=0, in_shardings=(None, *(P(tuple(case.mesh)) for _ in data))
    )
    lowered = by_batch.lower(state, *data)
    return cost(lowered.spmd, machine, lowered.donated).peak


def run(case: Case) -> tuple[float, float]:
    """Prints a row; the ratio of times and the gap."""
    mesh = gshard.Mesh.abstract(**case.mesh)
    machine = gshard.Machine.of(case.machine)
    limit = case.limit
    if case.share is not None:
        limit = int(case.share * data_parallel_peak(case, mesh, machine))
    marked = gshard.jit(
        case.marked, mesh=mesh, donate_argnums=0, machine=machine, in_shardings=case.arrive, memory_limit=limit
    ).lower(*case.arguments)
    try:
        by_hand = cost(marked.spmd, machine, marked.donated)
        hand = by_hand.seconds, by_hand.sent, by_hand.peak
    except gshard.MemoryLimitError:
        hand = math.inf, math.nan, math.nan
    begin = time.perf_counter()
    step = gshard.jit(case.step, mesh=mesh, donate_argnums=0, machine=machine, in_shardings=case.arrive)
    found = gshard.search(step, *case.arguments, memory_limit=limit)
    spent = time.perf_counter() - begin
    ratio = found.cost.seconds / hand[0]
    model = found.best.predicted / found.best.searched.cost.seconds
    print(
        f"{case.name:<14}{hand[0] * 1e3:>10.3f}{found.cost.seconds * 1e3:>10.3f}{ratio:>8.3f}"
        f"{hand[1] / 2**20:>10.1f}{found.cost.sent / 2**20:>10.1f}"
        f"{hand[2] / 2**30:>8.2f}{found.cost.peak / 2**30:>8.2f}"
        f"{model:>8.3f}{found.gap:>9.2%}{spent:>7.1f}  {found.best.chosen.name}"
        f"{'' if found.best.fits else ', DOES NOT FIT'}",
        flush=True,
    )
    return ratio, found.gap


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="cases whose name contains this")
    options = parser.parse_args()
    print(
        f"{'':<14}{'by hand':>10}{'found':>10}{'':>8}{'by hand':>10}{'found':>10}{'by hand':>8}{'found':>8}{'model':>8}"
    )
    print(
        f"{'':<14}{'ms':>10}{'ms':>10}{'ratio':>8}{'MiB':>10}{'MiB':>10}{'GiB':>8}{'GiB':>8}{'/ price':>8}{'gap':>9}"
        f"{'s':>7}  from"
    )
    chosen = [case for case in cases() if not options.only or any(text in case.name for text in options.only)]
    rows = [run(case) for case in chosen]
    slower, open_ = sum(ratio > NEAR for ratio, _ in rows), sum(gap > GAP for _, gap in rows)
    print(f"\nslower than by hand: {slower} of {len(rows)}; gap above {GAP:.1%}: {open_}; jax {jax.__version__}")


if __name__ == "__main__":
    main()
