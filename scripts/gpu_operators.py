"""Single operators on one accelerator: their time against the modelled one, and programs that only a GPU can run.

Each function is a part of ``scripts/gpu.py``. ``operators`` times what training steps are made of, so that the
roofline of ``gshard.device`` can be compared with a device. ``kernels`` runs what a CPU has other code for, or none:
attention of cuDNN, Pallas kernels, solvers, eight-bit products. ``memory`` runs steps whose state lies in the memory
of the host.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu_checks import EXACT, NEAR, accelerator, device_after_device, difference, told
from gpu_step import partitioned, what_runs
from resumable import Asked, Found, answer

import gshard
from gshard.device.cost import cost
from gshard.device.machine import Machine, kind_called

Case = tuple[Callable[..., Any], tuple[Any, ...]]
SECONDS = 0.25  # of one batch of calls
BATCHES = 5
NEAR_BFLOAT16 = 2e-2  # of the largest element of a result in bfloat16


def some(*shape: int, dtype: Any = jnp.bfloat16, seed: int = 0) -> jax.Array:
    """Random numbers of both signs."""
    return jax.random.normal(jax.random.key(seed + sum(shape)), shape, jnp.float32).astype(dtype)


def some_ids(*shape: int, below: int) -> jax.Array:
    """Random integers."""
    return jax.random.randint(jax.random.key(sum(shape)), shape, 0, below)


def attention(q: Any, k: Any, v: Any) -> Any:
    """Causal attention of arrays [B, T, H, D], without a fused kernel."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")


def layer_norm(x: Any) -> Any:
    """Of the last dimension, in float32."""
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    return (centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)


def adam(w: Any, m: Any, v: Any, g: Any) -> Any:
    """A step of Adam."""
    m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
    return w - 1e-3 * m / (jnp.sqrt(v) + 1e-8), m, v


def cross_entropy(logits: Any, ids: Any) -> Any:
    """The mean loss of rows of logits."""
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), ids[:, None], 1).mean()


def in_a_loop(x: Any, ws: Any) -> Any:
    """A stack of layers in a scan."""
    return jax.lax.scan(lambda x, w: (x + jax.nn.gelu(x @ w), None), x, ws)[0]


def timed_cases(tiny: bool) -> dict[str, Callable[[], Case]]:
    """What is timed: arrays are made when a case is run, and freed after it."""
    n = (lambda size: max(size // 64, 8)) if tiny else (lambda size: size)
    f32, T = jnp.float32, n(16_384)

    def product(rows: int, inner: int, columns: int, dtype: Any = jnp.bfloat16) -> Callable[[], Case]:
        return lambda: (jnp.matmul, (some(n(rows), n(inner), dtype=dtype), some(n(inner), n(columns), dtype=dtype)))

    def heads(function: Callable[..., Any], length: int) -> Callable[[], Case]:
        return lambda: (function, tuple(some(4, n(length), 16, 64, seed=i) for i in range(3)))

    def gradient_of(function: Callable[..., Any]) -> Callable[..., Any]:
        return jax.grad(lambda *args: function(*args).astype(f32).sum(), argnums=(0, 1, 2))

    def row(function: Callable[..., Any], *shape: int, dtype: Any = jnp.bfloat16) -> Callable[[], Case]:
        return lambda: (function, (some(*map(n, shape), dtype=dtype),))

    return {
        "product 8192 x 8192 x 8192, bfloat16": product(8192, 8192, 8192),
        "product 8192 x 8192 x 8192, float32": product(8192, 8192, 8192, f32),
        "product 16384 x 1024 x 4096, bfloat16": product(16_384, 1024, 4096),
        "product 2048 x 8192 x 512, bfloat16": product(2048, 8192, 512),
        "product 8 x 8192 x 8192, bfloat16": product(8, 8192, 8192),
        "gelu": row(jax.nn.gelu, 16_384, 8192),
        "add": lambda: (jnp.add, (some(T, n(8192)), some(T, n(8192), seed=1))),
        "exp, float32": row(jnp.exp, 16_384, 8192, dtype=f32),
        "softmax of rows, float32": row(jax.nn.softmax, 16_384, 4096, dtype=f32),
        "layer norm": row(layer_norm, 16_384, 4096),
        "sum over rows": row(lambda x: x.sum(0), 16_384, 8192, dtype=f32),
        "sum of each row": row(lambda x: x.sum(1), 16_384, 8192, dtype=f32),
        "transpose": row(lambda x: x.T + 1, 8192, 8192),
        "cumulative sum": row(lambda x: jnp.cumsum(x, 1), 8192, 4096, dtype=f32),
        "sort of rows": row(lambda x: jnp.sort(x, 1), 1024, 8192, dtype=f32),
        "top 2 of 128": row(lambda x: jax.lax.top_k(x, 2), 16_384, 128, dtype=f32),
        "lookup": lambda: (lambda t, i: t[i] * 2, (some(n(32_768), n(1024)), some_ids(4 * T, below=n(32_768)))),
        "sum into rows": lambda: (
            lambda t, i, x: t.at[i].add(x),
            (some(n(32_768), n(1024), dtype=f32), some_ids(T, below=n(32_768)), some(T, n(1024), dtype=f32)),
        ),
        "cross entropy of 32,768": lambda: (
            cross_entropy,
            (some(n(8192), n(32_768), dtype=f32), some_ids(n(8192), below=n(32_768))),
        ),
        "convolution 3 x 3": lambda: (
            functools.partial(
                jax.lax.conv_general_dilated, window_strides=(1, 1), padding="SAME",
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
            ),
            (some(n(64), 56, 56, n(256)), some(3, 3, n(256), n(256))),
        ),
        "attention of 2,048": heads(attention, 2048),
        "attention of 2,048, gradient": heads(gradient_of(attention), 2048),
        "experts, ragged": lambda: (
            jax.lax.ragged_dot,
            (some(T, n(1024)), some(8, n(1024), n(4096)), jnp.full(8, T // 8, jnp.int32)),
        ),
        "experts, batched": lambda: (
            lambda x, w: jnp.einsum("etm,emh->eth", x, w),
            (some(8, T // 8, n(1024)), some(8, n(1024), n(4096))),
        ),
        "random normal": lambda: (
            lambda k: jax.random.normal(jax.random.wrap_key_data(k), (T, n(4096))),
            (jax.random.key_data(jax.random.key(0)),),
        ),
        "Adam": lambda: (adam, tuple(abs(some(n(8192), n(8192), dtype=f32, seed=i)) for i in range(4))),
        "16 layers in a scan": lambda: (in_a_loop, (some(T, n(1024)), 0.03 * some(16, n(1024), n(1024)))),
        "FFT": row(lambda x: jnp.abs(jnp.fft.rfft(x)), 4096, 4096, dtype=f32),
    }  # fmt: skip


def seconds_of_a_call(run: Callable[..., Any], arguments: tuple[Any, ...], tiny: bool) -> float:
    """The median over batches of calls; the calls of a batch are queued one after the other."""
    jax.block_until_ready(run(*arguments))
    begin = time.perf_counter()
    jax.block_until_ready(run(*arguments))
    calls = 2 if tiny else max(3, min(2000, int(SECONDS / max(time.perf_counter() - begin, 1e-5))))
    found = []
    for _ in range(BATCHES):
        begin = time.perf_counter()
        for _ in range(calls):
            results = run(*arguments)
        jax.block_until_ready(results)
        found.append((time.perf_counter() - begin) / calls)
    return statistics.median(found)


def operators(asked: Asked) -> Found:
    """Times of operators, measured and modelled."""
    device = accelerator()
    kind = None if device.platform == "cpu" else kind_called(device.device_kind, device.platform)
    machine = Machine.of("h100:1x1") if kind is None else Machine.of(kind, 1)
    rows, wrong = [], {}
    for name, case in timed_cases(asked.tiny).items():
        if not asked.goes_on():
            break
        try:
            function, arguments = case()
            arguments = jax.device_put(arguments, device)
            lowered = partitioned(function).lower(*arguments)
            compiled = jax.jit(function).lower(*arguments).compile()
            priced = cost(lowered.spmd, machine, lowered.donated)
            took = seconds_of_a_call(compiled, arguments, asked.tiny)
            kernels = sum(what_runs(compiled.as_text()).values())
            rows.append([name, took, priced.seconds, priced.flops, kernels])
        except Exception as error:
            wrong[name] = told(error)
    return {"machine": str(kind or "h100"), "rows": rows, "wrong": wrong}


def double_kernel(x_ref: Any, y_ref: Any) -> None:
    """Of Pallas: twice its block."""
    y_ref[...] = 2 * x_ref[...]


def doubled(x: Any) -> Any:
    """A Pallas kernel over blocks of rows."""
    from jax.experimental import pallas as pl

    block = pl.BlockSpec((16, x.shape[1]), lambda i: (i, 0))
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    interpret = accelerator().platform == "cpu"
    call = pl.pallas_call(
        double_kernel, out_shape=shape, grid=(x.shape[0] // 16,), in_specs=[block], out_specs=block, interpret=interpret
    )
    return call(x)


def split_first(x: Any) -> Any:
    """Marks an array: its first dimension is split."""
    return gshard.split(x, 0, "x")


def in_blocks_of_a_mesh(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that a ``shard_map`` calls on each device's rows."""

    def call(x: Any) -> Any:
        rows = jax.P("x")
        return jax.shard_map(function, in_specs=rows, out_specs=rows, check_vma=False)(split_first(x))

    return call


def positive(x: Any) -> Any:
    """Positive definite matrices from square ones."""
    return x @ x.mT + x.shape[-1] * jnp.eye(x.shape[-1], dtype=x.dtype)


def fused_attention(q: Any, k: Any, v: Any) -> Any:
    """Attention of cuDNN, the batch split; of XLA on a CPU."""
    fused = None if accelerator().platform == "cpu" else "cudnn"
    return jax.nn.dot_product_attention(split_first(q), k, v, is_causal=True, implementation=fused)


def by_heads(q: Any, k: Any, v: Any) -> Any:
    """The same with heads split."""
    fused = None if accelerator().platform == "cpu" else "cudnn"
    q, k, v = (gshard.split(a, 2, "x") for a in (q, k, v))
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=fused)


def eight_bit(x: Any, w: Any) -> Any:
    """A product of float8."""
    return jnp.matmul(*(a.astype(jnp.float8_e4m3fn) for a in (split_first(x), w)), preferred_element_type=jnp.float32)


def kernel_cases() -> dict[str, Case]:
    """Programs with kernels that a CPU does not have, or has others for. Integers and layouts are compared, too."""
    f32 = jnp.float32
    qkv = tuple(some(8, 64, 8, 64, seed=i) for i in range(3))

    def gradient(function: Callable[..., Any]) -> Callable[..., Any]:
        return jax.grad(lambda *args: jnp.sum(function(*args).astype(f32) ** 2), argnums=(0, 1, 2))

    def rows(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x: function(split_first(x))

    square = some(8, 32, 32, dtype=f32)
    return {
        "cuDNN attention, batch": (fused_attention, qkv),
        "cuDNN attention, batch, gradient": (gradient(fused_attention), qkv),
        "cuDNN attention, heads": (by_heads, qkv),
        "cuDNN attention, heads, gradient": (gradient(by_heads), qkv),
        "Pallas in a shard_map": (in_blocks_of_a_mesh(doubled), (some(128, 64, dtype=f32),)),
        "Pallas": (rows(doubled), (some(128, 64, dtype=f32),)),
        "product of float8": (eight_bit, (some(128, 64), some(64, 32))),
        "Cholesky": (rows(lambda x: jnp.linalg.cholesky(positive(x))), (square,)),
        "solve": (rows(lambda x: jnp.linalg.solve(positive(x), x)), (square,)),
        "eigenvalues": (rows(lambda x: jnp.linalg.eigvalsh(positive(x))), (square,)),
        "QR": (rows(lambda x: jnp.abs(jnp.linalg.qr(x)[1])), (square,)),
        "singular values": (rows(lambda x: jnp.linalg.svd(x, compute_uv=False)), (square,)),
        "FFT": (rows(lambda x: jnp.abs(jnp.fft.fft(x))), (some(64, 64, dtype=f32),)),
        "sort": (rows(lambda x: jnp.sort(x, 0)), (some(64, 64, dtype=f32),)),
        "top k": (rows(lambda x: jax.lax.top_k(x.T, 3)), (some(64, 64, dtype=f32),)),
        "ragged product": (
            lambda x, w, g: jax.lax.ragged_dot(split_first(x), w, g),
            (some(64, 32, dtype=f32), some(4, 32, 16, dtype=f32), jnp.array([16, 0, 40, 8], jnp.int32)),
        ),
        "random bits": (
            lambda k: split_first(jax.random.bits(jax.random.wrap_key_data(k), (64, 8))),
            (jax.random.key_data(jax.random.key(0)),),
        ),
        "convolution": (
            lambda x, w: jax.lax.conv_general_dilated(split_first(x), w, (1, 1), "SAME"),
            (some(8, 4, 16, 16, dtype=f32), some(8, 4, 3, 3, dtype=f32)),
        ),
        "host callback": (
            rows(lambda x: jax.pure_callback(lambda a: np.sin(a), jax.ShapeDtypeStruct(x.shape, x.dtype), x)),
            (some(64, 8, dtype=f32),),
        ),
        "NaN, infinities and zeros": (
            rows(lambda x: (jnp.max(x, 0), jnp.sign(1 / x), jnp.argmin(x, 0), jnp.cumsum(x, 0))),
            (jnp.tile(jnp.array([0.0, -0.0, jnp.inf, -jnp.inf, jnp.nan, 1.0, -2.0, 3.0], f32)[:, None], (8, 8)),),
        ),
    }  # fmt: skip


def kernels(asked: Asked) -> Found:
    """Programs under ``jax.jit`` and ``gshard.jit`` on this device, and for eight devices, one after the other."""
    device = accelerator()
    one = jax.sharding.Mesh(np.array([device]), ("x",))
    eight = gshard.core.mesh.Mesh.abstract(x=8)
    rows, wrong = [], {}
    for name, (function, arguments) in kernel_cases().items():
        if not asked.goes_on():
            break
        try:
            with EXACT, jax.default_device(device):
                arguments = jax.device_put(arguments, device)
                with jax.set_mesh(one):
                    plain = jax.jit(function)(*arguments)
                expected = [np.asarray(x) for x in jax.tree.leaves(plain)]
                alone = jax.tree.leaves(gshard.jit(function, mesh=one)(*arguments))
                near = NEAR if all(x.dtype != jnp.bfloat16 for x in expected) else NEAR_BFLOAT16
                rows.append([name, near, difference(alone, expected), None])
                lowered = gshard.jit(function, mesh=eight).lower(*arguments)
                many = device_after_device(lowered, jax.tree.leaves(arguments), expected)
                rows[-1][3] = difference(many, expected)
        except Exception as error:
            wrong[name] = told(error)
    far = {}
    for name, near, *offs in rows:
        if not (worst := max(off for off in offs if off is not None)) < near:
            far[name] = worst
    return {"rows": rows, "wrong": wrong, "far": far}


def memory(asked: Asked) -> Found:
    """A step of Adam whose moments lie in the memory of the host, and a layer whose activations are kept there."""
    device, size = accelerator(), 64 if asked.tiny else 4096
    mesh = jax.sharding.Mesh(np.array([device]), ("x",))
    there = jax.NamedSharding(mesh, jax.P("x"), memory_kind="pinned_host")
    here = jax.NamedSharding(mesh, jax.P("x"))

    def update(w: Any, moments: Mapping[str, Any], x: Any) -> tuple[Any, Any]:
        on_device = jax.device_put(moments, jax.memory.Space.Device)
        gradient = jax.grad(lambda w: jnp.mean((jax.nn.gelu(x @ w) @ w.T - x) ** 2))(w)
        w, m, v = adam(w, on_device["m"], on_device["v"], gradient)
        return w, jax.device_put({"m": m, "v": v}, jax.memory.Space.Host)

    def offloaded(w: Any, x: Any) -> Any:
        policy = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[], names_which_can_be_offloaded=["kept"], offload_src="device",
            offload_dst="pinned_host",
        )  # fmt: skip

        def layer(x: Any, w: Any) -> tuple[Any, None]:
            return jax.ad_checkpoint.checkpoint_name(jnp.tanh(x @ w), "kept"), None

        return jax.grad(lambda w: jax.lax.scan(jax.checkpoint(layer, policy=policy), x, w)[0].sum())(w)

    w, x = (jax.device_put(some(size, size, dtype=jnp.float32, seed=i) / size**0.5, here) for i in range(2))
    moments = {name: jax.device_put(jnp.zeros_like(w), there) for name in "mv"}
    stack = jnp.stack([w] * 4)
    programs = {"moments on the host": (update, (w, moments, x)), "activations on the host": (offloaded, (stack, x))}
    rows, wrong = [], {}
    for name, (function, arguments) in programs.items():
        sides = []
        for jit in (jax.jit, functools.partial(gshard.jit, mesh=mesh)):
            try:
                with EXACT:
                    run = jit(function)
                    temporaries = run.lower(*arguments).compile().memory_analysis()
                    results = arguments
                    for _ in range(3):  # results are arguments of the next call
                        found = run(*results)
                        results = (*found, x) if isinstance(found, tuple) else arguments
                    took = seconds_of_a_call(run, arguments, asked.tiny)
            except Exception as error:
                wrong[f"{name}, {'jax.jit' if jit is jax.jit else 'gshard.jit'}"] = told(error)
                continue
            leaves = jax.tree.leaves(found)
            sides.append((leaves, took, temporaries.temp_size_in_bytes, temporaries.host_temp_size_in_bytes))
        if len(sides) == 2:
            kinds = [[leaf.sharding.memory_kind for leaf in leaves] for leaves, *_ in sides]
            off = difference(sides[1][0], [np.asarray(leaf) for leaf in sides[0][0]])
            rows.append([name, off, kinds[0] == kinds[1], *(list(side[1:]) for side in sides)])
    return {"rows": rows, "wrong": wrong, "size": size}


if __name__ == "__main__":
    answer({"operators": operators, "kernels": kernels, "memory": memory})
