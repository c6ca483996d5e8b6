"""Vocabularies split over devices: embeddings, logits, cross-entropy."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import gshard
from families.case import GRID, LINE, Family, Whole

CASES = Family("vocabulary")

V, B, S, M = 1024, 16, 32, 64
IDS, TABLE, X = Whole((B, S), V), (V, M), (B, S, M)


def cross_entropy(logits, labels):
    picked = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)


@CASES.add(LINE, TABLE, IDS, gradient=(0,))
def embedding(table, ids):
    return gshard.split(table, 0, "x")[ids]


@CASES.add(GRID, TABLE, IDS, gradient=(0,))
def embedding_of_batch(table, ids):
    """The rows over one axis, the batch over the other."""
    return gshard.split(gshard.split(table, 0, "y")[gshard.split(ids, 0, "x")], 0, "x")


@CASES.add(GRID, TABLE, IDS, gradient=(0,))
def embedding_by_columns(table, ids):
    return gshard.split(table, 1, "y")[gshard.split(ids, 0, "x")]


@CASES.add(GRID, TABLE, IDS, gradient=(0,))
def embedding_one_hot(table, ids):
    table = gshard.split(table, 0, "y")
    return gshard.split(jax.nn.one_hot(ids, V) @ table, 0, "x")


@CASES.add(LINE, X, TABLE, IDS, gradient=(0, 1))
def loss(x, table, labels):
    return cross_entropy(jnp.einsum("bsm,vm->bsv", x, gshard.split(table, 0, "x")), labels)


@CASES.add(GRID, X, TABLE, IDS, gradient=(0, 1))
def loss_of_batch(x, table, labels):
    """The vocabulary over one axis, the batch over the other."""
    x = gshard.split(x, 0, "x")
    logits = gshard.shard(jnp.einsum("bsm,vm->bsv", x, gshard.split(table, 0, "y")), P("x", None, "y"))
    return cross_entropy(logits, labels)


@CASES.add(GRID, X, TABLE, IDS, gradient=(0, 1))
def loss_one_hot(x, table, labels):
    logits = jnp.einsum("bsm,vm->bsv", gshard.split(x, 0, "x"), gshard.split(table, 0, "y"))
    return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * jax.nn.one_hot(labels, V), -1))


@CASES.add(GRID, TABLE, IDS, IDS, gradient=(0,))
def tied(table, ids, labels):
    """One table for words in and words out."""
    table = gshard.split(table, 0, "y")
    x = jnp.tanh(gshard.split(table[ids], 0, "x"))
    return cross_entropy(jnp.einsum("bsm,vm->bsv", x, table), labels)
