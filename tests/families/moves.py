"""Moves: from one sharding to another, and slices, pads, joins and reshapes of dimensions that are split."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import gshard
from families.case import CUBE, GRID, LINE, Family

CASES = Family("moves")

BOX, X = (32, 16, 64), (256, 64)


def reshard(name, mesh, source, target, shape=BOX):
    """Adds the move from one sharding to another."""

    @CASES.add(mesh, shape, name=f"reshard_{name}")
    def program(x):
        return gshard.shard(jnp.tanh(gshard.shard(x, source)), target)


reshard("jax_21562", GRID, P("y", None, "x"), P(None, ("x", "y"), None))
reshard("transpose", GRID, P("x", "y"), P("y", "x"))
reshard("one_to_other", LINE, P("x"), P(None, "x"))
reshard("order_of_axes", GRID, P(("x", "y")), P(("y", "x")))
reshard("gather_one", GRID, P("x", "y"), P("x"))
reshard("trade", GRID, P("x", None, "y"), P(None, "x", "y"))
reshard("merge", GRID, P("x", "y"), P(("x", "y")))
reshard("unmerge", GRID, P(("x", "y")), P("x", None, "y"))
reshard("rotate", CUBE, P("x", "y", "z"), P("z", "x", "y"))
reshard("spread", CUBE, P(("x", "y", "z")), P("z", "y", "x"))
reshard("split_further", GRID, P("x"), P("x", "y"))
reshard("uneven", LINE, P("x"), P(None, "x"), (30, 50))


@CASES.add(LINE, X, gradient=(0,))
def slice_inner(x):
    """All rows but the first and the last few."""
    return gshard.split(x, 0, "x")[3:251]


@CASES.add(LINE, X, gradient=(0,))
def differences(x):
    x = gshard.split(x, 0, "x")
    return x[1:] - x[:-1]


@CASES.add(LINE, X, gradient=(0,))
def every_second(x):
    return gshard.split(gshard.split(x, 0, "x")[::2], 0, "x")


@CASES.add(LINE, X)
def first_rows(x):
    return gshard.split(x, 0, "x")[:8]


@CASES.add(LINE, X)
def one_row(x):
    return gshard.split(x, 0, "x")[100]


@CASES.add(LINE, X, gradient=(0,))
def pad(x):
    return gshard.split(jnp.pad(gshard.split(x, 0, "x"), ((4, 4), (0, 0))), 0, "x")


@CASES.add(LINE, X, X, gradient=(0, 1))
def concatenate(x, y):
    x, y = gshard.split(x, 0, "x"), gshard.split(y, 0, "x")
    return gshard.split(jnp.concatenate([x, y]), 0, "x")


@CASES.add(LINE, X, X)
def concatenate_across(x, y):
    return jnp.concatenate([gshard.split(x, 0, "x"), gshard.split(y, 0, "x")], 1)


@CASES.add(LINE, X)
def reverse(x):
    return gshard.split(x, 0, "x")[::-1]


@CASES.add(LINE, X, gradient=(0,))
def roll(x):
    return jnp.roll(gshard.split(x, 0, "x"), 5, 0)


@CASES.add(LINE, X)
def roll_by_parts(x):
    """By exactly one device."""
    return jnp.roll(gshard.split(x, 0, "x"), 32, 0)


@CASES.add(LINE, X)
def laplacian(x):
    """Neighbours in both dimensions, around the edges: one exchange of a row each way."""
    x = gshard.split(x, 0, "x")
    return jnp.roll(x, 1, 0) + jnp.roll(x, -1, 0) + jnp.roll(x, 1, 1) + jnp.roll(x, -1, 1) - 4 * x


@CASES.add(LINE, X, gradient=(0,))
def reshape_major(x):
    return gshard.split(x, 0, "x").reshape(16, 16, 64)


@CASES.add(LINE, (16, 16, 64))
def reshape_merge_minor(x):
    return gshard.split(x, 1, "x").reshape(256, 64)


@CASES.add(LINE, (240, 64))
def reshape_across(x):
    """Parts of 30 rows become parts of 20, 3 x 80."""
    return jnp.tanh(gshard.split(x, 0, "x").reshape(3, 80, 64))


@CASES.add(LINE, (8, 32, 64))
def reshape_small_major(x):
    return gshard.split(gshard.split(x, 0, "x").reshape(4, 64, 64), 1, "x")


@CASES.add(LINE, X)
def transpose(x):
    return gshard.split(gshard.split(x, 0, "x").T, 0, "x")


@CASES.add(LINE, X)
def tile(x):
    return jnp.tile(gshard.split(x, 0, "x"), (2, 1))


@CASES.add(LINE, X)
def repeat(x):
    return jnp.repeat(gshard.split(x, 0, "x"), 2, axis=0)


@CASES.add(LINE, X)
def halves(x):
    """The two halves of a split dimension, one gating the other."""
    a, b = jnp.split(gshard.split(x, 0, "x"), 2)
    return a * jax.nn.sigmoid(b)


@CASES.add(LINE, (64, 256))
def halves_of_columns(x):
    a, b = jnp.split(gshard.split(x, 1, "x"), 2, 1)
    return gshard.split(a * jax.nn.sigmoid(b), 1, "x")
