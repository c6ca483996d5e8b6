"""Five known training steps, partitioned by XLA and by gshard: the same functions, the same shardings of arguments.

Each step is a function from ``jax.jit`` with shardings and without marks. Weights are float32, the optimizer is Adam.
gshard plans for eight H100s. XLA compiles both programs for eight CPU devices; gshard reads both texts, counts what XLA
sends on GPUs, and prices both on the model of eight H100s. These models are small, so launches of kernels and latencies
are most of their time.

    python examples/beside_xla.py [folder for the pages]
"""

import functools
import os
import sys
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gshard

B, T, M, H, K, F, V, LAYERS, EXPERTS = 32, 64, 256, 8, 32, 1024, 2048, 2, 8
MACHINE = "h100:1x8"
OPTIMIZER = optax.adam(1e-3)
EIGHT = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def rotated(x):
    angles = jnp.arange(T)[:, None, None] / 10000.0 ** (jnp.arange(K // 2) / (K // 2))
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * jnp.cos(angles) - b * jnp.sin(angles), a * jnp.sin(angles) + b * jnp.cos(angles)], -1)


def attention(w, x, causal=True, turn=lambda x: x):
    q, k, v = (jnp.einsum("btm,mhk->bthk", x, w[name]) for name in "qkv")
    mixed = jax.nn.dot_product_attention(turn(q), turn(k), v, is_causal=causal)
    return jnp.einsum("bthk,hkm->btm", mixed, w["out"])


def mlp(w, x):
    return jax.nn.gelu(x @ w["up"]) @ w["down"]


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def gpt(w, tokens):
    """Layers written out, and one embedding for words and logits."""
    x = w["embed"][tokens]
    for layer in w["layers"]:
        x = x + attention(layer, norm(x))
        x = x + mlp(layer, norm(x))
    return cross_entropy(norm(x) @ w["embed"].T, tokens)


def llama(w, tokens):
    """Layers in a scan that recomputes them; rotary positions and gated units; the batch is constrained in each."""
    hold = functools.partial(jax.lax.with_sharding_constraint, shardings=NamedSharding(EIGHT, P("data")))

    @jax.checkpoint
    def layer(x, w):
        x = hold(x + attention(w, norm(x), turn=rotated))
        y = norm(x)
        return hold(x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"]), None

    x, _ = jax.lax.scan(layer, hold(w["embed"][tokens]), w["layers"])
    return cross_entropy(norm(x) @ w["head"], tokens)


def experts(w, x):
    """Each token goes to its two best experts, as far as these have room; a sentence is a group."""
    gates = jax.nn.softmax(x @ w["router"])
    best, chosen = jax.lax.top_k(gates, 2)
    wanted = jax.nn.one_hot(chosen, EXPERTS).swapaxes(1, 2)  # [b, 2, t, e]: the best first
    before = (jnp.cumsum(wanted.reshape(B, -1, EXPERTS), axis=1) - 1).reshape(wanted.shape)
    room = jax.nn.one_hot(jnp.where(wanted > 0, before, -1), 2 * T // EXPERTS)  # [b, 2, t, e, c]
    dispatch = room.sum(1)
    combine = jnp.einsum("bntec,btn->btec", room, best)
    sent = jnp.einsum("btec,btm->ebcm", dispatch, x)
    hidden = jax.nn.gelu(jnp.einsum("ebcm,emf->ebcf", sent, w["up"]))
    return jnp.einsum("ebcm,btec->btm", jnp.einsum("ebcf,efm->ebcm", hidden, w["down"]), combine)


def mixture(w, tokens):
    """Experts in place of each feed-forward layer."""
    x = w["embed"][tokens]
    for layer in w["layers"]:
        x = x + attention(layer, norm(x))
        x = x + experts(layer, norm(x))
    return cross_entropy(norm(x) @ w["embed"].T, tokens)


def vision(w, images, labels):
    """Patches of 8 x 8 pixels, and the mean of all tokens."""
    patches = images.reshape(B, 8, 8, 8, 8, 3).swapaxes(2, 3).reshape(B, T, 8 * 8 * 3)
    x = patches @ w["patch"] + w["positions"]
    for layer in w["layers"]:
        x = x + attention(layer, norm(x), causal=False)
        x = x + mlp(layer, norm(x))
    return cross_entropy(norm(x).mean(1) @ w["head"], labels)


def layer_specs(m, h, f, feed_forward=("up", "down"), **more):
    """The shapes and specs of a layer's weights whose features, heads and units are cut over ``m``, ``h`` and ``f``."""
    inner = {"up": ((M, F), (m, f)), "gate": ((M, F), (m, f)), "down": ((F, M), (f, m))}
    own = {name: ((M, H, K), (m, h, None)) for name in "qkv"} | {"out": ((H, K, M), (h, None, m))}
    return own | {name: inner[name] for name in feed_forward} | more


def stacked(layer):
    return {name: ((LAYERS, *shape), (None, *spec)) for name, (shape, spec) in layer.items()}


moe_layer = layer_specs(
    None, None, None, (), router=((M, EXPERTS), (None, None)),
    up=((EXPERTS, M, F), ("data", None, None)), down=((EXPERTS, F, M), ("data", None, None)),
)  # fmt: skip
WORDS = ("int32", (B, T), ("data",))
# Of each model: the loss, the mesh, shapes and specs of its weights, and those of a batch with their dtype.
MODELS = {
    "gpt_fsdp": (
        gpt, {"data": 8},
        {"embed": ((V, M), ("data", None)), "layers": [layer_specs("data", None, None)] * LAYERS}, (WORDS,),
    ),
    "gpt_tensor_parallel": (
        gpt, {"data": 2, "model": 4},
        {"embed": ((V, M), ("model", None)), "layers": [layer_specs(None, "model", "model")] * LAYERS}, (WORDS,),
    ),
    "llama_scanned": (
        llama, {"data": 8},
        {"embed": ((V, M), (None, "data")), "head": ((M, V), ("data", None)),
         "layers": stacked(layer_specs("data", None, None, ("gate", "up", "down")))}, (WORDS,),
    ),
    "mixture_of_experts": (
        mixture, {"data": 8}, {"embed": ((V, M), (None, None)), "layers": [moe_layer] * LAYERS}, (WORDS,),
    ),
    "vision_transformer": (
        vision, {"data": 4, "model": 2},
        {"patch": ((8 * 8 * 3, M), (None, None)), "positions": ((T, M), (None, None)),
         "head": ((M, 1000), (None, "model")), "layers": [layer_specs(None, "model", "model")] * LAYERS},
        (("float32", (B, 64, 64, 3), ("data",)), ("int32", (B,), ("data",))),
    ),
}  # fmt: skip


def training_step(name):
    """The step of a model, and shapes of its arguments with their shardings."""
    loss, axes, weights, batch = MODELS[name]
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))

    def array(shape, spec, dtype="float32"):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

    is_weight = lambda node: isinstance(node, tuple)  # noqa: E731
    params = jax.tree.map(lambda node: array(*node), weights, is_leaf=is_weight)
    # The moments of Adam lie as the weights do.
    shapes = jax.eval_shape(OPTIMIZER.init, params)
    state = optax.tree.map_params(
        OPTIMIZER, lambda _, w: w, shapes, params, transform_non_params=lambda x: array(x.shape, (), x.dtype)
    )

    def step(params, state, *batch):
        value, gradients = jax.value_and_grad(loss)(params, *batch)
        updates, state = OPTIMIZER.update(gradients, state)
        return optax.apply_updates(params, updates), state, value

    step.__name__ = name
    lies = jax.tree.map(lambda x: x.sharding, (params, state))
    jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=(*lies, None))
    return jitted, (params, state, *(array(shape, spec, dtype) for dtype, shape, spec in batch))


for name in MODELS:
    step, arguments = training_step(name)
    by_xla = gshard.explain(step, *arguments, machine=MACHINE)
    lowered = gshard.jit(step, mesh=by_xla.mesh, machine=MACHINE).lower(*arguments)
    planned, by_gshard = gshard.explain(lowered), gshard.explain(lowered, partitioner="xla", machine=MACHINE)
    print(by_gshard.difference(by_xla).format(lines=3), end="\n\n")
    for found in by_xla, by_gshard:
        assert all(row.line or row.module for row in found.collectives), "each collective has a line or a module"
    assert abs(planned.total_bytes - by_gshard.total_bytes) < 0.01 * planned.total_bytes, "what is planned is compiled"
    if len(sys.argv) > 1:
        by_xla.html(Path(sys.argv[1]) / f"{name}_xla.html")
        planned.html(Path(sys.argv[1]) / f"{name}_gshard.html", machine=MACHINE, against=by_xla)
