"""Indexing: slices that start anywhere, gathers and scatters, with what is indexed split."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import gshard
from families.case import GRID, LINE, Family, Whole

CASES = Family("indexing")

X, START = (256, 64), Whole((), 250)


@CASES.add(LINE, X, START)
def dynamic_slice(x, start):
    """Sixteen rows from anywhere; a start too far is moved back."""
    return jax.lax.dynamic_slice_in_dim(gshard.split(x, 0, "x"), start, 16)


@CASES.add(LINE, X, START, gradient=(0,))
def dynamic_slice_beside(x, start):
    return jax.lax.dynamic_slice_in_dim(gshard.split(x, 1, "x"), start, 16)


@CASES.add(LINE, X, (16, 64), START, gradient=(0, 1))
def dynamic_update(x, update, start):
    return jax.lax.dynamic_update_slice_in_dim(gshard.split(x, 0, "x"), update, start, 0)


@CASES.add(LINE, (8, 128, 64), (8, 1, 64), Whole((), 128))
def cache(keys, new, position):
    """A step of decoding: the batch is split, one more key is written."""
    keys, new = gshard.split(keys, 0, "x"), gshard.split(new, 0, "x")
    return jax.lax.dynamic_update_slice_in_dim(keys, new, position, 1)


@CASES.add(LINE, (8, 128, 64), (8, 1, 64), Whole((), 128))
def cache_by_length(keys, new, position):
    """The same with the positions split."""
    return jax.lax.dynamic_update_slice_in_dim(gshard.split(keys, 1, "x"), new, position, 1)


@CASES.add(LINE, X, Whole((512,), 256), gradient=(0,))
def take_rows(x, rows):
    return gshard.split(x, 0, "x")[rows]


@CASES.add(LINE, X, Whole((512,), 256), gradient=(0,))
def take_split_rows(x, rows):
    """Both the table and the indices are split, and so is the result."""
    return gshard.split(gshard.split(x, 0, "x")[gshard.split(rows, 0, "x")], 0, "x")


@CASES.add(LINE, X, Whole((8,), 256))
def take_few_rows(x, rows):
    return gshard.split(x, 0, "x")[rows]


@CASES.add(LINE, (64, 256), Whole((64, 8), 256), gradient=(0,))
def take_along(x, columns):
    """Each row has columns of its own; rows are split."""
    return jnp.take_along_axis(gshard.split(x, 0, "x"), columns, 1)


@CASES.add(LINE, (64, 256), Whole((64, 8), 256))
def take_along_split(x, columns):
    return jnp.take_along_axis(gshard.split(x, 1, "x"), columns, 1)


@CASES.add(LINE, X, Whole((512,), 256), (512, 64), gradient=(0, 2))
def scatter_add(x, rows, updates):
    return gshard.split(x, 0, "x").at[rows].add(updates)


@CASES.add(LINE, X, Whole((512,), 256), (512, 64), gradient=(2,))
def scatter_add_of_batch(x, rows, updates):
    """The updates are split and the array is not."""
    return gshard.replicate(x).at[gshard.split(rows, 0, "x")].add(gshard.split(updates, 0, "x"))


@CASES.add(LINE, X, Whole((512,), 256), (512, 64))
def scatter_max(x, rows, updates):
    return gshard.split(x, 0, "x").at[rows].max(updates)


@CASES.add(LINE, X, (64,))
def set_row(x, row):
    return gshard.split(x, 0, "x").at[100].set(row)


@CASES.add(LINE, X, (100, 64))
def set_rows(x, rows):
    return gshard.split(x, 0, "x").at[40:140].add(rows)


@CASES.add(LINE, (4096, 16), Whole((4096,), 64))
def segment_sum(x, ids):
    return jax.ops.segment_sum(gshard.split(x, 0, "x"), ids, 64)


@CASES.add(GRID, (256, 64), Whole((512,), 256), gradient=(0,))
def take_two_axes(x, rows):
    x = gshard.shard(x, P("y", "x"))
    return gshard.shard(x[rows], P("y", "x"))
