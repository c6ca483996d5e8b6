"""One program, three layouts: names of dimensions instead of marks.

    python examples/layout_transformer.py

Names say what dimensions are, and a table says how they are split.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp

import gshard

BATCH, LENGTH, EMBED, HIDDEN, HEADS, HEAD, LAYERS, VOCABULARY = 8, 16, 32, 96, 4, 8, 2, 50


NAMES = {
    "table": "vocabulary width",
    "blocks": {
        **dict.fromkeys("qkv", "layers width heads head"),
        "o": "layers heads head width",
        "w1": "layers width hidden",
        "w2": "layers hidden width",
    },
}


def loss(params, tokens):
    params = gshard.name(params, NAMES)

    def block(x, p):
        x = gshard.name(x, "batch length embed")
        q, k, v = (jnp.einsum("ble,enh->blnh", x, p[name]) for name in ("q", "k", "v"))
        scores = jax.nn.softmax(jnp.einsum("bqnh,bknh->bnqk", q, k) / HEAD**0.5)
        x = x + jnp.einsum("bnqk,bknh,nhe->bqe", scores, v, p["o"])
        hidden = gshard.name(jax.nn.gelu(x @ p["w1"]), "batch length hidden")
        return x + hidden @ p["w2"], None

    x, _ = jax.lax.scan(block, params["table"][tokens], params["blocks"])
    return -jnp.mean(jax.nn.log_softmax(x @ params["table"].T)[..., 0])


def weights(key, *shape):
    return jax.random.normal(key, shape) / shape[-2] ** 0.5


keys = iter(jax.random.split(jax.random.key(0), 8))
params = {
    "table": weights(next(keys), VOCABULARY, EMBED),
    "blocks": {
        **{name: weights(next(keys), LAYERS, EMBED, HEADS, HEAD) for name in ("q", "k", "v")},
        "o": weights(next(keys), LAYERS, HEADS, HEAD, EMBED),
        "w1": weights(next(keys), LAYERS, EMBED, HIDDEN),
        "w2": weights(next(keys), LAYERS, HIDDEN, EMBED),
    },
}
tokens = jax.random.randint(next(keys), (BATCH, LENGTH), 0, VOCABULARY)
gradient = jax.value_and_grad(loss)

layouts = {
    "data parallel": gshard.Layout(batch=("data", "model")),
    "ZeRO-3": gshard.Layout(width=("data", "model"), batch=("data", "model")),
    "two axes": gshard.Layout(
        width="data", batch="data", heads="model", hidden="model", vocabulary="model", embed=None
    ),
}
held = {}
for kind, layout in layouts.items():
    step = gshard.jit(gradient, mesh={"data": 2, "model": 4}, layout=layout)
    explained = gshard.explain(step, params, tokens)
    held[kind] = explained.argument_bytes[1]
    print(f"{kind}: {held[kind]} bytes of arguments on each device, {explained.total_bytes} bytes sent")
    print("\n".join(f"  {line}" for line in explained.lists["layout"]))
assert max(held["ZeRO-3"], held["two axes"]) < held["data parallel"] / 7

expected = jax.jit(gradient)(params, tokens)  # and the last of them runs
for ours, theirs in zip(jax.tree.leaves(step(params, tokens)), jax.tree.leaves(expected), strict=True):
    assert jnp.allclose(ours, theirs, atol=1e-5)
