"""Weights of a step with few tokens: embeddings, experts, adapters, quantised products, and a whole step."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from families.case import GRID, LINE, Family, Whole, on
from serving_programs.attention import gqa

CASES = Family("weights")

B, M, F, V = 16, 512, 1536, 32_768
X = (B, M)


def embedding(table, tokens):
    return table[tokens]


TABLE, TOKENS = (V, M), Whole((B,), V)
CASES.add(LINE, on(TABLE, "x"), TOKENS, results=P())(embedding)
CASES.add(LINE, on(TABLE, None, "x"), TOKENS, results=P(), name="embedding_by_columns")(embedding)
CASES.add(GRID, on(TABLE, "y"), on(TOKENS, "x"), results=P("x"), name="embedding_of_batch")(embedding)


@CASES.add(LINE, on(Whole(TABLE, 128, "int8", -127), "x"), on((V,), "x"), TOKENS, results=P())
def embedding_int8(table, scales, tokens):
    return table[tokens].astype(jnp.float32) * scales[tokens][:, None]


E, K = 16, 2
GATE, UP, DOWN = (M, E), (E, M, F // 4), (E, F // 4, M)


def routed(x, gate):
    shares, ids = lax.top_k(jax.nn.softmax(x @ gate), K)
    return shares / shares.sum(-1, keepdims=True), ids


def experts(x, gate, up, down):
    """Every expert computes every token: few tokens, so weights are what takes time."""
    shares, ids = routed(x, gate)
    weights = jnp.zeros((x.shape[0], E)).at[jnp.arange(x.shape[0])[:, None], ids].set(shares)
    hidden = jax.nn.silu(jnp.einsum("bm,emf->ebf", x, up))
    return jnp.einsum("ebf,efm,be->bm", hidden, down, weights)


def experts_gathered(x, gate, up, down):
    """The weights of the chosen experts, for each token."""
    shares, ids = routed(x, gate)
    hidden = jax.nn.silu(jnp.einsum("bm,bkmf->bkf", x, up[ids]))
    return jnp.einsum("bkf,bkfm,bk->bm", hidden, down[ids], shares)


def experts_sorted(x, gate, up, down):
    """Tokens in the order of their experts."""
    shares, ids = routed(x, gate)
    order = jnp.argsort(ids.reshape(-1), stable=True)
    sizes = jnp.bincount(ids.reshape(-1), length=E)
    hidden = jax.nn.silu(lax.ragged_dot(x[order // K], up, sizes))
    rows = lax.ragged_dot(hidden, down, sizes) * shares.reshape(-1)[order][:, None]
    return jnp.zeros_like(x).at[order // K].add(rows)


CASES.add(LINE, X, GATE, on(UP, "x"), on(DOWN, "x"), results=P())(experts)
CASES.add(
    GRID, on(X, "x"), GATE, on(UP, "x", None, "y"), on(DOWN, "x", "y"), results=P("x"), name="experts_of_both"
)(experts)  # fmt: skip
CASES.add(LINE, (4, M), GATE, on(UP, "x"), on(DOWN, "x"), results=P(), name="experts_gathered_of_four")(
    experts_gathered
)
CASES.add(
    LINE, X, GATE, on(UP, None, None, "x"), on(DOWN, None, "x"), results=P(), name="experts_gathered_by_hidden"
)(experts_gathered)  # fmt: skip
CASES.add(LINE, X, GATE, on(UP, "x"), on(DOWN, "x"), results=P())(experts_sorted)

N, R = 24, 16  # adapters and their rank


def adapters(x, w, a, b, ids):
    """A product with an adapter for each request."""
    return x @ w + jnp.einsum("br,brf->bf", jnp.einsum("bm,bmr->br", x, a[ids]), b[ids])


IDS = Whole((B,), N)
CASES.add(
    LINE, X, on((M, F), None, "x"), (N, M, R), on((N, R, F), None, None, "x"), IDS, results=P(None, "x"),
    name="adapters_by_columns",
)(adapters)  # fmt: skip
CASES.add(
    LINE, on(X, None, "x"), on((M, F), "x"), on((N, M, R), None, "x"), (N, R, F), IDS, results=P(),
    name="adapters_by_rows",
)(adapters)  # fmt: skip
CASES.add(
    LINE, X, on((M, F), None, "x"), on((N, M, R), "x"), on((N, R, F), "x"), IDS, results=P(None, "x"),
    name="adapters_split",
)(adapters)  # fmt: skip


def int8(x, w, scales):
    """Small integers with a scale for each column."""
    return x @ w.astype(x.dtype) * scales


WHOLE = Whole((M, F), 128, "int8", -127)
CASES.add(LINE, X, on(WHOLE, None, "x"), on((F,), "x"), results=P(None, "x"), name="int8_by_columns")(int8)
CASES.add(LINE, on(X, None, "x"), on(WHOLE, "x"), (F,), results=P(), name="int8_by_rows")(int8)


@CASES.add(LINE, X, on(WHOLE, None, "x"), on((F,), "x"), results=P(None, "x"))
def int8_of_both(x, w, scales):
    """Activations become small integers too, with a scale for each request."""
    own = jnp.max(jnp.abs(x), -1, keepdims=True) / 127
    small = jnp.round(x / own).astype(jnp.int8)
    return jnp.matmul(small, w, preferred_element_type=jnp.int32) * own * scales


@CASES.add(LINE, on(X, None, "x"), on(Whole((M // 2, F), 256, "uint8"), "x"), on((M // 32, F), "x"), results=P())
def int4_by_rows(x, pairs, scales):
    """Two rows in a byte, and a scale for each 32 rows of a column."""
    nibbles = jnp.stack([pairs & 15, pairs >> 4], 1).astype(jnp.int8) - 8
    own = nibbles.reshape(M // 32, 32, F).astype(x.dtype) * scales[:, None]
    return x @ own.reshape(M, F)


@CASES.add(LINE, X, on(Whole((M, F // 2), 256, "uint8"), None, "x"), on((M // 32, F), None, "x"), results=P(None, "x"))
def int4_by_columns(x, pairs, scales):
    """Two columns in a byte."""
    nibbles = jnp.stack([pairs & 15, pairs >> 4], -1).astype(jnp.int8) - 8
    own = nibbles.reshape(M // 32, 32, F).astype(x.dtype) * scales[:, None]
    return x @ own.reshape(M, F)


HEADS, GROUPS, D, L = 16, 8, 32, 512
CACHE, LENGTHS = (B, L, GROUPS, D), Whole((B,), L)
SIZES = {"q": (M, HEADS, D), "k": (M, GROUPS, D), "v": (M, GROUPS, D), "up": (M, F), "gate": (M, F)}
ROWS = {"o": (HEADS, D, M), "down": (F, M)}


def step(columns, rows, table, keys, values, tokens, lengths):
    """A layer of a model and the next tokens."""
    x = table[tokens]
    q, k, v = (jnp.einsum("bm,mhd->bhd", x, columns[name]) for name in "qkv")
    keys, values = (old.at[jnp.arange(B), lengths].set(new) for old, new in ((keys, k), (values, v)))
    mixed = gqa(q, keys, values, lengths + 1).reshape(B, HEADS, D)
    x = x + jnp.einsum("bhd,hdm->bm", mixed, rows["o"])
    x = x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    x = x + (jax.nn.silu(x @ columns["gate"]) * (x @ columns["up"])) @ rows["down"] / 64
    return jnp.argmax(x @ table.T, -1), keys, values


BY = on(CACHE, "x", None, "y")
CASES.add(
    LINE, on(SIZES, None, "x"), on(ROWS, "x"), on(TABLE, "x"), *[on(CACHE, None, None, "x")] * 2, TOKENS, LENGTHS,
    results=(P(), P(None, None, "x"), P(None, None, "x")),
)(step)  # fmt: skip
CASES.add(
    GRID, on(SIZES, None, "y"), on(ROWS, "y"), on(TABLE, "y"), BY, BY, on(TOKENS, "x"), on(LENGTHS, "x"),
    results=(P("x"), P("x", None, "y"), P("x", None, "y")), name="step_of_both",
)(step)  # fmt: skip
