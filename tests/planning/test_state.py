"""A training state goes round: each call gets it as the one before has left it, also where parts are unequal."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard


@pytest.mark.parametrize("shape", [(2, 8, 12), (6, 12, 4), (4, 8, 8), (3, 5, 7)])
@pytest.mark.one_in(2)
def test_a_state_is_sharded_alike_after_every_call(shape: tuple[int, ...]) -> None:
    """So that a run that is resumed from a checkpoint runs the programs that the whole run would have run."""

    def step(state: Any, x: Any) -> Any:
        w = gshard.split(state["w"], 0, 4)
        h = jnp.einsum("eij,ebi->ebj", w, gshard.split(x, 0, 4))
        return {"w": state["w"] - 0.25 * jnp.einsum("ebi,ebj->eij", x, h), "m": state["m"] * 0.5 + h.sum((0, 1))}

    run = gshard.jit(step, mesh=4, donate_argnums=0)
    rng = np.random.default_rng(0)
    x = rng.integers(-2, 3, (shape[0], 6, shape[1])).astype(np.float32)

    def fresh() -> Any:
        return {"w": jnp.ones(shape), "m": jnp.zeros(shape[2])}

    states = [run(fresh(), x)]
    first = jax.tree.map(lambda a: a.sharding, states[0])
    for _ in range(3):
        before = jax.tree.map(np.asarray, states[-1])
        after = run(states[-1], x)
        assert jax.tree.map(lambda a: a.sharding, after) == first
        for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(jax.jit(step)(before, x)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)
        states.append(after)


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_a_donated_argument_of_padded_parts_becomes_an_ordinary_result() -> None:
    x = np.arange(30, dtype=np.float32).reshape(6, 5)
    padded = gshard.jit(lambda w: gshard.split(w, 0, 4) * 2, mesh=4, uneven="keep")(x)
    assert isinstance(padded, gshard.stages.UnevenArray)
    result = gshard.jit(lambda w: w + 1, mesh=4, donate_argnums=0)(padded)
    np.testing.assert_array_equal(result, 2 * x + 1)
