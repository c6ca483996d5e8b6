"""Stacks that elementwise equations compute from narrower ones: what is moved into loops, and what is not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import gshard
from checked_calls import near
from gshard.core.jax_adapter import scan_counts
from gshard.core.program import Value
from gshard.language.region import Interpreter
from gshard.testing import assert_proved

LENGTH, ROWS, COLUMNS = 4, 3, 5


@pytest.fixture
def narrow(rng):
    return rng.integers(-127, 128, (LENGTH, ROWS, COLUMNS)).astype(np.int8)


@pytest.fixture
def scale(rng):
    return rng.standard_normal((LENGTH, ROWS, 1)).astype(np.float32)


def widened(narrow, scale):
    return narrow.astype(jnp.float32) * scale


def summed(stack, *, reverse=False):
    return lax.scan(lambda c, x: (c * 0.5 + x.sum(), c), jnp.float32(1), stack, reverse=reverse)


def loops(program):
    return [e for e in program.block.walk() if e.name == "scan"]


def stacks(e):
    return [v.dtype_name for v in e.inputs[sum(scan_counts(e.params)) :] if isinstance(v, Value)]


def fired(program):
    return [one.rewrite for one in program.fired]


def check(f, *args):
    program = gshard.stages.trace(f, *args)
    want = jax.tree.leaves(f(*args))
    # Sums of 15 terms of up to 400. Where XLA fuses a product and a sum, the product is not rounded (1.5e-5 each).
    near(list(Interpreter().run(program.block, [*program.captured, *args])), want, 1e-6, 2e-4)
    return program


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("widen", [
    widened, lambda q, s: jnp.tanh(q.astype(jnp.float32) - 1) * s,
    lambda q, s: q.astype(jnp.float32) * jnp.broadcast_to(s, q.shape),
    lambda q, s: q.astype(jnp.float32) * lax.broadcast_in_dim(s[:, :, 0], q.shape, (0, 1)),
    lambda q, s: jnp.where(s > 0, 2.0 * q, 1.0),
    lambda q, s: (q.astype(jnp.float32) * s).astype(jnp.bfloat16).astype(jnp.float32),
])  # fmt: skip
@pytest.mark.one_in(4)
def test_a_widened_stack_is_widened_in_the_loop(widen, reverse, narrow, scale):
    program = check(lambda q, s: summed(widen(q, s), reverse=reverse), narrow, scale)
    assert fired(program) == ["widen_slices"]
    (loop,) = loops(program)
    assert "s8" in stacks(loop)
    assert not any(v.shape == narrow.shape and v.dtype == np.float32 for v in loop.inputs)


@pytest.mark.parametrize("f", [
    lambda q, s: summed(jnp.tanh(s)),  # not narrower before
    lambda q, s: summed(q.astype(jnp.float32)[::-1]),  # other positions
    lambda q, s: summed(jnp.cumsum(q.astype(jnp.float32), 0)),  # iterations would depend on others
    lambda q, s: [wide := widened(q, s), summed(wide)],  # the wide array is needed anyway
    lambda q, s: summed(q.astype(jnp.float32) * s[:1]),  # the scale is no stack
    lambda q, s: lax.scan(lambda c, x: (c + x.sum(), x), widened(q, s), s)[1],  # a carry
    lambda q, s: summed(lax.broadcast_in_dim(s[:, 0, 0], (ROWS, LENGTH), (1,))),  # dimension 0 is another
    lambda q, s: summed(gshard.replicate(q.astype(jnp.float32))),  # a mark stays on what it marks
])  # fmt: skip
@pytest.mark.one_in(3)
def test_what_is_not_moved(f, narrow, scale):
    assert "widen_slices" not in fired(check(f, narrow, scale))


def test_residuals_are_stacked_narrow(narrow, scale):
    """The backward loop widens again what the forward loop has widened."""

    def f(s, q):
        def layer(x, slices):
            q, s = slices
            return jnp.tanh(widened(q, lax.stop_gradient(s * 2)) @ x), None

        return lax.scan(layer, jnp.ones(COLUMNS), (q, s))[0].sum()

    q = np.repeat(narrow, 2, 1)[:, :COLUMNS]
    s = np.ones((LENGTH, COLUMNS, 1), np.float32)
    program = check(jax.grad(lambda x, q, s: f(s, q) * x), np.float32(2), q, s)
    assert "f32[4,5,5]" not in str(program)

    def with_weights(x, q, s):
        def layer(x, slices):
            q, s = slices
            return jnp.tanh(widened(q, s * 2) @ x), None

        return lax.scan(layer, x, (q, s))[0].sum()

    plain = check(jax.grad(with_weights), np.ones(COLUMNS, np.float32), q, s)
    assert "widen_slices" in fired(plain)
    _, backward = loops(plain)
    assert "s8" in stacks(backward)
    assert not [v for v in backward.inputs if v.shape == (LENGTH, COLUMNS, COLUMNS) and v.dtype == np.float32]


def test_a_stack_that_others_read_stays_wide(narrow, scale):
    def f(q, s):
        wide = lax.scan(lambda c, x: (c + 1, widened(x[0], x[1] * c)), 0.0, (q, s))[1]
        return wide, summed(wide)

    assert "stack_narrow" not in fired(check(f, narrow, scale))
    assert fired(check(lambda q, s: f(q, s)[1], narrow, scale)) == ["stack_narrow", "widen_slices"]


def test_a_slice_that_is_a_stack_already_is_not_stacked_again(narrow, scale):
    def f(q, s):
        total, wide = lax.scan(lambda c, x: (c * 0.5 + x[1].sum(), widened(x[0], x[1])), 0.0, (q, s))
        return total, summed(wide)

    program = check(f, narrow, scale)
    first, second = loops(program)
    assert len(first.outputs) == 1
    assert set(second.inputs) & set(first.inputs)


def test_a_stack_in_host_memory_stays_there(narrow, scale):
    def f(q, s):
        wide = jax.device_put(widened(q, s), jax.memory.Space.Host)
        return lax.scan(lambda c, x: (c * 0.5 + jax.device_put(x, jax.memory.Space.Device).sum(), c), 1.0, wide)

    program = gshard.stages.trace(f, narrow, scale)
    assert "widen_slices" not in fired(program)
    assert_proved(gshard.jit(f, mesh={"data": 8}), (narrow, scale))


def test_a_stack_that_an_outer_loop_passes_on(narrow, scale):
    """Layers inside of a loop over micro-batches."""

    def f(q, s, x):
        wide = widened(q, s)
        return lax.scan(lambda c, x: (c + x * summed(wide)[0], None), 0.0, x)[0]

    program = check(f, narrow, scale, np.arange(6, dtype=np.float32))
    outer, inner = loops(program)
    assert sorted(stacks(inner)) == ["f32", "s8"]
    assert "s8" in [v.dtype_name for v in outer.inputs if isinstance(v, Value)]
    assert "f32[4,3,5]" not in str(program)
    used = check(
        lambda q, s, x: lax.scan(lambda c, x: (c + (x * widened(q, s)).sum(), None), 0.0, x)[0], narrow, scale, scale
    )
    assert "widen_slices" not in fired(used)


@pytest.mark.parametrize("send", ["bfloat16", "int8"])
def test_marks_of_a_layer_are_widened_one_by_one(rng, send):
    def layer(x, weights):
        a, b, c, d = (gshard.split(w, 0, "x", send=send) for w in weights)
        return jnp.tanh(jnp.tanh(x[0] @ a) @ (b + c)) @ d + d

    program = check(layer, *rng.standard_normal((2, 4, 4, 4)).astype(np.float32))
    equations = program.block.equations
    order = [i for i, e in enumerate(equations) if e.name == "tanh"]
    narrow = (jnp.int8, jnp.bfloat16)
    is_widening = [e.name == "convert_element_type" and e.inputs[0].dtype in narrow for e in equations]
    widened = [i for i, found in enumerate(is_widening) if found]
    assert len(widened) == 4
    first, *middle, last = widened
    assert first < order[0] < min(middle)
    assert max(middle) < order[1] < last
    assert fired(program) == ["widen_late"]
