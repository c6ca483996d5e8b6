"""The law of what is permitted: finite parts of a sum that pass an equation add up to what it makes of the sum.

``test_rules_sound.py`` proves each way in ``Rule.finite``, alone and beside a factor that is split. A product has two,
and can take both at once over different axes: the parts of its result are all products of a part of one and a part of
the other.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from gshard.core.mesh import Mesh
from gshard.core.rule import is_valid, operand_sharding, result_sharding
from gshard.testing.rule_checks import Alone, emit, plan_of
from gshard.tracing.permitted import permitted
from gshard.tracing.trace import trace
from harness import rows
from laws.test_rules_sound import the_equation


def test_most_that_is_linear_is_tried():
    equations = [e for r in rows() if (e := the_equation(r.program, r.primitive)) is not None and e.rule is not None]
    names = {e.name for e in equations if set(e.rule.finite) - set(e.rule.linear)}
    assert {"mul", "div", "neg", "dot_general", "conv_general_dilated", "triangular_solve", "fft"} <= names


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
    alone = Alone.of(program, e, arguments)
    text = alone.check(emit(plan_of(alone.program, alone.equation, split, mesh)), split, 0.0)
    assert text == "add over a unreduced add over b unreduced"


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
