"""The law: whatever a program of finite numbers is, and wherever its sums may stay in parts, the numbers are the same.

Programs of 5 to 10 random operators on float32 arrays, most of them linear, with random marks: splits, unreduced and
reduced values, over the axes of 2 x 3 devices. They are planned with and without ``finite=True``, and proved.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

from gshard import shard
from gshard.emit.partition import partition
from gshard.planning.propagate import propagate
from gshard.testing.rule_checks import emitted, reported
from gshard.tracing.permitted import permitted
from gshard.tracing.trace import trace
from laws.test_any_program import PHASES, steps
from laws.test_propagate_laws import MESH, assert_right

SIZES = (2, 3, 4, 6)


def pair(f):
    return lambda x, y, n: f(x, y if y.shape == x.shape else x)


def product(x, y, n):
    d = n[0] % x.ndim
    e = next((e for e in range(y.ndim) if y.shape[e] == x.shape[d]), None)
    y, e = (x, d) if e is None else (y, e)
    return lax.dot_general(x, y, (((d,), (e,)), ((), ())))


def summed(x, y, n):
    return x.sum(n[0] % x.ndim) if x.ndim > 1 else lax.cumsum(x)


def looped(x, y, n):
    end, rows = lax.scan(lambda c, row: (c + row * np.float32(2), row - c), jnp.zeros(x.shape[1:]), x)
    return rows if n[0] % 2 else end


def chosen(x, y, n):
    return lax.cond(x.sum() > n[0] % 3, lambda v: v * np.float32(2), lambda v: -v, x)


OPERATORS = (
    pair(lax.add), pair(lax.sub), pair(lax.mul), product, product, summed, summed, looped, chosen,
    lambda x, y, n: -x,
    lambda x, y, n: x * np.float32(n[0] % 5 - 2),
    lambda x, y, n: x / np.float32(-0.5),
    lambda x, y, n: x * y.reshape(-1)[0],
    lambda x, y, n: jnp.maximum(x, np.float32(n[0] % 3 - 1)),
    lambda x, y, n: jnp.where(x > 0, x, -x if n[0] % 2 else np.float32(0)),
    lambda x, y, n: x.T,
    lambda x, y, n: x.reshape(-1),
    lambda x, y, n: jnp.stack([x, x * np.float32(3)], n[0] % (x.ndim + 1)),
    lambda x, y, n: x.astype(jnp.bfloat16).astype(jnp.float32) if n[0] % 2 else jnp.flip(x, 0),
)  # fmt: skip


def marked(x, n):
    """One of several marks, or none: for each axis a dimension, an unreduced value, a reduced one, or nothing."""
    if not n & 1:
        return x
    entries = [P.UNCONSTRAINED if n & 2 else None] * x.ndim
    words = {"unreduced": set(), "reduced": set()}
    for axis, k in (("data", n // 4 % 8), ("model", n // 32 % 8)):
        if k < 4:
            words["unreduced"].add(axis)
        elif k == 4:
            words["reduced"].add(axis)
        elif k < 7 and x.ndim and not isinstance(entries[k % x.ndim], str):
            entries[k % x.ndim] = axis
    return shard(x + np.float32(0), P(*entries, **words))


def program_of(some, count, mark):
    """A program of ``count`` arrays."""

    def program(*arrays):
        values = list(arrays)
        for step in some:
            x, y = (values[n % len(values)] for n in step.choices[:2])
            made = OPERATORS[step.operator % len(OPERATORS)](x, y, step.choices[2:])
            if made.size <= 300 and 0 < made.ndim <= 3:
                values.append(mark(made, step.mark))
        return values[count:][-3:]

    return program


def check(some, shapes, finite):
    arrays = [np.ones(s, np.float32) for s in shapes]
    program = trace(program_of(some, len(shapes), marked), *arrays)
    program = dataclasses.replace(program, block=permitted(program.block, finite=finite), finite=finite)
    spmd = partition(propagate(program, MESH))
    assert emitted(spmd.jaxpr, MESH.atom_sizes) == reported(spmd.collectives)
    assert not any(sharding.unreduced for sharding in spmd.out_shardings)
    assert_right(spmd, program_of(some, len(shapes), lambda x, mark: x), arrays)


programs = st.lists(steps, min_size=5, max_size=10)
all_shapes = st.lists(st.lists(st.sampled_from(SIZES), min_size=1, max_size=2).map(tuple), min_size=1, max_size=3)


@given(programs, all_shapes, st.booleans())
@settings(max_examples=12, phases=PHASES)
def test_any_program_of_finite_numbers(some, shapes, finite):
    check(some, shapes, finite)


@pytest.mark.slow
@given(programs, all_shapes, st.booleans())
@settings(max_examples=150, phases=PHASES)
def test_very_many_programs_of_finite_numbers(some, shapes, finite):
    check(some, shapes, finite)
