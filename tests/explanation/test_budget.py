"""A byte budget: kept without a word, broken with the lines, the bytes and the marks that would help."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from gshard import split

W = np.random.default_rng(0).standard_normal((16, 24)).astype(np.float32)
X = np.random.default_rng(1).standard_normal((8, 16)).astype(np.float32)


def contracted(x: Any, w: Any) -> Any:
    return jnp.tanh(gshard.replicate(split(x, 1, 8) @ split(w, 0, 8)))


SENT = 2 * 8 * 24 * 4 * 7 // 8  # one all-reduce of the result


@pytest.mark.parametrize("strict", [SENT, SENT + 0.5, 1e9, True, False])
def test_a_program_that_keeps_to_its_budget_runs(strict: Any) -> None:
    assert gshard.explain(contracted, X, W, mesh=8).total_bytes == SENT
    jitted = gshard.jit(contracted, mesh=8, strict=strict)
    np.testing.assert_allclose(jitted(X, W), np.tanh(X @ W), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("strict", [0, SENT - 1])
def test_one_that_does_not_is_refused_with_what_to_do(strict: Any) -> None:
    with pytest.raises(gshard.PlanError) as caught:
        gshard.jit(contracted, mesh=8, strict=strict)(X, W)
    text = str(caught.value)
    assert f"{SENT:,} bytes in one call of contracted, and strict allows {strict:,} bytes" in text
    assert "all_reduce of f32[8,24] over devices for" in text
    assert "test_budget.py:18 (contracted)" in text, "the user's line is missing"
    assert "split(x, 1, 8)" in text, "the mark that causes it is missing"


def test_it_holds_for_each_half_of_a_derivative() -> None:
    jitted = gshard.jit(lambda x, w: contracted(x, w).sum(), mesh=8, strict=16)
    with pytest.raises(gshard.PlanError, match="strict allows 16 bytes"):
        jax.jit(jax.grad(jitted))(X, W)


def test_what_moves_nothing_needs_no_budget() -> None:
    jitted = gshard.jit(lambda x: 2 * split(x, 0, 8), mesh=8, strict=0)
    np.testing.assert_array_equal(jitted(X), 2 * X)


@pytest.mark.parametrize("strict", [-1, "1 MB", float("nan"), None])
def test_budgets_that_say_nothing(strict: Any) -> None:
    with pytest.raises(gshard.PlanError, match="number of bytes"):
        gshard.jit(contracted, mesh=8, strict=strict)
