"""The law of what is permitted: finite parts of a sum that pass an equation add up to what it makes of the sum.

Each way in ``Rule.finite`` is tried with parts of both signs, none of which is the sum: alone, beside a factor that is
split, and where a product has two, both at once over different axes: the parts of its result are all products of a part
of one and a part of the other.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from gshard.core.mesh import Mesh
from gshard.core.rule import is_valid, operand_sharding, result_sharding
from gshard.testing.rule_checks import emit, plan_of, run_on_all
from gshard.tracing.permitted import permitted
from gshard.tracing.trace import trace
from harness import rows
from laws.test_linear import ATOM, check, fits
from laws.test_rules_sound import MESH, _array, the_equation
from laws.test_rules_sound import splits_of as few_splits_of
from sampled import others_slow


def with_permission(row):
    """The program of a row where parts are finite, its equation, and the number of ways that it has without that."""
    program = row.program
    before = the_equation(program, row.primitive)
    program = dataclasses.replace(program, block=permitted(program.block, finite=True), finite=True)
    equation = the_equation(program, row.primitive)
    return program, equation, 0 if before is None or before.rule is None else len(before.rule.linear)


FINITE = [
    r
    for r in rows()
    if (e := the_equation(r.program, r.primitive)) is not None
    and e.rule is not None
    and set(e.rule.finite) - set(e.rule.linear)
]


@pytest.mark.parametrize("row", others_slow(FINITE, "finite"))
@pytest.mark.one_in(3)
def test_finite_parts_pass(row):
    program, equation, first = with_permission(row)
    given = [*program.captured, *(np.asarray(_array(x)) for x in jax.tree.leaves(row.arguments))]
    whole = dict(zip(program.block.inputs, given, strict=True))
    for k, (monoid, operands) in enumerate(equation.rule.linear):
        values = [equation.inputs[i] for i in sorted(operands)]
        elsewhere = [v for j, v in enumerate(equation.inputs) if j not in operands]
        cut = {v for v in values if v in whole and v not in elsewhere}
        if k < first or not cut or not all(fits(monoid, whole[v]) for v in cut):
            continue
        base = next((s for s in few_splits_of(equation, 99) if all(a == ("a",) for a in s.values())), {})
        for split in ({-1 - k: (ATOM,)}, {**base, -1 - k: (ATOM,)}):
            if is_valid(equation.rule, split, MESH):
                check(program, equation, split, whole, {v: monoid for v in cut}, row.expected, max(row.tolerance, 1e-4))


def test_most_that_is_linear_is_tried():
    assert {"mul", "div", "neg", "dot_general", "conv_general_dilated", "triangular_solve", "fft"} <= {
        r.primitive for r in FINITE
    }


X = np.random.default_rng(3).standard_normal((6, 4)).astype(np.float32)
Y = np.random.default_rng(4).standard_normal((6, 4)).astype(np.float32)
PRODUCTS = {
    "mul": (jnp.multiply, (X, Y)),
    "matmul": (lambda x, y: x @ y.T, (X, Y)),
    "batched": (lambda x, y: jnp.einsum("bi,bj->bij", x, y), (X, Y)),
    "half precision": (jnp.multiply, (X.astype(np.float16), Y.astype(np.float16))),
    "complex": (jnp.multiply, (X + 1j * Y, Y - 2j * X)),
    "convolution": (
        lambda x, y: lax.conv(x, y, (1,), "SAME"),
        (X[None], np.stack([Y.T, Y.T + 1])[:, [0, 1, 2, 3, 1, 2], :3]),
    ),
    "integers": (jnp.multiply, ((9 * X).astype(np.int32), (9 * Y).astype(np.int32))),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_of_parts_over_different_axes_is_in_parts_over_both(name):
    f, arguments = PRODUCTS[name]
    mesh = Mesh.abstract(a=2, b=3)
    program = trace(f, *arguments)
    program = dataclasses.replace(program, block=permitted(program.block, finite=True), finite=True)
    (e,) = (e for e in program.block.walk() if e.name in ("mul", "dot_general", "conv_general_dilated"))
    rule = e.rule
    left, right = (rule.linear.index(("add", frozenset({i}))) for i in (0, 1))
    split = {-1 - left: ("a",), -1 - right: ("b",)}
    assert is_valid(rule, split, mesh)
    assert dict(result_sharding(rule, 0, split).unreduced) == {"a": "add", "b": "add"}
    assert [dict(operand_sharding(rule, i, split).unreduced) for i in (0, 1)] == [{"a": "add"}, {"b": "add"}]
    assert not is_valid(rule, {-1 - left: ("a",), -1 - right: ("a",)}, mesh)  # (1 + 2) (3 + 4) is not 1 3 + 2 4
    given = tuple(jnp.asarray(x) for x in (*program.captured, *arguments))
    plan = plan_of(program, e, split, mesh)
    want = np.asarray(f(*arguments))
    close = 1e-2 if want.dtype == np.float16 else 1e-4
    for got in run_on_all(emit(plan), given)[0]:
        assert np.asarray(got).dtype == want.dtype
        np.testing.assert_allclose(np.asarray(got), want, rtol=close, atol=close)


def test_ways_that_a_mark_limits_are_taken_over_its_axes_only():
    program = trace(lambda x, y: x * y, X, Y)
    (e,) = program.block.equations
    way = ("add", frozenset({0}))
    rule = e.rule.permitting([(way, frozenset({"model"}))])
    mesh = Mesh.abstract(data=2, model=4)
    assert is_valid(rule, {-1: ("model.0", "model.1")}, mesh)
    assert is_valid(rule, {-1: ("model.1",)}, mesh)
    assert not is_valid(rule, {-1: ("data",)}, mesh)
    assert not is_valid(rule, {-1: ("data", "model.0")}, mesh)
    assert rule.permitting([(way, None)]) is rule


def test_what_is_not_linear_is_permitted_nothing():
    def ways(f, *arrays):
        (e,) = trace(f, *arrays).block.equations
        return {*e.rule.finite}

    for f in (lax.exp, lax.square, lax.abs, lax.tanh, lax.sign, lax.floor, lambda x: lax.integer_pow(x, 3)):
        assert ways(f, X) == set()
    for f in (lax.max, lax.atan2, lax.rem, lax.pow):
        assert ways(f, X, Y) == set()
    assert ways(lambda x: x * np.inf, X) == ways(lambda x: x / 0.0, X) == set()
    assert ways(lambda x: lax.convert_element_type(x, jnp.bfloat16), X) == set()  # parts would be rounded
    assert ways(lambda x: lax.convert_element_type(x, jnp.float16), X.astype(jnp.bfloat16)) == set()
    assert ways(lambda x: lax.convert_element_type(x, jnp.float32), X.astype(jnp.float16)) == {("add", frozenset({0}))}
    assert ways(lambda x: lax.convert_element_type(x, jnp.float32), X.astype(np.int8)) == set()  # it wraps
    assert ways(jnp.divide, X, Y) == {("add", frozenset({0}))}  # nothing by parts of a sum
    eighths = [X.astype(np.int8), Y.T.astype(np.int8)]
    assert ways(lambda x, y: lax.dot(x, y, preferred_element_type=jnp.int32), *eighths) == set()
