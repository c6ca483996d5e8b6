"""Trains a small decoder, exports prefill and decoding for eight devices, and serves them in a process without gshard.

The vocabulary, the heads and the hidden units are split over eight devices. Sampling (top-k, then top-p) is written for
the whole vocabulary; gshard sends 64 candidates of each device, not the scores. The server is ``load`` and ``serve``:
they need JAX and flatbuffers. The text is the language reference that Python's ``help`` shows.

    python examples/serve_exported.py               trains, exports, and starts the server as another process
    python examples/serve_exported.py model.zip     the server
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import json
import sys
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

LAYERS, WIDTH, HEADS, LENGTH, WORDS = 2, 128, 8, 64, 4096


def load(path, batch):
    """The program of a file that ``gshard.export`` wrote for this batch, and the shardings of its arguments."""
    with zipfile.ZipFile(path) as archive:
        for about in json.loads(archive.read("programs.json"))["programs"]:
            program = export.deserialize(bytearray(archive.read(about["file"])))
            if jax.tree.unflatten(program.in_tree, program.in_avals)[0][2].shape[0] == batch:
                break
    names, sizes = tuple(about["mesh"]), tuple(about["mesh"].values())
    mesh = jax.make_mesh(sizes, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))
    shardings, _ = jax.tree.unflatten(program.in_tree, program.in_shardings_jax(mesh))
    results = jax.tree.unflatten(program.out_tree, program.out_shardings_jax(mesh))
    donated = about["donate_argnums"]
    return jax.jit(program.call, in_shardings=shardings, out_shardings=results, donate_argnums=donated), shardings


def serve(folder, prompts, words=24):
    """Continues prompts, rows of words of the same length."""
    batch, start = prompts.shape
    prefill, (to_weights, to_cache, *_) = load(f"{folder}/prefill.zip", batch)
    decode, _ = load(f"{folder}/decode.zip", batch)
    with np.load(f"{folder}/weights.npz") as saved:
        weights = jax.device_put({name: saved[name] for name in saved}, to_weights)
    cache = jax.device_put(jnp.zeros((2, LAYERS, batch, LENGTH, HEADS, WIDTH // HEADS)), to_cache)
    keys = jax.random.split(jax.random.key(1), words)
    chosen, cache = prefill(weights, cache, prompts, keys[0])
    made = [chosen]
    for i in range(1, words):
        chosen, cache = decode(weights, cache, chosen, jnp.int32(start + i - 1), keys[i])
        made.append(chosen)
    return np.concatenate(made, 1)


# The model, as for one device.


def forward(weights, cache, words, start):
    """Scores of the word after each of ``words``, [batch, new], and the keys and values of all words so far."""
    x = weights["embed"][words] + jax.lax.dynamic_slice_in_dim(weights["places"], start, words.shape[1])
    seen = jnp.arange(LENGTH)[None, :] <= start + jnp.arange(words.shape[1])[:, None]

    def norm(x):
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)

    def layer(x, own):
        w, kept = own
        q, k, v = jnp.einsum("bnd,dchk->cbnhk", norm(x), w["qkv"])
        kept = jax.lax.dynamic_update_slice_in_dim(kept, jnp.stack([k, v]), start, 2)
        scores = jnp.einsum("bnhk,blhk->bhnl", q, kept[0]) * (WIDTH // HEADS) ** -0.5
        mixed = jnp.einsum("bhnl,blhk->bnhk", jax.nn.softmax(jnp.where(seen, scores, -1e30)), kept[1])
        x = x + jnp.einsum("bnhk,hkd->bnd", mixed, w["out"])
        return x + jax.nn.gelu(norm(x) @ w["up"]) @ w["down"], kept

    layers = {name: weights[name] for name in ("qkv", "out", "up", "down")}
    x, kept = jax.lax.scan(layer, x, (layers, jnp.moveaxis(cache, 0, 1)))
    return norm(x) @ weights["embed"].T, jnp.moveaxis(kept, 1, 0)


def sample(scores, key):
    """One of the 64 best words, [batch, 1], among those that have nine tenths of their probability."""
    best, words = jax.lax.top_k(scores, 64)
    before = jnp.cumsum(jax.nn.softmax(best), -1) - jax.nn.softmax(best)
    chosen = jax.random.categorical(key, jnp.where(before < 0.9, best, -jnp.inf))
    return jnp.take_along_axis(words, chosen[:, None], 1)


def main():
    """Trains, exports and serves."""
    import re
    import subprocess
    import tempfile
    from pydoc_data.topics import topics

    import optax

    import gshard

    pieces = re.findall(r"\w+|\s+|[^\w\s]", " ".join(topics.values()))
    words, counts = np.unique(pieces, return_counts=True)
    words = words[np.argsort(-counts)][:WORDS]
    number = {word: i for i, word in enumerate(words)}
    text = np.array([number[piece] for piece in pieces if piece in number], "int32")
    split_at = {"embed": 0, "qkv": 3, "out": 1, "up": 2, "down": 1}

    def init(key):
        shapes = {
            "embed": (WORDS, WIDTH), "places": (LENGTH, WIDTH), "qkv": (LAYERS, WIDTH, 3, HEADS, WIDTH // HEADS),
            "out": (LAYERS, HEADS, WIDTH // HEADS, WIDTH), "up": (LAYERS, WIDTH, 4 * WIDTH),
            "down": (LAYERS, 4 * WIDTH, WIDTH),
        }  # fmt: skip
        keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))
        return marked({name: 0.05 * jax.random.normal(keys[name], shape) for name, shape in shapes.items()})

    def marked(weights):
        return {
            name: gshard.split(w, split_at[name], "model") if name in split_at else w for name, w in weights.items()
        }

    def empty(batch):
        return gshard.split(jnp.zeros((2, LAYERS, batch, LENGTH, HEADS, WIDTH // HEADS)), 4, "model")

    adam = optax.adam(1e-2)

    def loss(weights, rows):
        scores, _ = forward(marked(weights), empty(len(rows)), rows[:, :-1], 0)
        return optax.softmax_cross_entropy_with_integer_labels(scores, rows[:, 1:]).mean()

    def train(weights, moments, rows):
        value, gradients = jax.value_and_grad(loss)(weights, rows)
        updates, moments = adam.update(gradients, moments)
        return marked(optax.apply_updates(weights, updates)), moments, value

    def prefill(weights, cache, prompts, key):
        scores, cache = forward(marked(weights), gshard.split(cache, 4, "model"), prompts, 0)
        return sample(scores[:, -1], key), cache

    def decode(weights, cache, chosen, at, key):
        scores, cache = forward(marked(weights), gshard.split(cache, 4, "model"), chosen, at)
        return sample(scores[:, -1], key), cache

    mesh = {"model": 8}
    weights = gshard.jit(init, mesh=mesh)(jax.random.key(0))
    moments, step = gshard.jit(adam.init, mesh=mesh)(weights), gshard.jit(train, mesh=mesh, donate_argnums=(0, 1))
    rng = np.random.default_rng(0)
    for i in range(60):
        starts = rng.integers(0, len(text) - LENGTH - 1, 16)
        weights, moments, value = step(weights, moments, np.stack([text[s : s + LENGTH + 1] for s in starts]))
        if i % 20 == 0:
            print(f"step {i}: loss {value:.2f}")
    print(f"step 59: loss {value:.2f}")

    folder, array = tempfile.mkdtemp(), jax.ShapeDtypeStruct
    np.savez(f"{folder}/weights.npz", **weights)
    key, number_type = jax.random.key(0), array((), "int32")

    def arguments(batch, new):
        cache = array((2, LAYERS, batch, LENGTH, HEADS, WIDTH // HEADS), "float32")
        return weights, cache, array((batch, new), "int32")

    jitted = [gshard.jit(f, mesh=mesh, donate_argnames="cache") for f in (prefill, decode)]
    gshard.export(jitted[0], *arguments(1, 8), key, to=f"{folder}/prefill.zip", also=[(*arguments(4, 8), key)])
    one, four = ((*arguments(batch, 1), number_type, key) for batch in (1, 4))
    gshard.export(jitted[1], *one, to=f"{folder}/decode.zip", also=[four])
    print(gshard.explain(jitted[1], *four))

    prompts = np.stack([text[s : s + 8] for s in rng.integers(0, len(text) - 8, 4)])
    np.save(f"{folder}/prompts.npy", prompts)
    subprocess.run([sys.executable, __file__, folder], check=True)
    served = np.load(f"{folder}/served.npy")
    for row in np.concatenate([prompts, served], 1):
        print(repr("".join(words[row])))

    # The same words come from gshard itself, and from one device.
    for run in (jitted, [jax.jit(f) for f in (prefill, decode)]):
        keys = jax.random.split(jax.random.key(1), served.shape[1])
        cache = jnp.zeros(arguments(4, 8)[1].shape)
        chosen, cache = run[0](weights, cache, prompts, keys[0])
        made = [chosen]
        for i in range(1, len(keys)):
            chosen, cache = run[1](weights, cache, chosen, jnp.int32(8 + i - 1), keys[i])
            made.append(chosen)
        assert (np.concatenate(made, 1) == served).all()
    sends = gshard.explain(jitted[1], *four).total_bytes
    assert sends < 64 * 1024


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    else:
        sys.modules["gshard"] = None  # the server has no gshard
        np.save(f"{sys.argv[1]}/served.npy", serve(sys.argv[1], np.load(f"{sys.argv[1]}/prompts.npy")))
