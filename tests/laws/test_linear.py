"""The law: parts that pass an equation uncombined, as its rule allows, combine to what the equation makes of the whole.

``test_rules_sound.py`` proves it for random parts. Here they are the worst there are, and results are compared to the
bit: parts that are very large where their sum is not, infinities, NaN, zeros of both signs and what is smaller than any
normal number, in the parts and in the operands beside them.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from gshard.core.program import Value
from gshard.core.rule import MONOIDS, operand_sharding
from gshard.emit.partition import partition
from gshard.planning.demands import at_boundary
from gshard.testing.rule_checks import SMALL as MESH
from gshard.testing.rule_checks import plan_of
from gshard.tracing.trace import trace
from harness import AS_WRITTEN, rows
from laws.test_rules_sound import the_equation
from sampled import others_slow
from simulated import simulate

ATOM = "b"  # of 3 devices


LINEAR = [
    (r, e)
    for r in rows()
    if (e := the_equation(r.program, r.primitive)) is not None
    and e.rule is not None
    and e.rule.linear
    and not any(jax.dtypes.issubdtype(v.dtype, jax.dtypes.prng_key) for v in e.inputs if isinstance(v, Value))
]


def check(program, equation, split, whole, cut, want, to_the_bit):
    plan = plan_of(program, equation, split, MESH)
    placed = {v: operand_sharding(equation.rule, i, split) for i, v in enumerate(equation.inputs) if v in cut}
    plan = at_boundary(dataclasses.replace(plan, shardings={**plan.shardings, **placed}))
    entry = tuple(placed.get(v, s) for v, s in zip(program.block.inputs, plan.entry, strict=True))
    spmd = partition(dataclasses.replace(plan, entry=entry))
    (mapped,) = (e for e in spmd.jaxpr.jaxpr.eqns if e.primitive.name == "shard_map")
    stacked = dict(zip(spmd.jaxpr.jaxpr.constvars, ([c] * MESH.size for c in spmd.jaxpr.consts), strict=True))
    for var, v in zip(spmd.jaxpr.jaxpr.invars, program.block.inputs, strict=True):
        parts = worst_parts(whole[v], cut[v]) if v in cut else [whole[v]]
        stacked[var] = [parts[device % len(parts)] for device in range(MESH.size)]
    results = simulate(mapped.params["jaxpr"], MESH.atom_sizes, [stacked[var] for var in mapped.invars])
    close = 1e-4 if any(jnp.issubdtype(w.dtype, jnp.inexact) for w in want) else 0.0
    for result, expected in zip(results, want, strict=True):
        for got in result:
            assert np.asarray(got).dtype == expected.dtype
            np.testing.assert_allclose(got, expected, rtol=close, atol=close, err_msg=f"{equation.rule}; split {split}")
            if to_the_bit:
                # Sums and products take for zero what is smaller than any normal number.
                kept = (expected == 0) | (np.abs(expected) > 1e-37) | (not {"add", "mul"} & {*cut.values()})
                known = ~np.isnan(expected) & kept
                np.testing.assert_array_equal(np.signbit(got)[known], np.signbit(expected)[known])
                np.testing.assert_array_equal(np.asarray(got)[known], expected[known])


HUGE = np.float32(2.0**120)  # what is added up here stays below 2**128
WORST = np.array([np.inf, -0.0, 2.0, 0.0, -3.0, np.nan, 1e-40, -np.inf, -0.0, 0.5, -1e-42], np.float32)


def worst(x):
    """The worst numbers in place of these, if they are floats."""
    return np.resize(WORST, x.shape) if x.dtype == np.float32 else x


def worst_parts(x, monoid):
    """Parts of ``worst`` numbers: those of a sum are huge and cancel, those of an extreme are infinite."""
    none = {"max": -np.inf, "min": np.inf, "pick": 0.0, "mul": 1.0}
    if monoid != "add":
        return [np.full_like(x, none[monoid]), x, np.full_like(x, none[monoid])]
    # Of a zero that is negative all parts are; what is added to an infinity or to NaN does not matter.
    large = np.where(
        np.signbit(x) & (x == 0), np.float32(-0.0), np.where(np.arange(x.size) % 2, HUGE, -HUGE).reshape(x.shape)
    )
    return [large, np.where(large == 0, large, -large), x]


EXTREME = [
    r
    for r, e in LINEAR
    if any(np.asarray(x).dtype == np.float32 for x in jax.tree.leaves(r.arguments))
    and not any(monoid in ("and", "or", "xor") and len(e.rule.linear) < len(MONOIDS) for monoid, _ in e.rule.linear)
]


@pytest.mark.parametrize("row", others_slow(EXTREME, "extreme"))
@pytest.mark.one_in(3)
def test_the_worst_parts_pass(row):
    program = row.program
    equation = the_equation(program, row.primitive)
    arguments = jax.tree.map(lambda x: worst(np.asarray(jnp.asarray(x))), row.arguments)
    given = [*program.captured, *jax.tree.leaves(arguments)]
    whole = dict(zip(program.block.inputs, given, strict=True))
    want = [np.asarray(x) for x in jax.tree.leaves(jax.jit(row.function, compiler_options=AS_WRITTEN)(*arguments))]
    moves = {monoid for monoid, _ in equation.rule.linear} == set(MONOIDS)
    for k, (monoid, operands) in enumerate(equation.rule.linear):
        values = {equation.inputs[i] for i in operands}
        beside = [v for j, v in enumerate(equation.inputs) if j not in operands]
        if monoid in ("and", "or", "xor") or not all(
            v in whole and whole[v].dtype == np.float32 and v not in beside for v in values
        ):
            continue
        check(
            program, equation, {-1 - k: (ATOM,)}, whole, dict.fromkeys(values, monoid), want, moves
        )  # fmt: skip


def test_products_by_what_is_not_known_do_not_pass():
    """Ten times 3e38 is infinite, zero times infinite no number; a half of the least normal number is zero."""

    def ways(f, *dtypes):
        (equation,) = trace(f, *(jnp.ones((4, 4), dtype) for dtype in dtypes)).block.equations
        return {monoid for monoid, _ in equation.rule.linear}

    for dtype in (jnp.float32, jnp.bfloat16, jnp.complex64):
        for f in (jnp.multiply, jnp.divide, jnp.matmul):
            assert ways(f, dtype, dtype) == set()
        assert ways(jnp.add, dtype, dtype) == {"add"}
        assert ways(jnp.negative, dtype) == set()  # the sum of 1 and -1 is 0.0, and so is that of -1 and 1
    for number in (0.0, -0.5, 10.0, np.inf, np.nan, 1e-30, 0.5, 1 / 3):  # a half of what is small may be zero
        assert "add" not in ways(lambda x, c=number: x * c, jnp.float32)
        assert "add" not in ways(lambda x, c=number: x / c, jnp.float32)
    assert "add" in ways(lambda x: x * 1.0, jnp.float32)
    assert "add" in ways(lambda x: x / 1.0, jnp.bfloat16)
    assert ways(jnp.multiply, jnp.int32, jnp.int32) == {"add", "mul"}
    assert ways(jnp.matmul, jnp.int32, jnp.int32) == {"add"}


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float8_e5m2, jnp.float8_e4m3fn])
def test_in_half_precision_nothing_is_added_late(dtype):
    x = jnp.ones((4, 4), dtype)
    functions = [lambda x: lax.add(x, x), lambda x: lax.sub(x, x), lambda x: lax.mul(x, x.dtype.type(0.5)),
                 lambda x: lax.reduce_sum_p.bind(x, axes=(0,), out_sharding=None), lambda x: lax.cumsum(x),
                 lambda x: lax.convert_element_type(x, np.float32)]  # fmt: skip
    for f in functions:
        equation = trace(f, x).block.equations[-1]
        assert "add" not in dict(equation.rule.linear)
    (moved,) = trace(lambda x: x.T, x).block.equations
    assert dict(moved.rule.linear).keys() == set(MONOIDS)


def test_most_ways_are_tried():
    """Rows whose operands cannot be cut are few: the law is not empty."""
    primitives = {r.primitive for r, _ in LINEAR}
    assert {"add", "mul", "sub", "reduce_sum", "reduce_max", "reshape", "select_n", "pad"} <= primitives
    assert len(LINEAR) > 60
    assert len(EXTREME) > 40
