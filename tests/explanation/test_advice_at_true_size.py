"""Advice for a training step of the size of real ones: twelve layers written out, AdamW, more than 3,000 equations."""

import time

import jax
import jax.numpy as jnp
import pytest

import gshard
from device.models import f32
from gshard.search.time_budget import TRIAL_SECONDS

LAYERS, WIDTH, HEADS, VOCABULARY, BATCH, TIME = 12, 256, 4, 2048, 64, 128


def norm(x, g):
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6) * g).astype(x.dtype)


def block(p, x, maps):
    b, t, d = x.shape
    h = norm(x, p["ln1"])
    q, k, v = ((h @ p[n].astype(h.dtype)).reshape(b, t, HEADS, d // HEADS) for n in "qkv")
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) / (d // HEADS) ** 0.5
    a = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((t, t), bool)), scores, -1e9), -1)
    maps.append(jnp.sum(a, (0, 1)))
    x = x + jnp.einsum("bhqk,bkhd->bqhd", a.astype(h.dtype), v).reshape(b, t, d) @ p["o"].astype(h.dtype)
    h = norm(x, p["ln2"])
    return x + jax.nn.gelu(h @ p["up"].astype(h.dtype)) @ p["down"].astype(h.dtype)


def step_of(mark, sharded):
    def loss(p, tokens):
        x, maps = p["emb"][tokens].astype(jnp.bfloat16), []
        for i, layer in enumerate(p["layers"]):
            x = block(layer, x, maps)
            x = mark(x) if i == 3 else x
        logits = (norm(x, p["ln"]) @ p["head"].astype(x.dtype)).astype(jnp.float32)
        found = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], -1)
        return -jnp.mean(found), maps

    def step(p, m, v, maps, tokens):
        tokens = gshard.split(tokens, 0, "data")
        if sharded:
            p, m, v = gshard.split((p, m, v), 0, "data")
        g, new = jax.grad(loss, has_aux=True)(p, tokens)
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, g)
        v = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, v, g)
        p = jax.tree.map(lambda p, m, v: p - 1e-3 * (m / (jnp.sqrt(v) + 1e-8) + 0.1 * p), p, m, v)
        return p, m, v, [0.9 * a + 0.1 * b for a, b in zip(maps, new, strict=True)]

    shapes = {"ln1": (WIDTH,), "ln2": (WIDTH,), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    shapes |= dict.fromkeys("qkvo", (WIDTH, WIDTH))
    layers = [{name: f32(*shape) for name, shape in shapes.items()} for _ in range(LAYERS)]
    p = {"emb": f32(VOCABULARY, WIDTH), "head": f32(WIDTH, VOCABULARY), "ln": f32(WIDTH), "layers": layers}
    return step, p, p, p, [f32(TIME, TIME)] * LAYERS, jax.ShapeDtypeStruct((BATCH, TIME), "int32")


@pytest.mark.slow
def test_a_left_over_mark_is_found_in_a_large_step_within_seconds():
    mesh = gshard.Mesh.abstract(data=8)
    found = gshard.explain(*step_of(gshard.replicate, sharded=True), mesh=mesh)
    assert found.equations > 3000
    before = time.process_time()
    verdict = found.verdict("h100:1x8")
    took = time.process_time() - before
    best = verdict.proposal
    without = gshard.explain(*step_of(lambda x: x, sharded=True), mesh=mesh)
    assert best.change.startswith("remove replicate(x) at test_advice_at_true_size.py:")
    assert best.before == found.total_bytes > best.after == without.total_bytes
    assert took < 3 * TRIAL_SECONDS, "trials, and what the verdict takes besides"
    assert "None of them lowers this" not in str(verdict)


@pytest.mark.slow
def test_a_missing_mark_is_found_in_a_large_step():
    """Data parallel: the sums of attention over the batch could stay split, in all layers at once."""
    found = gshard.explain(*step_of(lambda x: x, sharded=False), mesh=gshard.Mesh.abstract(data=8))
    assert found.equations > 3000
    verdict = found.verdict("h100:1x8", seconds=2 * TRIAL_SECONDS)
    assert verdict.trials.tried > 1
    best = verdict.proposal
    assert best.mark.startswith("gshard.shard(x, P(")
    assert best.after < 0.98 * best.before == 0.98 * found.total_bytes
    assert best.costs[1].seconds <= best.costs[0].seconds
