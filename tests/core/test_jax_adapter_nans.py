"""With ``jax.debug_nans`` a NaN is a ``FloatingPointError`` wherever the function is called from, never a result."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard

ONES = np.ones((16, 8), np.float32)


def logarithm(x: Any) -> Any:
    return jnp.sum(jnp.log(gshard.split(x - 2, 0, 8)))


def in_place(x: Any) -> Any:
    x[...] = jnp.log(x[...] - 2)


CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "call": (lambda: gshard.jit(logarithm, mesh=8)(ONES), "encountered in log"),
    "donated": (lambda: gshard.jit(logarithm, mesh=8, donate_argnums=0)(jnp.array(ONES)), "encountered in log"),
    "gradient": (lambda: jax.grad(gshard.jit(logarithm, mesh=8))(ONES), "encountered in log"),
    "vmap": (lambda: jax.vmap(gshard.jit(logarithm, mesh=8))(ONES[None]), "encountered in log"),
    "made by NumPy": (lambda: gshard.jit(lambda x: 0 * x / (x - 1), mesh=8)(ONES), "NumPy"),
    "an argument": (lambda: gshard.jit(lambda x: x + np.float32(0), mesh=8)(ONES * np.nan), "arguments"),
    "a reference": (lambda: gshard.jit(in_place, mesh=8)(jax.new_ref(jnp.array(ONES))), "the results of in_place"),
}


@pytest.mark.parametrize("case", CALLS)
@pytest.mark.filterwarnings("ignore:invalid value", "ignore:Some donated buffers")
def test_a_nan_is_an_error(case: str) -> None:
    call, text = CALLS[case]
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=text):
        call()


def test_infinities_too() -> None:
    with jax.debug_infs(True), np.errstate(divide="ignore"), pytest.raises(FloatingPointError, match="inf"):
        gshard.jit(lambda x: 1 / (x - 1), mesh=8)(ONES)


def test_a_nan_in_the_padding_is_none() -> None:
    x = np.arange(1, 14, dtype=np.float32)
    with jax.debug_nans(True):
        call = gshard.jit(lambda x: jnp.log(gshard.split(x, 0, 8) - 0.5), mesh=8, uneven="keep")
        np.testing.assert_allclose(np.asarray(call(x)), np.log(x - 0.5), rtol=1e-6)
