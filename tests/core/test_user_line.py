"""Lines: those that the user wrote, also where a framework's layer stands between them and the operation."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest

import gshard


def test_layers_of_a_framework_are_at_the_lines_that_call_them() -> None:
    nnx = pytest.importorskip("flax.nnx")
    up, down = nnx.Linear(16, 32, rngs=nnx.Rngs(0)), nnx.Linear(32, 8, rngs=nnx.Rngs(1))

    def model(x: Any) -> Any:
        h = up(x)
        return down(h)

    program = gshard.stages.trace(model, jnp.ones((4, 16)))
    lines = [e.line for e in program.block.equations if e.name == "dot_general"]
    first = model.__code__.co_firstlineno
    assert lines == [f"test_user_line.py:{first + i} ({model.__qualname__})" for i in (1, 2)]


def test_a_framework_that_is_called_by_nobody_else_has_its_own_lines() -> None:
    optax = pytest.importorskip("optax")
    program = gshard.stages.trace(optax.squared_error, jnp.ones(4))
    assert all(e.line for e in program.block.equations)
