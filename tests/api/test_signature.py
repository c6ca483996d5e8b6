"""The same call gets the same program: what belongs to the key of what is kept, and what is kept no longer."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import gshard
from gshard import split


@functools.cache
def eight() -> Mesh:
    return Mesh(np.array(jax.devices()[:8]), ("devices",))


def test_an_earlier_call_changes_nothing() -> None:
    x = jnp.arange(8.0)
    placed = jax.device_put(x, NamedSharding(eight(), P("devices")))
    fresh, used = (gshard.jit(lambda x: x * 2, mesh=8) for _ in range(2))
    used(placed)
    assert used(placed).sharding.spec == P("devices")
    assert used(x).sharding == fresh(x).sharding
    assert used(placed).sharding == fresh(placed).sharding


def test_a_state_that_goes_round_is_compiled_once() -> None:
    """The first state is placed nowhere, later ones as the program left them; their plans are the same."""
    step = gshard.jit(lambda w, x: (w - 0.1 * split(x, 0, 8).sum(0), x.mean()), mesh=8, donate_argnums=0)
    w, x = jnp.zeros(4), jnp.ones((16, 4))
    first = step.lower(w, x)
    moved, _ = step(w, x)
    again = step.lower(moved, x)
    assert again is first
    assert moved.sharding.spec == P()


def several(count: int, *xs: Any, key: Any = None) -> Any:
    return [x * count for x in xs], key


def test_names_of_arguments_leave_static_ones_out() -> None:
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
        assert text in str(caught.value)
    with pytest.raises(TypeError, match="at path x\\."):
        gshard.jit(lambda n, x: x * n, mesh=8, static_argnums=0)(2, text)
    with pytest.raises(OverflowError, match=r"xs\[0\]\['n'\], an argument of several, is too large"):
        call(1, {"n": 2**40})
    layout = gshard.Layout(rows="devices")
    named = gshard.jit(several, mesh=8, static_argnums=0, layout=layout, names={"key": "rows"})
    _, *placed = named.lower(1, x, x, key=x).argument_shardings
    assert [s.spec for s in placed] == [P(), P("devices")]


def test_names_reach_the_compiled_program() -> None:
    def train_step(x: Any) -> Any:
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
