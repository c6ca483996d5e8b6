"""Trains a small GPT on real text, from the first step to a checkpoint that another mesh resumes.

The model is Flax NNX, the optimizer AdamW of Optax. The program is written for one device; the table ``SPLITS`` is the
only place that names mesh axes, beside the mark of the batch. It has FSDP over ``data`` and tensor parallelism over
``model``, computes in bfloat16 with weights in float32, accumulates gradients over micro-batches, drops out, saves with
Orbax on eight devices, and resumes on four. The text is the language reference that Python's ``help`` shows.

    python examples/train_gpt.py
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import tempfile
from pathlib import Path
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax import P

import gshard

LAYERS, WIDTH, HEADS, LENGTH, WORDS = 2, 128, 4, 64, 256  # a word is a byte
BATCH, ROUNDS, STEPS, MORE = 32, 2, 24, 4  # sequences of a step, in so many micro-batches


class Block(nnx.Module):
    """Attention and an MLP; weights are float32, and computed with in bfloat16."""

    def __init__(self, rngs):
        how = {"use_bias": False, "dtype": jnp.bfloat16, "rngs": rngs}
        self.before_attention, self.before_mlp = (nnx.RMSNorm(WIDTH, dtype=jnp.bfloat16, rngs=rngs) for _ in range(2))
        self.q, self.k, self.v = (nnx.LinearGeneral(WIDTH, (HEADS, WIDTH // HEADS), **how) for _ in range(3))
        self.out = nnx.LinearGeneral((HEADS, WIDTH // HEADS), WIDTH, axis=(-2, -1), **how)
        self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, **how), nnx.Linear(4 * WIDTH, WIDTH, **how)
        self.dropout = nnx.Dropout(0.1)

    def __call__(self, x, rngs):
        y = self.before_attention(x)
        y = self.out(jax.nn.dot_product_attention(self.q(y), self.k(y), self.v(y), is_causal=True))
        x = x + self.dropout(y, rngs=rngs)
        y = self.down(nnx.gelu(self.up(self.before_mlp(x))))
        return x + self.dropout(y, rngs=rngs)


class GPT(nnx.Module):
    """A decoder; the table of words also computes the scores."""

    def __init__(self, rngs):
        self.words = nnx.Embed(WORDS, WIDTH, dtype=jnp.bfloat16, rngs=rngs)
        self.positions = nnx.Embed(LENGTH, WIDTH, dtype=jnp.bfloat16, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(WIDTH, dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, tokens, rngs):
        x = self.words(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x, rngs)
        return self.words.attend(self.norm(x)).astype(jnp.float32)


SPLITS = {  # of the weights and of AdamW's moments, which have the same paths
    **{f"**/{name}/kernel": P("data", "model") for name in ("q", "k", "v", "up")},  # width, heads or hidden units
    "**/out/kernel": P("model", None, "data"),
    "**/down/kernel": P("model", "data"),
    "**/embedding": P("data"),
}
adamw = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(optax.warmup_cosine_decay_schedule(0, 1e-2, 5, 100), weight_decay=0.01),
)
graphdef, _ = nnx.split(nnx.eval_shape(lambda: GPT(nnx.Rngs(0))))


def created(key):
    """The state before the first step. Each device computes its own part."""
    params = nnx.as_pure(nnx.state(GPT(nnx.Rngs(key))))
    return gshard.shard_by_path({"params": params, "adamw": adamw.init(params), "step": jnp.zeros((), int)}, SPLITS)


def loss(params, tokens, key):
    scores = nnx.merge(graphdef, params)(tokens[:, :-1], nnx.Rngs(dropout=key))
    return optax.softmax_cross_entropy_with_integer_labels(scores, tokens[:, 1:]).mean()


def step(state, tokens):
    """One step of AdamW; tokens are [batch, length + 1]."""
    state, tokens = gshard.shard_by_path(state, SPLITS), gshard.split(tokens, 0, "data")
    rounds = tokens.reshape(-1, ROUNDS, LENGTH + 1).swapaxes(0, 1)  # each device has rows of every round
    keys = jax.random.split(jax.random.fold_in(jax.random.key(1), state["step"]), ROUNDS)

    def accumulate(total, part):
        return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(state["params"], *part)), None

    zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, state["params"])
    total, _ = jax.lax.scan(accumulate, zeros, (rounds, keys))
    value, gradients = jax.tree.map(lambda x: x / ROUNDS, total)
    updates, moments = adamw.update(gradients, state["adamw"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "adamw": moments, "step": state["step"] + 1}, value


text = np.frombuffer("\n".join(topics[name] for name in sorted(topics)).encode(), np.uint8)


def batch(number):
    """The sequences of a step, the same whenever it runs."""
    starts = np.random.default_rng(number).integers(0, len(text) - LENGTH, BATCH)
    return text[starts[:, None] + np.arange(LENGTH + 1)].astype(np.int32)


def trained(train, state, numbers):
    losses = []
    for number in numbers:
        state, value = train(state, batch(number))
        losses.append(float(value))
    return state, losses


eight = gshard.Mesh.of({"data": 4, "model": 2})
train = gshard.jit(step, mesh=eight, donate_argnums=0)
state = gshard.jit(created, mesh=eight)(jax.random.key(0))
print(gshard.explain(train, state, batch(0)))

_, alone = trained(jax.jit(step), jax.device_get(state), range(2))
state, losses = trained(train, state, range(STEPS))
assert np.allclose(losses[:2], alone, rtol=1e-2), "as one device computes them, in bfloat16"
print(f"loss {losses[0]:.3f} at step 0, {losses[-1]:.3f} at step {STEPS - 1}")
assert losses[-1] < 0.6 * losses[0]

# Save on eight devices, and resume on four.
four = gshard.Mesh.of({"data": 2, "model": 2})
fewer = train.on(four)
(elsewhere, _), _ = fewer.lower(state, batch(0)).compile().input_shardings
like = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, elsewhere)
with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(Path(folder) / "state", state)
    checkpointer.wait_until_finished()
    restored = checkpointer.restore(Path(folder) / "state", like)
_, resumed = trained(fewer, restored, range(STEPS, STEPS + MORE))
_, continued = trained(train, state, range(STEPS, STEPS + MORE))
assert np.allclose(resumed, continued, rtol=1e-2), "the same text and dropout, on another mesh"
print(f"loss {resumed[-1]:.3f} at step {STEPS + MORE - 1}, resumed on {four}")
