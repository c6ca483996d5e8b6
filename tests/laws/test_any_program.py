"""The law: whatever the program and whatever the marks, the partitioned program computes the same bits.

Programs of 5 to 15 random operators on int32 arrays of random sizes (uneven, below the number of parts, 1 and 0), with
random marks in between, are planned, partitioned and simulated on 6 devices. Integers wrap, so every order of adding
gives the same bits. Of float32 arrays most operators are linear, sums may stay in parts, and programs are planned with
and without ``finite=True``.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

from gshard import shard
from gshard.emit.partition import partition
from gshard.planning.propagate import propagate
from gshard.testing.rule_checks import emitted, reported
from gshard.tracing.permitted import permitted
from gshard.tracing.trace import trace
from laws.test_propagate_laws import MESH, assert_right

LARGEST = 600  # elements of an array
PHASES = (Phase.explicit, Phase.generate)  # every smaller program would be compiled anew: shrinking takes many minutes


class Step(NamedTuple):
    """One operator: numbers that choose it, its operands and its parameters, and the mark of its result."""

    operator: int
    choices: tuple[int, ...]
    mark: int


def dim_of(x, n):
    return n % x.ndim


def unary(f):
    def apply(values, n):
        x = values[n[0] % len(values)]
        return f(x if x.ndim else x[None], n[1:])

    return apply


def binary(*functions):
    """One of these, of two arrays of one shape."""

    def apply(values, n):
        x = values[n[0] % len(values)]
        same = [v for v in values if v.shape == x.shape]
        return functions[n[2] % len(functions)](x, same[n[1] % len(same)])

    return apply


def outer(values, n):
    x, y = values[n[0] % len(values)], values[n[1] % len(values)]
    x, y = x.reshape(-1)[:7], y.reshape(-1)[: 3 + n[2] % 9]
    return x[:, None] * y[None, :] if n[3] % 2 else jnp.einsum("i,j->ji", x, y)


def dot(values, n):
    x = values[n[0] % len(values)]
    x = x if x.ndim else x[None]
    d = dim_of(x, n[1])
    partners = [(v, e) for v in (*values, x) for e in range(v.ndim) if v.shape[e] == x.shape[d]]
    y, e = partners[n[2] % len(partners)]
    return lax.dot_general(x, y, (((d,), (e,)), ((), ())), preferred_element_type=x.dtype)


def reduced(x, n):
    return (
        (jnp.sum, jnp.prod, jnp.argmax, lambda v, axis: jnp.max(v, axis, initial=-7))[n[1] % 4](
            x, axis=dim_of(x, n[0])
        ).astype(jnp.int32)
        if x.shape[dim_of(x, n[0])]
        else jnp.sum(x, dim_of(x, n[0]))
    )


def regrouped(x, n):
    if n[0] % 3 == 0:
        return x.reshape(-1)
    for k in (2, 3, 4, 5):
        d = dim_of(x, n[1])
        if x.shape[d] and x.shape[d] % k == 0:
            return x.reshape(*x.shape[:d], k, x.shape[d] // k, *x.shape[d + 1 :])
    return x.reshape(x.shape[0], -1) if x.size else x


def cut(x, n):
    d = dim_of(x, n[0])
    size = x.shape[d]
    start = n[1] % (size + 1)
    return lax.slice_in_dim(x, start, start + n[2] % (size - start + 1), stride=1 + n[3] % 3, axis=d)


def padded(x, n):
    d = dim_of(x, n[0])
    low, high, inner = n[1] % 4 - 1, n[2] % 4 - 1, n[3] % 2
    if x.shape[d] + low + high + max(x.shape[d] - 1, 0) * inner < 0:
        return x
    return lax.pad(x, np.int32(n[1] % 9), [(low, high, inner) if i == d else (0, 0, 0) for i in range(x.ndim)])


def joined(x, n):
    return jnp.concatenate([x, -x[..., : n[1] % 3], x], axis=dim_of(x, n[0]) if n[1] % 3 > x.shape[-1] else -1)


def running(x, n):
    return (lax.cumsum, lax.cumprod, lax.cummax, lax.cummin)[n[1] % 4](x, dim_of(x, n[0]), reverse=bool(n[2] % 2))


def ordered(x, n):
    d = dim_of(x, n[0])
    return (jnp.sort(x, d), jnp.argsort(x, d).astype(jnp.int32), jnp.flip(x, d), jnp.roll(x, n[1] % 5 - 2, d))[n[2] % 4]


def looked_up(x, n):
    d = dim_of(x, n[0])
    at = jnp.arange(n[1] % 9, dtype=jnp.int32) * (n[2] % 5) - 2
    return jnp.take(x, at, axis=d, mode=("clip", "fill", "wrap")[n[3] % 3]) if x.shape[d] else x


def scattered(x, n):
    at = jnp.arange(1 + n[1] % 7, dtype=jnp.int32) * (1 + n[2] % 4) - 1
    x = jnp.moveaxis(x, dim_of(x, n[0]), 0)
    return (x.at[at].add(3), x.at[at].max(5), x.at[at].mul(-2), x.at[at[:1]].set(8))[n[3] % 4]


def window(x, n):
    d = dim_of(x, n[0])
    if not x.shape[d]:
        return x
    size = 1 + n[1] % x.shape[d]
    start = jnp.sum(x) % (x.shape[d] + 3) - 2
    part = lax.dynamic_slice_in_dim(x, start, size, d)
    return part if n[2] % 2 else lax.dynamic_update_slice_in_dim(x, part * 2, start + 1, d)


def looped(x, n):
    if not x.shape[0]:
        return x
    carry = jnp.zeros(x.shape[1:], jnp.int32) + 1

    def body(c, row):
        c = c * 3 + row
        return c, c - row

    end, rows = lax.scan(body, carry, x, reverse=bool(n[0] % 2))
    return rows if n[1] % 2 else end


def chosen(x, n):
    return lax.cond(jnp.sum(x) % 2 == n[0] % 2, lambda v: v * 2, lambda v: jnp.flip(v, 0), x)


def scaled(values, n):
    return values[n[0] % len(values)] * values[n[1] % len(values)].reshape(-1)[0]


def looped_linearly(x, n):
    end, rows = lax.scan(lambda c, row: (c + row * np.float32(2), row - c), jnp.zeros(x.shape[1:]), x)
    return rows if n[0] % 2 else end


INTEGERS = (
    binary(lax.add, lax.sub, lax.mul, lax.max, lax.min, lambda a, b: jnp.where(a > b, a, -b)), outer, dot,
    *map(unary, (
        reduced, regrouped, cut, padded, joined, running, ordered, looked_up, scattered, window, looped, chosen,
        lambda x, n: jnp.transpose(x, np.random.default_rng(n[0]).permutation(x.ndim)),
        lambda x, n: jnp.broadcast_to(x, (1 + n[0] % 3, *x.shape)),
    )),
)  # fmt: skip
FLOATS = (
    *[binary(lax.add, lax.sub, lax.mul)] * 3, dot, dot, scaled,
    *map(unary, (
        *[lambda x, n: x.sum(n[0] % x.ndim) if x.ndim > 1 else lax.cumsum(x)] * 2, looped_linearly, looped_linearly,
        lambda x, n: lax.cond(x.sum() > n[0] % 3, lambda v: v * np.float32(2), lambda v: -v, x),
        lambda x, n: -x,
        lambda x, n: x * np.float32(n[0] % 5 - 2),
        lambda x, n: x / np.float32(-0.5),
        lambda x, n: jnp.maximum(x, np.float32(n[0] % 3 - 1)),
        lambda x, n: jnp.where(x > 0, x, -x if n[0] % 2 else np.float32(0)),
        lambda x, n: x.T,
        lambda x, n: x.reshape(-1),
        lambda x, n: jnp.stack([x, x * np.float32(3)], n[0] % (x.ndim + 1)),
        lambda x, n: x.astype(jnp.bfloat16).astype(jnp.float32) if n[0] % 2 else jnp.flip(x, 0),
    )),
)  # fmt: skip


def marked(x, n):
    """One of several marks, or none; on a new value, since an operator may return its operand with its mark."""
    entries = [P.UNCONSTRAINED if n & 1 else None] * x.ndim
    for axis, k in (("data", n // 4), ("model", n // 64)):
        if x.ndim and k % 3:
            d = k // 3 % x.ndim
            entries[d] = (entries[d], axis) if isinstance(entries[d], str) else axis
    return shard(x + 0, P(*entries)) if n & 2 else x


def marked_in_parts(x, n):
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


class Kind(NamedTuple):
    """A type of numbers, with the operators and the marks of its programs."""

    dtype: Any
    operators: tuple[Callable[..., Any], ...]
    marked: Callable[..., Any]


WHOLE, FINITE = Kind(np.int32, INTEGERS, marked), Kind(np.float32, FLOATS, marked_in_parts)


def program_of(steps, shapes, kind, with_marks, late=False):
    """The program; with ``late`` every value is read once more at the end."""

    def program(*arrays):
        values = list(arrays)
        for step in steps:
            made = kind.operators[step.operator % len(kind.operators)](values, step.choices)
            if made.size > LARGEST or made.ndim > 4:
                continue
            values.append(kind.marked(made, step.mark) if with_marks else made)
        results = values[len(shapes) :][-4:]
        return results + [jnp.sum(v * 3 + 1) for v in values] if late else results

    return program


def shapes_of(sizes, dims):
    """Shapes of up to three arrays."""
    return st.lists(st.lists(st.sampled_from(sizes), min_size=1, max_size=dims).map(tuple), min_size=1, max_size=3)


steps = st.builds(
    Step, st.integers(0, 99), st.tuples(*[st.integers(0, 999)] * 6), st.integers(0, 4095)
)  # fmt: skip
programs = st.lists(steps, min_size=5, max_size=15)
all_shapes = shapes_of([1, 2, 3, 4, 5, 6, 7, 8, 12, 0], 3)
finite_programs = st.lists(steps, min_size=5, max_size=10), shapes_of([2, 3, 4, 6], 2), st.booleans()


def check(steps, shapes, change=None, kind=WHOLE, finite=False):
    late = change is not None
    arrays = [np.random.default_rng([i, *s]).integers(-9, 9, s).astype(kind.dtype) for i, s in enumerate(shapes)]
    program = trace(program_of(steps, shapes, kind, True, late), *arrays)
    program = dataclasses.replace(program, block=permitted(program.block, finite=finite), finite=finite)
    spmd = partition(propagate(program, MESH))
    if change is not None:
        spmd = change(spmd)
    assert emitted(spmd.jaxpr, MESH.atom_sizes) == reported(spmd.collectives)
    assert not any(sharding.unreduced for sharding in spmd.out_shardings)
    assert_right(spmd, program_of(steps, shapes, kind, False, late), arrays)


@given(programs, all_shapes)
@settings(max_examples=15, phases=PHASES)
def test_any_program(steps, shapes):
    check(steps, shapes)


@given(*finite_programs)
@settings(max_examples=12, phases=PHASES)
def test_any_program_of_finite_numbers(steps, shapes, finite):
    check(steps, shapes, None, FINITE, finite)


@pytest.mark.slow
@pytest.mark.quick
@given(st.lists(steps, min_size=1, max_size=3), all_shapes)
@settings(max_examples=100, phases=PHASES)
def test_a_hundred_small_programs(steps, shapes):
    check(steps, shapes)


@pytest.mark.slow
@given(programs, all_shapes)
@settings(max_examples=600, phases=PHASES)
def test_very_many_programs(steps, shapes):
    check(steps, shapes)


@pytest.mark.slow
@given(*finite_programs)
@settings(max_examples=150, phases=PHASES)
def test_very_many_programs_of_finite_numbers(steps, shapes, finite):
    check(steps, shapes, None, FINITE, finite)
