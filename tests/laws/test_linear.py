"""The law: parts that pass an equation uncombined, as its rule allows, combine to what the equation makes of the whole.

The operands of one way in ``Rule.linear`` come as parts, different on every device and of both signs; the results are
combined afterwards. With and without a factor split as well. Then once more with the worst there is: parts that are
very large where their sum is not, infinities, NaN, zeros of both signs and what is smaller than any normal number, in
the parts and in the operands beside them.
"""

import dataclasses
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from gshard.core.program import Value
from gshard.core.rule import MONOIDS, is_valid, operand_sharding
from gshard.core.sharding import Sharding
from gshard.core.xla_workarounds import AS_WRITTEN
from gshard.emit.partition import partition
from gshard.planning.demands import at_boundary
from gshard.simulator.simulate import simulate
from gshard.tracing.trace import trace
from harness import rows
from laws.test_rules_sound import MESH, _array, parts_of, plan_of, splits_of, the_equation
from sampled import others_slow, sampled_rows

ATOM = "b"  # of 3 devices
PARTS = MESH.atom_sizes[ATOM]


def divided(x, monoid):
    """Parts whose combination is ``x``: no part is, and no two are alike."""
    rng = np.random.default_rng([*x.shape, 11])
    if monoid in ("add", "xor") and x.dtype != np.bool_:
        combine = np.subtract if monoid == "add" else np.bitwise_xor
        parts = [random_like(rng, x) for _ in range(PARTS - 1)]
        rest = x
        for part in parts:
            rest = combine(rest, part).astype(x.dtype)
        return [*parts, rest]
    owner = rng.integers(0, PARTS, x.shape)
    others = {
        "pick": np.zeros_like, "xor": np.zeros_like, "or": np.zeros_like, "and": lambda v: v | ~v, "mul": np.ones_like,
        "max": less, "min": more,
    }  # fmt: skip
    return [np.where(owner == i, x, others[monoid](x)).astype(x.dtype) for i in range(PARTS)]


def less(x):
    return x - 1 if x.dtype.kind == "f" else np.where(x == np.iinfo(x.dtype).min, x, x - 1)


def more(x):
    return x + 1 if x.dtype.kind == "f" else np.where(x == np.iinfo(x.dtype).max, x, x + 1)


def random_like(rng, x):
    if np.issubdtype(x.dtype, np.integer):
        return rng.integers(-5 if x.dtype.kind == "i" else 0, 5, x.shape).astype(x.dtype)
    part = rng.standard_normal(x.shape)
    return (part + 1j * rng.standard_normal(x.shape) if np.iscomplexobj(x) else part).astype(x.dtype)


def fits(monoid, x):
    if x.dtype.kind not in "biufc":  # floats of low precision and keys
        return False
    if monoid == "pick":
        return True
    if monoid in ("and", "or", "xor"):
        return x.dtype.kind in "biu"
    if monoid in ("max", "min"):
        return x.dtype.kind in "iuf" and bool(np.isfinite(x).all() if x.dtype.kind == "f" else True)
    return x.dtype.kind in "iufc" and (x.dtype.kind in "iu" or bool(np.isfinite(x).all()))


LINEAR = [
    (r, e)
    for r in rows()
    if (e := the_equation(r.program, r.primitive)) is not None
    and e.rule is not None
    and e.rule.linear
    and not any(jax.dtypes.issubdtype(v.dtype, jax.dtypes.prng_key) for v in e.inputs if isinstance(v, Value))
]


@pytest.mark.parametrize("row", sampled_rows((r for r, _ in LINEAR), "linear"), ids=lambda row: row.name)
@pytest.mark.one_in(3)
def test_parts_pass(row):
    """What only moves elements lets nine monoids pass: each such row takes three of them, not all the same ones."""
    check_ways(row, every=3 if len(the_equation(row.program, row.primitive).rule.linear) == len(MONOIDS) else 1)


@pytest.mark.slow
@pytest.mark.parametrize("row", [r for r, _ in LINEAR], ids=lambda row: row.name)
def test_parts_pass_in_every_way(row):
    check_ways(row, every=1)


def check_ways(row, every):
    """One in ``every`` of the ways of a row's rule, with and without a factor that is split as well."""
    program = row.program
    equation = the_equation(program, row.primitive)
    given = [*program.captured, *(np.asarray(_array(x)) for x in jax.tree.leaves(row.arguments))]
    whole = dict(zip(program.block.inputs, given, strict=True))
    ways = []
    for k, (monoid, operands) in enumerate(equation.rule.linear):
        values = [equation.inputs[i] for i in sorted(operands)]
        elsewhere = [v for j, v in enumerate(equation.inputs) if j not in operands]
        cut = {v for v in values if isinstance(v, Value) and v in whole and v not in elsewhere}
        if (
            cut
            and all(fits(monoid, whole[v]) for v in cut)
            and not any(isinstance(v, Value) and v not in whole for v in values)
        ):
            ways.append((k, monoid, cut))
    first = zlib.crc32(row.name.encode()) % min(every, max(len(ways), 1))
    base = next((s for s in splits_of(equation, 99) if all(a == ("a",) for a in s.values())), {})
    for k, monoid, cut in ways[first::every]:
        for split in ({-1 - k: (ATOM,)}, {**base, -1 - k: (ATOM,)}):
            if is_valid(equation.rule, split, MESH):
                check(program, equation, split, whole, {v: monoid for v in cut}, row.expected, row.tolerance)


def check(program, equation, split, whole, cut, want, tolerance, *, divide=divided, to_the_bit=False):
    plan = plan_of(program, equation, split)
    placed = {}
    for i, v in enumerate(equation.inputs):
        if v in cut:
            placed[v] = operand_sharding(equation.rule, i, split)
    at = {program.block.inputs.index(v): Sharding(((),) * len(s.dims), s.unreduced) for v, s in placed.items()}
    plan = dataclasses.replace(
        plan, shardings={**plan.shardings, **{program.block.inputs[i]: s for i, s in at.items()}}
    )
    plan = at_boundary(plan)
    entry = tuple(at.get(i, s) for i, s in enumerate(plan.entry))
    spmd = partition(dataclasses.replace(plan, entry=entry))
    (mapped,) = (e for e in spmd.jaxpr.jaxpr.eqns if e.primitive.name == "shard_map")
    places = {var: i for i, var in enumerate(spmd.jaxpr.jaxpr.invars)}
    consts = dict(zip(spmd.jaxpr.jaxpr.constvars, spmd.jaxpr.consts, strict=True))
    stacked = []
    for var in mapped.invars:
        v = program.block.inputs[places[var]] if var in places else None
        if v is None:
            stacked.append([consts[var]] * MESH.size)
        elif v in cut:
            parts = divide(whole[v], cut[v])
            stacked.append([parts[device % PARTS] for device in range(MESH.size)])
        else:
            stacked.append(parts_of(whole[v], spmd.in_shardings[places[var]]))
    results = simulate(mapped.params["jaxpr"], (), MESH.atom_sizes, stacked)
    close = max(tolerance, 3e-5) if any(jnp.issubdtype(w.dtype, jnp.inexact) for w in want) else 0.0
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
    if any(np.asarray(_array(x)).dtype == np.float32 for x in jax.tree.leaves(r.arguments))
    and not any(monoid in ("and", "or", "xor") and len(e.rule.linear) < len(MONOIDS) for monoid, _ in e.rule.linear)
]


@pytest.mark.parametrize("row", others_slow(EXTREME, "extreme"))
@pytest.mark.one_in(3)
def test_the_worst_parts_pass(row):
    program = row.program
    equation = the_equation(program, row.primitive)
    arguments = jax.tree.map(lambda x: worst(np.asarray(_array(x))), row.arguments)
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
            program, equation, {-1 - k: (ATOM,)}, whole, dict.fromkeys(values, monoid), want, row.tolerance,
            divide=worst_parts, to_the_bit=moves,
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
