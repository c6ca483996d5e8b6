"""The driver ends and warns; functions of arrays that can be one batch."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import ShapeDtypeStruct
from jax.experimental import io_callback

import gshard
from gshard.planning.batched import equal_functions
from gshard.rewrite.driver import at, run
from gshard.tracing.trace import trace


def negated():
    return trace(lambda x: -x, jnp.ones(3)).block


@pytest.mark.parametrize("most", [0, 3])
def test_rows_run_until_none_fires(most, caplog):
    times = []

    @at("neg")
    def few(graph, e):
        times.append(e)
        return [e] if len(times) <= most else None

    block = negated()
    _, fired = run([few], block.equations, block.outputs, None)
    assert len(fired) == most
    assert not caplog.records


def test_a_row_without_an_end_is_stopped_and_named(caplog):
    @at("neg")
    def endless(graph, e):
        return [e]

    block = negated()
    with caplog.at_level(logging.WARNING, "gshard"):
        equations, fired = run([endless], block.equations, block.outputs, None)
    assert [e.name for e in equations] == ["neg"]
    assert len(fired) == 1000
    (record,) = caplog.records
    assert "endless still fires at test_driver.py:" in record.getMessage()


def f32(*shape):
    return ShapeDtypeStruct(shape, "float32")


def orthogonal(x, steps=2):
    x = x / (jnp.linalg.norm(x) + 1e-7)
    for _ in range(steps):
        product = x @ x.T
        x = 1.5 * x - 0.5 * product @ x
    return x


def groups(f, *arguments):
    return equal_functions(gshard.stages.trace(f, *arguments).block)


SQUARES = [f32(16, 16)] * 3


def test_a_function_begins_where_arrays_meet_and_ends_where_they_do():
    def update(weights, momenta, gradients):
        momenta = [0.9 * m + g for m, g in zip(momenta, gradients, strict=True)]
        return [w - 0.1 * orthogonal(m) for w, m in zip(weights, momenta, strict=True)], momenta

    program = gshard.stages.trace(update, SQUARES, SQUARES, SQUARES)
    ((first, *others),) = equal_functions(program.block)
    assert len(others) == 2
    producer = {v: e for e in program.block.equations for v in e.outputs}
    assert producer[first.root].name == "add", "the new momentum"
    assert (len(first.outputs), first.outside) == (1, ())
    assert [e.name for e in first.equations].count("dot_general") == 4
    assert "sub" not in [e.name for e in first.equations[-1:]], "the weights are another array"


def of_another(a, b, c):
    a = orthogonal(a)
    return a, orthogonal(a * b), orthogonal(b), orthogonal(c)


def in_a_circle(a, b, c):
    first, other = orthogonal(a), jnp.linalg.cholesky(b)
    return jnp.linalg.cholesky(first * c), orthogonal(other * c)


def loss(ws, x):
    for w in ws:
        x = x + jax.nn.relu(x @ w)
    return (x**2).sum()


def behind_an_effect(a):
    """A batch of both would have to run before the first effect and after the second one."""
    first = orthogonal(a)
    jax.debug.print("{}", first, ordered=True)
    return first, orthogonal(io_callback(np.tanh, f32(16, 16), a, ordered=True))


def looped(x, factor=1.5):
    return jax.lax.fori_loop(0, 3, lambda _, x: factor * x - 0.5 * (x @ x.T) @ x, x)


# Programs, their arguments, and how many functions of which shape each group has.
GROUPS = {
    "elementwise": (lambda xs: [jnp.tanh(x) for x in xs], (SQUARES,), []),
    "one product": (lambda xs, w: [jnp.tanh(x) @ w for x in xs], (SQUARES, f32(16, 16)), []),
    "reductions": (lambda xs: [jax.nn.softmax(x) for x in xs], (SQUARES,), []),
    "decompositions": (lambda xs: [jnp.linalg.cholesky(x) for x in xs], (SQUARES,), [(3, (16, 16))]),
    "other shapes": (
        lambda xs: [orthogonal(x) for x in xs], ([f32(n, 16 if n > 4 else 4) for n in (16, 8, 16, 8, 4)],),
        [(2, (16, 16)), (2, (8, 16))],
    ),
    "other functions": (lambda a, b: (orthogonal(a), 2 * orthogonal(b, 3)), (*SQUARES[:2],), []),
    "other types": (lambda a, b: (orthogonal(a), orthogonal(b.astype(jnp.bfloat16))), (*SQUARES[:2],), []),
    "a function of another one": (of_another, (*SQUARES,), [(3, (16, 16))]),
    "in a circle": (in_a_circle, (*SQUARES,), []),
    # A weight's product with few rows is not a function of the weight, and its gradient is one of no activation.
    "small operands": (jax.grad(loss), ([f32(64, 64)] * 3, f32(2, 64)), []),
    "behind an effect": (behind_an_effect, (f32(16, 16),), []),
    "loops": (lambda xs: [looped(x) for x in xs], (SQUARES,), [(3, (16, 16))]),
    "loops that differ": (lambda a, b: (looped(a), looped(b, 1.25)), (*SQUARES[:2],), []),
}  # fmt: skip


@pytest.mark.parametrize("name", GROUPS)
def test_which_functions_are_one_batch(name):
    f, arguments, expected = GROUPS[name]
    assert [(len(g), g[0].root.shape) for g in groups(f, *arguments)] == expected


def test_what_lies_between_two_parts_belongs_to_a_function_and_a_mark_ends_it():
    (group,) = groups(lambda xs: [(y @ y.T + 2 * y, jnp.sin(y)) for y in map(jnp.exp, xs)], SQUARES)
    assert [e.name for e in group[0].equations] == ["exp", "transpose", "dot_general", "mul", "add"]
    assert len(group[0].outputs) == 2, "sin reads y outside of the batch"
    (group,) = groups(lambda xs: [gshard.split(x @ x.T, 0, 4) @ x for x in xs], SQUARES)
    assert [e.name for e in group[0].equations] == ["transpose", "dot_general"]


def test_a_number_that_all_arrays_decide_begins_new_functions():
    def f(xs):
        scale = 1 / sum(jnp.sum(x * x) for x in xs)  # as clipping by a global norm
        return [orthogonal(x * scale) for x in xs]

    (group,) = groups(f, SQUARES)
    assert len(group) == 3
    assert len({v.root for v in group}) == 3
    assert not any(v.root in gshard.stages.trace(f, SQUARES).block.inputs for v in group)


def test_values_from_outside():
    def f(xs, own, common, vector):
        return [orthogonal(x * s * common + vector * s) for x, s in zip(xs, own, strict=True)]

    (group,) = groups(f, SQUARES, [f32()] * 3, f32(), f32(16))
    assert all(len(function.outside) == 3 for function in group)
    assert len({function.outside[0] for function in group}) == 3
    assert len({function.outside[1] for function in group}) == 1


def test_effects_are_not_batched():
    def printed(xs):
        for x in xs:
            jax.debug.print("{}", (x @ x.T)[0, 0], ordered=False)
        return [x.sum() for x in xs]

    (group,) = groups(printed, SQUARES)
    assert all("debug" not in e.name for e in group[0].equations)
    (group,) = groups(lambda xs: [jax.pure_callback(np.tanh, f32(16, 16), x @ x) @ x for x in xs], SQUARES)
    assert [e.name for e in group[0].equations] == ["dot_general"]
