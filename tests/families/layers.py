"""Layers of a Transformer: data, tensor (Megatron), 2-D and sequence parallelism."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import gshard
from families.case import GRID, LINE, Family

CASES = Family("layers")

B, S, M, H, N, D = 16, 64, 64, 256, 8, 8  # batch, sequence, model, hidden, heads, size of a head
X, W1, W2 = (B, S, M), (M, H), (H, M)
HEADS = {"q": (M, N, D), "k": (M, N, D), "v": (M, N, D), "o": (N, D, M)}
LAYER = {"attention": HEADS, "w1": W1, "w2": W2}


def feed_forward(x, w1, w2):
    return jax.nn.gelu(x @ w1) @ w2


def norm(x):
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)


def attention(x, p):
    q, k, v = (jnp.einsum("bsm,mnd->bsnd", x, p[name]) for name in "qkv")
    weights = jax.nn.softmax(jnp.einsum("bqnd,bknd->bnqk", q, k) / D**0.5)
    return jnp.einsum("bqnd,ndm->bqm", jnp.einsum("bnqk,bknd->bqnd", weights, v), p["o"])


def layer(x, p):
    x = x + attention(norm(x), p["attention"])
    return x + feed_forward(norm(x), p["w1"], p["w2"])


def megatron(p, axis="y"):
    """Heads and hidden units split: the marks of Megatron-LM."""
    heads = {name: gshard.shard(p["attention"][name], P(None, axis)) for name in "qkv"}
    heads["o"] = gshard.shard(p["attention"]["o"], P(axis))
    return {"attention": heads, "w1": gshard.shard(p["w1"], P(None, axis)), "w2": gshard.shard(p["w2"], P(axis))}


@CASES.add(LINE, X, W1, W2, gradient=(1, 2))
def mlp_data(x, w1, w2):
    return feed_forward(gshard.split(x, 0, "x"), w1, w2)


@CASES.add(LINE, X, W1, W2, gradient=(0, 1, 2))
def mlp_tensor(x, w1, w2):
    return feed_forward(x, gshard.split(w1, 1, "x"), gshard.split(w2, 0, "x"))


@CASES.add(GRID, X, W1, W2, gradient=(0, 1, 2))
def mlp_data_and_tensor(x, w1, w2):
    return feed_forward(gshard.split(x, 0, "x"), gshard.split(w1, 1, "y"), gshard.split(w2, 0, "y"))


@CASES.add(GRID, X, W1, W2, gradient=(1, 2))
def mlp_two_dimensional(x, w1, w2):
    """Weights and activations split over both axes."""
    x = gshard.shard(x, P("x", None, "y"))
    h = jax.nn.gelu(x @ gshard.shard(w1, P("x", "y")))
    h = gshard.shard(h, P("x", None, "y"))
    return gshard.shard(h @ gshard.shard(w2, P("y", "x")), P("x", None, "y"))


@CASES.add(GRID, X, W1, W2, gradient=(0, 1, 2))
def mlp_sequence(x, w1, w2):
    """Tensor parallelism inside, the sequence split outside."""
    x = gshard.shard(x, P("x", "y"))
    y = feed_forward(norm(x), gshard.split(w1, 1, "y"), gshard.split(w2, 0, "y"))
    return x + gshard.shard(y, P("x", "y"))


@CASES.add(GRID, X, W1, W2, gradient=(1, 2))
def mlp_wide_marks(x, w1, w2):
    """The batch over all devices, though the weights are split over an axis too."""
    x = gshard.split(x, 0, ("x", "y"))
    return feed_forward(x, gshard.split(w1, 1, "y"), gshard.split(w2, 0, "y"))


@CASES.add(LINE, X, HEADS, gradient=(1,))
def attention_data(x, p):
    return attention(gshard.split(x, 0, "x"), p)


@CASES.add(LINE, X, HEADS, gradient=(0, 1))
def attention_heads(x, p):
    marked = {name: gshard.split(p[name], 1, "x") for name in "qkv"}
    return attention(x, {**marked, "o": gshard.split(p["o"], 0, "x")})


@CASES.add(LINE, (4, 128, M), HEADS, gradient=(0, 1))
def attention_sequence(x, p):
    """Nothing but the sequence is split."""
    return attention(gshard.split(x, 1, "x"), p)


@CASES.add(GRID, X, LAYER, gradient=(1,))
def layer_data(x, p):
    return layer(gshard.split(x, 0, ("x", "y")), p)


@CASES.add(GRID, X, LAYER, gradient=(0, 1))
def layer_tensor(x, p):
    return layer(gshard.split(x, 0, "x"), megatron(p))


@CASES.add(GRID, X, LAYER, gradient=(0, 1))
def layer_sequence(x, p):
    """Heads and hidden units inside, the sequence between."""
    p = megatron(p)
    x = gshard.shard(x, P("x", "y"))
    x = gshard.shard(x + attention(norm(x), p["attention"]), P("x", "y"))
    return gshard.shard(x + feed_forward(norm(x), p["w1"], p["w2"]), P("x", "y"))


@CASES.add(GRID, X, LAYER, gradient=(1,))
def layer_two_dimensional(x, p):
    heads = {name: gshard.shard(p["attention"][name], P("x", "y")) for name in "qkv"}
    heads["o"] = gshard.shard(p["attention"]["o"], P("y", None, "x"))
    p = {"attention": heads, "w1": gshard.shard(p["w1"], P("x", "y")), "w2": gshard.shard(p["w2"], P("y", "x"))}
    return gshard.shard(layer(gshard.shard(x, P("x", None, "y")), p), P("x", None, "y"))
