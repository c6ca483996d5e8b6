"""Operations of the user's code pass through a function, each once, and those of JAX's own do not."""

import threading

import jax
import jax.numpy as jnp
import pytest

from gshard.core.jax_adapter_operations import operations_handled

X = jax.ShapeDtypeStruct((4, 4), jnp.float32)


def operations_of(f, *args):
    found = []

    def note(operation, perform):
        found.append(operation)
        return perform()

    with operations_handled(note):
        jax.jit(f).trace(*args)
    return found


def test_each_operation_has_the_expression_that_performs_it():
    def f(x):
        return jax.lax.sin(x) + jax.lax.cos(x)

    found = [o for o in operations_of(f, X) if not o.is_nested]
    assert [o.primitive for o in found] == ["sin", "cos", "jit"]  # a sum is jitted
    with open(__file__, encoding="utf-8") as file:
        lines = file.read().splitlines()
    places = [o.expression for o in found if o.expression is not None]
    texts = [lines[p.line - 1][p.column : p.end_column] for p in places]
    assert texts == ["jax.lax.sin(x)", "jax.lax.cos(x)", "jax.lax.sin(x) + jax.lax.cos(x)"]


def test_derivatives_are_not_operations_of_the_user():
    def f(x):
        return jnp.sum(jax.lax.sin(x))

    def primitives(f):
        return [o.primitive for o in operations_of(f, X) if not o.is_nested]

    assert primitives(f) == primitives(jax.grad(f))


def test_a_function_that_is_traced_already_is_traced_again():
    inner = jax.jit(jax.lax.sin)
    jax.jit(inner).trace(X)
    assert [o.primitive for o in operations_of(inner, X)].count("sin") == 1


def test_operations_inside_of_a_function_of_jax_are_nested():
    found = operations_of(jax.nn.relu, X)
    assert any(o.is_nested for o in found)


def test_results_are_replaced():
    def negated(operation, perform):
        return [jax.lax.neg(x) for x in perform()] if operation.primitive == "sin" else perform()

    with operations_handled(negated):
        jaxpr = jax.jit(jax.lax.sin).trace(X).jaxpr
    assert [e.primitive.name for e in jaxpr.eqns] == ["sin", "neg"]


def test_jax_is_as_before_also_after_an_error():
    before = jax.extend.core.Primitive.bind

    def fail(_, perform):
        raise KeyError("no")

    with operations_handled(fail), pytest.raises(KeyError):
        jax.jit(jax.lax.sin).trace(X)
    assert jax.extend.core.Primitive.bind is before
    assert str(jax.jit(jax.lax.sin).trace(X).jaxpr).count("sin") == 1


def test_other_threads_are_left_alone():
    found = []

    def note(operation, perform):
        found.append(operation.primitive)
        return perform()

    with operations_handled(note):
        other = threading.Thread(target=lambda: jax.jit(jax.lax.cos).trace(X))
        other.start()
        other.join()
        jax.jit(jax.lax.sin).trace(X)
    assert found == ["sin"]


def test_calls_around_an_operation_are_noted():
    def body(x, _):
        return jax.lax.sin(x), None

    def f(x):
        return jax.lax.scan(body, x, None, length=2)[0]

    found = [o for o in operations_of(f, X) if not o.is_nested]
    [sine] = [o for o in found if o.primitive == "sin"]
    [scan] = [o for o in found if o.primitive == "scan"]
    assert scan.expression in sine.around
