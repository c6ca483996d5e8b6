"""Training steps written as known code bases write theirs, with shardings that XLA's partitioner does not follow well.

``CODEBASES`` has for each a function that returns a jitted step and shapes of its arguments on a mesh: a language
model whose products are all one line of one layer class, as in MaxText; a graph network over edges and nodes, as in
GraphCast; and a video model with modulation, self and cross attention over a sequence that is split, as in Wan.
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from placed import mesh_of

RATE = 1e-3


def shapes(mesh, tree, dtype="float32"):
    """Shapes with shardings of a tree of pairs of shape and spec."""

    def made(pair):
        return jax.ShapeDtypeStruct(pair[0], dtype, sharding=NamedSharding(mesh, pair[1]))

    return jax.tree.map(made, tree, is_leaf=lambda x: isinstance(x, tuple))


def jitted(loss, params):
    """A jitted step of gradient descent with momentum. Its state keeps its shardings."""

    def step(params, momentum, *batch):
        value, gradients = jax.value_and_grad(loss)(params, *batch)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
        return jax.tree.map(lambda w, m: w - RATE * m, params, momentum), momentum, value

    state = jax.tree.map(lambda w: w.sharding, params)
    return jax.jit(step, donate_argnums=(0, 1), out_shardings=(state, state, None))


def norm(x, scale):
    """RMS normalization."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


class Dense:
    """A product with a kernel over the last dimensions: the only line of the model with a product."""

    def __init__(self, kernel, dims=1):
        self.kernel, self.dims = kernel, dims

    def __call__(self, x):
        return jnp.tensordot(x, self.kernel, self.dims)


def maxtext():
    """Scanned layers of a language model, FSDP and tensor parallelism; activations have no constraints."""
    mesh = mesh_of(fsdp=4, tensor=2)
    layers, model, heads, head, hidden, words = 4, 64, 8, 8, 256, 512

    def attention(w, x):
        q, k, v = (Dense(w[name])(x) for name in ("query", "key", "value"))
        return Dense(w["out"], 2)(jax.nn.dot_product_attention(q, k, v, is_causal=True))

    def mlp(w, x):
        gate = jax.nn.silu(Dense(w["wi_0"])(x))
        up = Dense(w["wi_1"])(x)
        return Dense(w["wo"])(gate * up)

    def layer(x, w):
        x = x + attention(w, norm(x, w["pre"]))
        return x + mlp(w, norm(x, w["post"])), None

    def loss(params, tokens):
        x = params["embedding"][tokens]
        x, _ = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])
        logits = Dense(params["logits"])(norm(x, params["norm"]))
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1)
        return -jnp.mean(picked)

    projection = ((layers, model, heads, head), P(None, "fsdp", "tensor"))
    up = ((layers, model, hidden), P(None, "fsdp", "tensor"))
    params = {
        "embedding": ((words, model), P("tensor", "fsdp")), "logits": ((model, words), P("fsdp", "tensor")),
        "norm": ((model,), P()),
        "layers": {
            "pre": ((layers, model), P()), "post": ((layers, model), P()),
            "query": projection, "key": projection, "value": projection,
            "out": ((layers, heads, head, model), P(None, "tensor", None, "fsdp")),
            "wi_0": up, "wi_1": up, "wo": ((layers, hidden, model), P(None, "tensor", "fsdp")),
        },
    }  # fmt: skip
    weights = shapes(mesh, params)
    return jitted(loss, weights), (weights, weights, shapes(mesh, ((16, 64), P("fsdp")), "int32"))


def graphcast():
    """Message passing over the edges of a graph; weights and the features of a batch are split."""
    mesh = mesh_of(data=8)
    rounds, nodes, edges, batch, width = 4, 96, 384, 8, 64

    def mlp(w, *parts):
        x = jnp.concatenate(parts, axis=-1)
        x = jax.nn.silu(x @ w["first"] + w["bias"])
        return norm(x @ w["second"], w["scale"])

    def message(w, node, edge, senders, receivers):
        edge = edge + mlp(w["edge"], edge, node[senders], node[receivers])
        received = jax.ops.segment_sum(edge, receivers, nodes)
        return node + mlp(w["node"], node, received), edge

    def loss(params, grid, displacement, senders, receivers, target):
        node = mlp(params["embed_node"], grid)
        edge = mlp(params["embed_edge"], displacement)
        edge = jnp.broadcast_to(edge[:, None], (edges, batch, width))
        for w in params["rounds"]:
            node, edge = message(w, node, edge, senders, receivers)
        return jnp.mean((mlp(params["decode"], node) - target) ** 2)

    def weights(inputs, outputs=width):
        return {"first": ((inputs, width), P("data")), "bias": ((width,), P("data")),
                "second": ((width, outputs), P("data")), "scale": ((outputs,), P())}  # fmt: skip

    params = shapes(mesh, {
        "embed_node": weights(32), "embed_edge": weights(8), "decode": weights(width, 32),
        "rounds": [{"edge": weights(3 * width), "node": weights(2 * width)} for _ in range(rounds)],
    })  # fmt: skip
    grid, displacement, target = shapes(mesh, [
        ((nodes, batch, 32), P("data")), ((edges, 8), P("data")), ((nodes, batch, 32), P("data")),
    ])  # fmt: skip
    ends = shapes(mesh, ((edges,), P("data")), "int32")
    return jitted(loss, params), (params, params, grid, displacement, ends, ends, target)


def wan():
    """A diffusion Transformer of videos: the sequence of patches is split over an axis, weights are FSDP."""
    mesh = mesh_of(data=2, fsdp=2, context=2)
    layers, model, heads, hidden, texts, patch = 3, 64, 4, 256, 16, 2

    def heads_of(x):
        return x.reshape(*x.shape[:-1], heads, -1)

    def attend(w, x, y):
        q, k, v = heads_of(x @ w["q"]), heads_of(y @ w["k"]), heads_of(y @ w["v"])
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
        return mixed.reshape(x.shape) @ w["o"]

    def modulated(x, shift, scale):
        return x * (1 + scale[:, None]) + shift[:, None]

    def block(x, w, text, time):
        shift, scale, gate, shift2, scale2, gate2 = jnp.split(time @ w["modulation"], 6, axis=-1)
        y = modulated(norm(x, w["norm1"]), shift, scale)
        x = x + gate[:, None] * attend(w["self"], y, y)
        x = x + attend(w["cross"], norm(x, w["norm2"]), text)
        y = modulated(norm(x, w["norm3"]), shift2, scale2)
        return x + gate2[:, None] * (jax.nn.gelu(y @ w["up"]) @ w["down"])

    def patches(video):
        b, t, h, w, c = video.shape
        video = video.reshape(b, t, h // patch, patch, w // patch, patch, c).swapaxes(3, 4)
        return video.reshape(b, t * (h // patch) * (w // patch), -1)

    def loss(params, video, noise, text, at):
        mix = at[:, None, None, None, None]
        x = patches(video * (1 - mix) + noise * mix) @ params["embed"]
        time = jax.nn.silu(jnp.sin(at[:, None] * jnp.arange(model)) @ params["time"])
        text = text @ params["text"]
        x, _ = jax.lax.scan(jax.checkpoint(lambda x, w: (block(x, w, text, time), None)), x, params["layers"])
        return jnp.mean((norm(x, params["norm"]) @ params["head"] - patches(noise - video)) ** 2)

    square, scale = ((layers, model, model), P(None, "fsdp")), ((layers, model), P())
    attention = dict.fromkeys("qkvo", square)
    layer = {
        "self": attention, "cross": attention, "norm1": scale, "norm2": scale, "norm3": scale,
        "modulation": ((layers, model, 6 * model), P(None, "fsdp")), "up": ((layers, model, hidden), P(None, "fsdp")),
        "down": ((layers, hidden, model), P(None, None, "fsdp")),
    }  # fmt: skip
    values = 4 * patch * patch
    params = shapes(mesh, {
        "embed": ((values, model), P(None, "fsdp")), "time": ((model, model), P("fsdp")),
        "text": ((32, model), P(None, "fsdp")), "norm": ((model,), P()), "head": ((model, values), P("fsdp")),
        "layers": layer,
    })  # fmt: skip
    video, text, at = shapes(mesh, [
        ((8, 8, 16, 16, 4), P(("data", "fsdp"), None, "context")), ((8, texts, 32), P(("data", "fsdp"))), ((8,), P()),
    ])  # fmt: skip
    return jitted(loss, params), (params, params, video, video, text, at)


CODEBASES = {"maxtext": maxtext, "graphcast": graphcast, "wan": wan}
