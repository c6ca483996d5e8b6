"""gshard.jit is used like jax.jit: static values, donation, pytrees, keywords, caching, stages, bad input."""

import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gshard
from gshard import split


def test_a_planned_mesh_explains_but_does_not_run():
    mesh = gshard.Mesh.abstract(data=64, expert=32)
    x = jax.ShapeDtypeStruct((4096, 64), jnp.float32)
    found = gshard.explain(lambda x: split(x, 0, 2048).sum(), x, mesh=mesh)
    assert found.bytes_by_kind == {"all_reduce": 7}
    with pytest.raises(gshard.MeshError, match="abstract mesh"):
        gshard.jit(lambda x: x + 1, mesh=mesh)(jnp.ones(3))


def test_static_values_that_cannot_be_hashed_are_named():
    with pytest.raises(gshard.ArgumentError, match=r"(?s)Non-hashable static arguments.*\[1, 2\].*test_jit.py"):
        gshard.jit(lambda x, sizes: x, mesh=8, static_argnums=1)(jnp.ones(3), [1, 2])


def several(count, *xs, key=None):
    return [x * count for x in xs], key


def test_names_of_arguments_leave_static_ones_out():
    """Also beyond the named parameters: the second of ``*xs`` is not called by the name that follows them."""
    x, text = np.arange(8.0), "text"
    call = gshard.jit(several, mesh=8, static_argnums=0)
    assert call.lower(1, x, x, key=x).program.names == ("xs[0]", "xs[1]", "key")
    for arguments, named, name in (
        ((1, text), {}, "xs[0]"),
        ((1, x, [x, text]), {}, "xs[1][1]"),
        ((1, x), {"key": text}, "key"),
    ):
        with pytest.raises(TypeError, match=f"at path {re.escape(name)}\\.") as caught:
            call(*arguments, **named)
        assert "several" in str(caught.value)
    with pytest.raises(TypeError, match="at path x\\."):
        gshard.jit(lambda n, x: x * n, mesh=8, static_argnums=0)(2, text)
    with pytest.raises(OverflowError, match=r"argument path is xs\[0\]\['n'\]"):
        call(1, {"n": 2**40})


def test_names_reach_the_compiled_program():
    def train_step(x):
        with jax.named_scope("my_block"):
            return jax.nn.relu(split(x, 0, 8) @ x.T)

    x = jnp.ones((8, 4))
    step = gshard.jit(train_step, mesh=8)
    text = step.lower(x).compile().as_text()
    assert "jit_train_step" in text
    assert "jaxpr_as_fun" not in text
    for operation in ("dot_general", "max"):  # the second is in the body of a call
        (name, *_) = [line for line in text.split('op_name="')[1:] if line.split('"')[0].endswith(f"/{operation}")]
        assert name.startswith("jit(train_step)/")
        assert "/my_block/" in name


# The log tells why a function is planned again.
MESH = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
X = jnp.ones((16, 8))


def step(x, rate=1.0):
    return rate * x


OTHER = {
    "shape": ((jnp.ones((24, 8)),), "x is float32[24,8], and was float32[16,8]"),
    "dtype": ((X.astype(jnp.int32),), "x is int32[16,8], and was float32[16,8]"),
    "structure": ((X, 2.0), "its arguments have another structure than before"),
    "place": (
        (jax.device_put(X, jax.NamedSharding(MESH, P("data"))),), "x is on NamedSharding(mesh=Mesh('data': 8",
    ),
}  # fmt: skip


def test_without_a_setting_it_is_information(caplog):
    f = gshard.jit(lambda x: 2 * gshard.split(x, 0, 8), mesh=8)
    with caplog.at_level(logging.INFO, "gshard"):
        for rows in (16, 24, 32):
            for _ in range(3):
                f(np.ones((rows, 8), np.float32))
    told = [r for r in caplog.records if "planned again" in r.getMessage()]
    assert [r.levelno for r in told] == [logging.INFO] * 2


@pytest.mark.parametrize("case", OTHER)
def test_what_is_new_is_told_once(case, caplog):
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


def test_many_arguments_and_static_ones(caplog):
    f = gshard.jit(lambda xs, n: n * sum(x.sum() for x in xs), mesh=8, static_argnums=1)
    with caplog.at_level(logging.DEBUG, "gshard"):
        f.lower([X] * 8, 1)
        f.lower([X[:8]] * 8, 1)
        f.lower([X[:8]] * 8, 2)
        with jax.enable_x64():
            f.lower([X[:8]] * 8, 2)
    shapes, static, setting = (r.getMessage() for r in caplog.records if "planned again" in r.getMessage())
    assert "xs[5] is float32[8,8], and was float32[16,8]; and 2 more" in shapes
    for told in (static, setting):
        assert told.endswith("a static argument, a setting of JAX or a rule is another one than before")


def test_shapes_that_change_with_each_call_get_one_warning(caplog):
    f = gshard.jit(step, mesh=8)
    with caplog.at_level(logging.WARNING, "gshard"):
        for rows in range(1, 15):
            f.lower(np.ones((rows, 8), np.float32))
        assert not caplog.records
        for rows in range(15, 25):
            f.lower(np.ones((rows, 8), np.float32))
    (told,) = (r.getMessage() for r in caplog.records)
    assert told.startswith("step is planned and compiled for 16 different kinds of arguments, at test_jit.py:")
    assert "x is float32[16,8], and was float32[15,8]" in told
    assert "Pad arrays to a few sizes" in told
