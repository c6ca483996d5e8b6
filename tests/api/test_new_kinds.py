"""The log tells why a function is planned again."""

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

import gshard

MESH = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
X = jnp.ones((16, 8))


def step(x: Any, rate: Any = 1.0) -> Any:
    return rate * x


OTHER: dict[str, tuple[tuple[Any, ...], str]] = {
    "shape": ((jnp.ones((24, 8)),), "x is float32[24,8], and was float32[16,8]"),
    "dtype": ((X.astype(jnp.int32),), "x is int32[16,8], and was float32[16,8]"),
    "structure": ((X, 2.0), "its arguments have another structure than before"),
    "place": (
        (jax.device_put(X, jax.NamedSharding(MESH, P("data"))),), "x is on NamedSharding(mesh=Mesh('data': 8",
    ),
}  # fmt: skip


def test_without_a_setting_it_is_information(caplog: pytest.LogCaptureFixture) -> None:
    f = gshard.jit(lambda x: 2 * gshard.split(x, 0, 8), mesh=8)
    with caplog.at_level(logging.INFO, "gshard"):
        for rows in (16, 24, 32):
            for _ in range(3):
                f(np.ones((rows, 8), np.float32))
    told = [r for r in caplog.records if "planned again" in r.getMessage()]
    assert [r.levelno for r in told] == [logging.INFO] * 2


@pytest.mark.parametrize("case", OTHER)
def test_what_is_new_is_told_once(case: str, caplog: pytest.LogCaptureFixture) -> None:
    arguments, text = OTHER[case]
    f = gshard.jit(step, mesh=MESH)
    with jax.log_compiles(), caplog.at_level(logging.WARNING, "gshard"):
        for _ in range(3):
            f(X)
        assert not [r for r in caplog.records if "planned again" in r.getMessage()]
        for _ in range(3):
            np.testing.assert_array_equal(f(*arguments), step(*arguments))
    (told,) = (r.getMessage() for r in caplog.records if "planned again" in r.getMessage())
    assert told.startswith(f"step is planned again: {text}")


def test_many_arguments_and_static_ones(caplog: pytest.LogCaptureFixture) -> None:
    f = gshard.jit(lambda xs, n: n * sum(x.sum() for x in xs), mesh=8, static_argnums=1)
    with caplog.at_level(logging.DEBUG, "gshard"):
        f.lower([X] * 6, 1)
        f.lower([X[:8]] * 6, 1)
        f.lower([X[:8]] * 6, 2)
        with jax.enable_x64():
            f.lower([X[:8]] * 6, 2)
    shapes, static, setting = (r.getMessage() for r in caplog.records if "planned again" in r.getMessage())
    assert "xs[3] is float32[8,8], and was float32[16,8]; and 2 more arguments" in shapes
    assert static.endswith("a static argument has another value than before")
    assert setting.endswith("a setting of JAX or a rule has changed")


def test_shapes_that_change_with_each_call_get_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    f = gshard.jit(step, mesh=8)
    with caplog.at_level(logging.WARNING, "gshard"):
        for rows in range(1, 15):
            f.lower(np.ones((rows, 8), np.float32))
        assert not caplog.records
        for rows in range(15, 25):
            f.lower(np.ones((rows, 8), np.float32))
    (told,) = (r.getMessage() for r in caplog.records)
    assert told.startswith("step is planned and compiled for 16 different kinds of arguments, at test_new_kinds.py:")
    assert "x is float32[16,8], and was float32[15,8]" in told
    assert "Pad arrays to a few sizes" in told
