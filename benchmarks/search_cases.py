"""The training steps that searches are measured on, each as it is and with the marks that its literature has."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import gshard
from gshard.device.cost import cost

_NHWC = ("NHWC", "HWIO", "NHWC")


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


def memory_of(case: Case, mesh: gshard.Mesh, machine: gshard.Machine) -> int | None:
    """Bytes that there are; None for all of the machine's."""
    if case.share is None:
        return case.limit
    state, *data = case.arguments
    by_batch = gshard.jit(
        case.step, mesh=mesh, donate_argnums=0, in_shardings=(None, *(P(tuple(case.mesh)) for _ in data))
    )
    lowered = by_batch.lower(state, *data)
    return int(case.share * cost(lowered.spmd, machine, lowered.donated).peak)


def step_of(case: Case, mesh: gshard.Mesh, machine: gshard.Machine) -> Any:
    """The step without marks, as it is searched."""
    return gshard.jit(case.step, mesh=mesh, donate_argnums=0, machine=machine, in_shardings=case.arrive)
