"""Attention of a step and of a chunk of a prompt to caches that are split by heads, batch or length."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from families.case import GRID, LINE, Family, Whole, on

CASES = Family("attention")

B, L, H, G, D = 16, 1024, 32, 8, 64  # queries have H heads, keys and values G
LENGTHS = Whole((B,), L, low=1)


def gqa(q, keys, values, lengths):
    """Grouped queries of one position."""
    q = q.reshape(q.shape[0], keys.shape[2], -1, q.shape[-1])
    scores = jnp.einsum("bgrd,blgd->bgrl", q, keys) / D**0.5
    seen = jnp.arange(keys.shape[1]) < lengths[:, None]
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -1e30))
    return jnp.einsum("bgrl,blgd->bgrd", weights, values).reshape(q.shape[0], -1)


def on_all(shapes, *entries, rest, results, mesh=LINE, name, function=gqa):
    """Adds a program of queries, keys, values and lengths."""
    cache = on(shapes, *entries)
    CASES.add(mesh, rest[0], cache, cache, rest[1], results=results, name=name)(function)


CACHE, Q = (B, L, G, D), (B, H, D)
on_all(CACHE, None, None, "x", rest=(on(Q, None, "x"), LENGTHS), results=P(None, "x"), name="gqa_by_heads")
on_all(CACHE, "x", rest=(on(Q, "x"), on(LENGTHS, "x")), results=P("x"), name="gqa_by_batch")
on_all(CACHE, None, "x", rest=(Q, LENGTHS), results=P(), name="gqa_by_length")
on_all(CACHE, "x", "y", rest=(on(Q, "x"), on(LENGTHS, "x")), results=P("x"), mesh=GRID, name="gqa_by_batch_and_length")
on_all(CACHE, "x", None, "y", rest=(on(Q, "x", "y"), on(LENGTHS, "x")), results=P("x", "y"), mesh=GRID,
       name="gqa_by_batch_and_heads")  # fmt: skip
# Fewer heads of keys than devices, and fewer requests.
on_all((B, L, 2, D), None, None, "x", rest=(on(Q, None, "x"), LENGTHS), results=P(None, "x"), name="gqa_of_two_heads")
on_all((2, L, G, D), "x", "y", rest=(on((2, H, D), "x"), on(Whole((2,), L, low=1), "x")), results=P("x"), mesh=GRID,
       name="gqa_of_two_requests")  # fmt: skip


def paged(q, pages, table, lengths):
    """Keys and values of pages: [pages, 2, page, heads, features]."""
    keys, values = (pages[table, i].reshape(B, -1, *pages.shape[3:]) for i in range(2))
    return gqa(q, keys, values, lengths)


PAGES, TABLE, SHORT = (256, 2, 16, G, D), Whole((B, 16), 256), Whole((B,), 256, low=1)
CASES.add(
    LINE, on(Q, None, "x"), on(PAGES, None, None, None, "x"), TABLE, SHORT, results=P(None, "x"), name="paged_by_heads"
)(paged)
CASES.add(
    GRID, on(Q, "x", "y"), on(PAGES, None, None, None, "y"), on(TABLE, "x"), on(SHORT, "x"), results=P("x", "y"),
    name="paged_by_batch_and_heads",
)(paged)  # fmt: skip


@CASES.add(LINE, on(Q, None, "x"), on(Whole(CACHE, 128, "int8", -127), None, None, "x"), on((B, L, G), None, None, "x"),
           LENGTHS, results=P(None, "x"))  # fmt: skip
def gqa_int8(q, cache, scales, lengths):
    """One cache for both, of small integers."""
    own = cache.astype(jnp.float32) * scales[..., None]
    return gqa(q, own, own, lengths)


R, ROPE = 256, 64  # features of the latent, and those with positions


def mla(q, q_rope, latents, keys_rope, up, down, lengths):
    """Latent attention of one position, its products absorbed: all heads read one latent for each position."""
    inner = jnp.einsum("bhd,hdr->bhr", q, up)
    scores = jnp.einsum("bhr,blr->bhl", inner, latents) + jnp.einsum("bhd,bld->bhl", q_rope, keys_rope)
    seen = jnp.arange(latents.shape[1]) < lengths[:, None]
    weights = jax.nn.softmax(jnp.where(seen[:, None], scores / (D + ROPE) ** 0.5, -1e30))
    return jnp.einsum("bhr,hrd->bhd", jnp.einsum("bhl,blr->bhr", weights, latents), down)


QR, LATENT, KR, UP, DOWN = (B, H, ROPE), (B, L, R), (B, L, ROPE), (H, D, R), (H, R, D)
CASES.add(
    LINE, on(Q, None, "x"), on(QR, None, "x"), LATENT, KR, on(UP, "x"), on(DOWN, "x"), LENGTHS, results=P(None, "x"),
    name="mla_by_heads",
)(mla)  # fmt: skip
CASES.add(
    LINE, on(Q, "x"), on(QR, "x"), on(LATENT, "x"), on(KR, "x"), UP, DOWN, on(LENGTHS, "x"), results=P("x"),
    name="mla_by_batch",
)(mla)  # fmt: skip
CASES.add(
    LINE, Q, QR, on(LATENT, None, "x"), on(KR, None, "x"), UP, DOWN, LENGTHS, results=P(), name="mla_by_length"
)(mla)  # fmt: skip
CASES.add(  # weights by heads, the cache by requests
    LINE, on(Q, None, "x"), on(QR, None, "x"), on(LATENT, "x"), on(KR, "x"), on(UP, "x"), on(DOWN, "x"),
    on(LENGTHS, "x"), results=P(None, "x"), name="mla_heads_and_requests",
)(mla)  # fmt: skip


def chunk(q, keys, values, new_keys, new_values, start):
    """A chunk of a prompt: its keys and values are written, and it attends to all before."""
    keys, values = (
        lax.dynamic_update_slice_in_dim(old, new, start, 0) for old, new in ((keys, new_keys), (values, new_values))
    )
    q = q.reshape(q.shape[0], keys.shape[1], -1, D)
    scores = jnp.einsum("qgrd,lgd->grql", q, keys) / D**0.5
    seen = jnp.arange(keys.shape[0]) <= (start + jnp.arange(q.shape[0]))[:, None]
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e30))
    return jnp.einsum("grql,lgd->qgrd", weights, values).reshape(q.shape[0], -1), keys, values


C, START = 128, Whole((), L - 128)
ONE, PART, PARTS = (L, G, D), (C, G, D), (C, H, D)
for name, q, spec, part, result in (
    ("chunk_by_heads", P(None, "x"), P(None, "x"), P(None, "x"), P(None, "x")),
    ("chunk_by_length", P(), P("x"), P(), P()),
):
    CASES.add(LINE, on(PARTS, *q), *[on(ONE, *spec)] * 2, *[on(PART, *part)] * 2, START, results=(result, spec, spec),
              name=name)(chunk)  # fmt: skip
