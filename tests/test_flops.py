"""The count of executed FLOPs agrees with XLA's where no loop runs, and goes round loops where one does."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from flops import counted_once, executed

X = jnp.linspace(-1.0, 1.0, 24 * 40).reshape(24, 40)
IMAGE, KERNEL = jnp.ones((2, 9, 7, 4)), jnp.ones((3, 2, 2, 6))


def convolution(x, w):
    return lax.conv_general_dilated(
        x, w, (2, 1), ((1, 2), (0, 3)), (1, 2), (2, 1), ("NHWC", "HWIO", "NHWC"), feature_group_count=2
    )


def compiled(f, *arguments):
    return jax.jit(f).lower(*arguments).compile()


@pytest.mark.optimised  # otherwise XLA opens a scatter as a loop
@pytest.mark.parametrize("f, arguments", [
    (lambda x: x @ x.T, (X,)),
    (lambda x: jnp.einsum("abc,adc->abd", x, x), (X.reshape(4, 6, 40),)),
    (convolution, (IMAGE, KERNEL)),
    (jax.grad(lambda x, w: jnp.square(convolution(x, w)).sum(), (0, 1)), (IMAGE, KERNEL)),
    (lambda x: jnp.where(x > 0, x * 2, x).sum(0), (X,)),
    (lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (3, 2), (2, 1), "SAME"), (X,)),
    (lambda x: jnp.sort(x, 0), (X,)),
    (lambda x: jnp.fft.fft2(x), (X,)),
    (lambda x: x.at[jnp.array([3, 1, 3])].add(1.0), (X,)),
    (lambda x: x.astype(jnp.int32) // 3, (X,)),
    (lambda x: lax.cond(x[0, 0] > 0, lambda x: x @ (x.T @ x), lambda x: x, x), (X,)),
])  # fmt: skip
def test_counts_as_xla_does(f, arguments):
    made = compiled(f, *arguments)
    assert made.cost_analysis()["flops"] > 0
    assert counted_once(made.as_text()) == pytest.approx(made.cost_analysis()["flops"], rel=0.01)
    assert executed(made) == made.cost_analysis()["flops"]


def test_every_round_of_a_loop_counts():
    square = jnp.ones((16, 16))
    once = 2 * 16**3

    def loop(rounds):
        return compiled(lambda x: lax.fori_loop(0, rounds, lambda _, x: x @ x, x), square)

    assert loop(10).cost_analysis()["flops"] < 2 * once  # XLA counts the body once
    assert executed(loop(10)) == pytest.approx(10 * once, rel=0.01)
    nested = compiled(
        lambda x: lax.scan(lambda c, _: (lax.fori_loop(0, 3, lambda _, c: c @ c, c), None), x, None, 4)[0], square
    )
    assert executed(nested) == pytest.approx(12 * once, rel=0.01)


def test_a_loop_of_unknown_length_counts_one_round():
    made = compiled(lambda x: lax.while_loop(lambda x: x[0, 0] > 0, lambda x: x @ x, x), jnp.ones((16, 16)))
    assert executed(made) == made.cost_analysis()["flops"]
