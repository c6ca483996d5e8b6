"""Constraints at expressions: the traced function is the one in which the constraint is written."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from gshard.xla_programs.traced_expressions import Constraint, TracedOtherwise, constrained, expressions_of
from xla_programs.advised_steps import mesh_of_devices

P = PartitionSpec
W, X = jax.ShapeDtypeStruct((8, 8), jnp.float32), jax.ShapeDtypeStruct((16, 8), jnp.float32)
Mark = Callable[[Any], Any]


def plain(w, x, mark):
    h = mark(x @ w)
    return jnp.sin(h)


def loop(w, x, mark):
    for _ in range(3):
        x = mark(x @ w)
    return x


def scanned(w, x, mark):
    def body(x, _):
        return mark(x @ w), None

    return jax.lax.scan(body, x, None, length=3)[0]


def recomputed(w, x, mark):
    return jax.checkpoint(lambda x: jnp.sin(mark(x @ w)))(x)


def jitted(w, x, mark):
    layer = jax.jit(lambda x: jnp.sin(mark(x @ w)))
    return layer(layer(x))


def mapped(w, x, mark):
    return jax.vmap(lambda row: mark(jnp.dot(row, w)))(x)


def branch(w, x, mark):
    return jax.lax.cond(x.sum() > 0, lambda x: mark(x @ w), lambda x: x, x)


def own_gradient(w, x, mark):
    @jax.custom_vjp
    def f(x):
        return x

    f.defvjp(lambda x: (x, None), lambda _, g: (g,))
    return mark(f(x)) @ w


def of_library(w, x, mark):
    return mark(jax.nn.gelu(x)) @ w


def with_own_gradient_of_library(w, x, mark):
    return mark(jax.nn.relu(x)) @ w


def einsum(w, x, mark):
    return mark(jnp.einsum("bi,ij,jk->bk", x, w, w))


PROGRAMS = [
    plain, loop, scanned, recomputed, jitted, mapped, branch, own_gradient, of_library, with_own_gradient_of_library,
    einsum,
]  # fmt: skip


def traced(f, mark, *, gradient):
    def whole(w, x):
        return f(w, x, mark)

    function = jax.grad(lambda w, x: (whole(w, x) ** 2).sum()) if gradient else whole
    return jax.jit(function).trace(W, X).jaxpr


def the_one_in(f, expressions):
    """The expression in the call of ``mark``."""
    lines = f.__code__.co_firstlineno, max(line for _, _, line in f.__code__.co_lines() if line)
    inside = [
        e
        for e in expressions
        if lines[0] <= e.place.line <= lines[1] + 3 and e.place.file == __file__ and marked_text(e)
    ]
    assert len(inside) == 1, inside
    return inside[0]


def marked_text(e):
    """Whether ``mark(`` stands in front of an expression."""
    with open(__file__, encoding="utf-8") as file:
        line = file.read().splitlines()[e.place.line - 1]
    return line[: e.place.column].endswith("mark(")


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
def test_it_is_traced_as_if_it_were_written(f, gradient):
    mesh = mesh_of_devices()
    spec = P("model") if f is mapped else P("data", "model")

    def written(x):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    def unmarked(x):
        return x

    expressions, _ = expressions_of(lambda: traced(f, unmarked, gradient=gradient))
    at = the_one_in(f, expressions)
    with constrained([Constraint(at, spec)], mesh) as outcome:
        made = traced(f, unmarked, gradient=gradient)
    assert outcome.is_as_before
    expected = traced(f, written, gradient=gradient)
    assert str(made) == str(expected)
    assert str(made).count("sharding_constraint") > 0


def test_a_constraint_is_removed_or_replaced_as_if_it_were_not_written():
    mesh = mesh_of_devices()

    def program(spec):
        def f(w, x):
            h = x @ w
            if spec is not None:
                h = jax.lax.with_sharding_constraint(h, NamedSharding(mesh, spec))
            return (h**2).sum()

        return jax.jit(jax.grad(f)).trace(W, X).jaxpr

    [own] = [e for e in expressions_of(lambda: program(P("model")))[0] if e.spec is not None]
    assert own.spec == P("model")
    for spec in (None, P("data")):
        with constrained([Constraint(own, spec)], mesh) as outcome:
            made = program(P("model"))
        assert outcome.is_as_before
        assert str(made) == str(program(spec))


def test_a_constraint_of_several_arrays_is_one_expression():
    mesh = mesh_of_devices()

    def f(w, x):
        pair = jax.lax.with_sharding_constraint({"a": x @ w, "b": w @ w}, NamedSharding(mesh, P("data")))
        return pair["a"].sum() + pair["b"].sum()

    [own] = [e for e in expressions_of(lambda: jax.jit(f).trace(W, X))[0] if e.spec is not None]
    assert own.shape is None
    with constrained([Constraint(own, None)], mesh) as outcome:
        assert "sharding_constraint" not in str(jax.jit(f).trace(W, X).jaxpr)
    assert outcome.is_as_before


def test_expressions_read_others():
    expressions, _ = expressions_of(lambda: traced(plain, lambda x: x, gradient=True))
    product = the_one_in(plain, expressions)
    assert [e.primitive for e in expressions if product.place in e.reads] == ["jit"]  # jnp.sin is jitted
    assert (product.shape, product.dtype, product.evaluations) == ((16, 8), "float32", 1)


def test_what_has_no_one_value_is_left_out():
    def f(w, x):
        def helper(a):
            return jax.lax.sin(a)  # of two shapes

        return helper(w).sum() + helper(x).sum()

    expressions, left_out = expressions_of(lambda: jax.jit(f).trace(W, X))
    assert all(e.primitive != "sin" for e in expressions)
    assert left_out >= 1


def test_the_body_of_a_shard_map_has_none():
    mesh = mesh_of_devices()

    def f(w, x):
        inside = jax.shard_map(lambda x: jax.lax.sin(x), mesh=mesh, in_specs=P("data"), out_specs=P("data"))
        return inside(x) @ w

    expressions, _ = expressions_of(lambda: jax.jit(f).trace(W, X))
    assert "sin" not in {e.primitive for e in expressions}
    # The results of the shard_map can be constrained, or it is refused.
    at = next(e for e in expressions if e.primitive == "shard_map")
    with pytest.raises(NotImplementedError), constrained([Constraint(at, P("data", "model"))], mesh):
        jax.jit(f).trace(W, X)


def test_a_function_that_is_traced_otherwise_is_refused():
    mesh, calls = mesh_of_devices(), []

    def f(w, x):
        calls.append(1)
        operation = jax.lax.sin if len(calls) == 1 else jax.lax.cos
        return operation(x @ w)

    expressions, _ = expressions_of(lambda: jax.jit(f).trace(W, X))
    sine = next(e for e in expressions if e.primitive == "sin")
    with pytest.raises(TracedOtherwise), constrained([Constraint(sine, P("data"))], mesh):
        jax.jit(f).trace(W, X)
    with constrained([Constraint(sine, P("data"))], mesh) as outcome:
        pass
    assert not outcome.is_as_before, "the expression was not evaluated"
