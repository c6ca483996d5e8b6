"""A decoder of current structure, trained on the docstrings of Python's built-in types, on eight devices.

The model has rotary positions, grouped queries, SwiGLU, sigmoid gates, three experts for each token (one of them
shared), and a bias instead of a balancing loss. All-to-alls send tokens to their experts and back; if no token may be
dropped, tokens are gathered.

    python examples/decoder_moe.py
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import builtins
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

import gshard
from gshard import moe

# Bytes are the words: 0 pads, 1 ends a text, byte b is 2 + b.
CONFIG = moe.TransformerConfig.decoder_only(
    258, 2, model_dim=64, hidden_dim=64, heads=4, kv_heads=2, head_dim=16, experts=8, top_k=2, shared_experts=1,
    gates="sigmoid", balance="bias", capacity_factor=4.0, group_size=128, partitions=8,
)  # fmt: skip
ROWS, LENGTH, STEPS, RATE = 16, 64, 80, 1e-2


def docstrings():
    """The docstrings of Python's own types and functions, and of their methods, each with its end."""
    named = [value for name, value in sorted(vars(builtins).items()) if not name.startswith("_")]
    methods = [value for x in named if isinstance(x, type) for _, value in sorted(vars(x).items())]
    texts = dict.fromkeys(doc for x in named + methods if isinstance(doc := getattr(x, "__doc__", None), str))
    return np.concatenate([[*(b + 2 for b in text.encode()), 1] for text in texts])


def loss(config, params, batch):
    return moe.loss(config, params, {"target": batch}, label_smoothing=0.0)


def step(params, moments, batch):
    """Adam, without its corrections for the first steps, and then the bias, which the gradient does not reach."""
    (_, metrics), gradient = jax.value_and_grad(lambda p: loss(CONFIG, p, batch), has_aux=True)(params)
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], gradient)
    second = jax.tree.map(lambda v, g: 0.98 * v + 0.02 * g * g, moments[1], gradient)
    params = jax.tree.map(lambda p, m, v: p - RATE * m / (jnp.sqrt(v) + 1e-6), params, first, second)
    return moe.balanced(params, metrics["load"], rate=0.01), (first, second), metrics


words = docstrings()
order = np.random.default_rng(0)
params = moe.init(CONFIG, jax.random.key(0))
moments = jax.tree.map(jnp.zeros_like, (params, params))
train = gshard.jit(step, mesh=8, donate_argnums=(0, 1))


def batch():
    starts = order.integers(0, len(words) - LENGTH, ROWS)
    return jnp.asarray([words[start : start + LENGTH] for start in starts], jnp.int32)


first = batch()
expected, _ = jax.jit(lambda p, b: loss(CONFIG, p, b))(params, first)
told = gshard.explain(train, params, moments, first)
losses = []
for number in range(STEPS):
    params, moments, metrics = train(params, moments, first if number == 0 else batch())
    losses.append(float(metrics["cross_entropy"]))
    if number % 20 == 0 or number == STEPS - 1:
        print(
            f"step {number:3}: {losses[-1]:.2f} nats a byte, entropy of the load {float(metrics['load_entropy']):.3f}"
        )
assert abs(losses[0] - expected) < 1e-4
assert np.mean(losses[-5:]) < 0.75 * losses[0], losses
assert float(metrics["load_entropy"]) > 0.9

print(f"\n{told}")
# Each layer: to the experts and back, forward, and the same again for the gradients; and one for the table's gradient.
assert sum(row.times for row in told.collectives if row.kind == "all_to_all") >= 4 * CONFIG.moe_layers

dropless = dataclasses.replace(CONFIG, dispatch="ragged_all_to_all", capacity_factor=math.inf)
sent = gshard.explain(lambda p, b: loss(dropless, p, b)[0], params, first, mesh=8).bytes_by_kind
print(f"\nwithout a capacity, forward: {sent}")
# Tokens go to their experts and back; what else is sent are places and counts, a few numbers a token.
assert sent["all_to_all"] > 0.9 * sum(sent.values())
