"""Arrays that elementwise equations narrow or widen are moved where their elements are small."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from gshard.xla.hlo_collectives import collectives
from placed import in_every_way, mesh_of

SIZE, BATCH = 64, 512
WHOLE = SIZE * SIZE * 7 // 8  # bytes that a device sends to gather one byte for each element of a weight


@pytest.fixture
def x(rng: np.random.Generator) -> np.ndarray:
    return rng.integers(-3, 4, (BATCH, SIZE)).astype(np.float32)


@pytest.fixture
def w(rng: np.random.Generator) -> np.ndarray:
    return rng.integers(-3, 4, (SIZE, SIZE)).astype(np.float32)


def rounded(w: Any) -> Any:
    """A user's own rounding to int8 and back, without marks in between."""
    return (jnp.tanh(w) * 100).astype(jnp.int8).astype(jnp.float32) / 4


def rounded_to_bfloat16(w: Any) -> Any:
    return jnp.abs(jax.lax.reduce_precision(jnp.sin(w), 8, 7).astype(jnp.bfloat16)).astype(jnp.float32) * 2


def masked(w: Any) -> Any:
    return (w > 0).astype(jnp.float32) + 1


@pytest.mark.parametrize(("widened", "size"), [(rounded, 1), (rounded_to_bfloat16, 2), (masked, 1)])
def test_it_is_gathered_before_it_is_widened(widened: Any, size: int, w: np.ndarray, x: np.ndarray) -> None:
    def f(w: Any, x: Any) -> Any:
        w, x = gshard.split(w, 0, "data"), gshard.split(x, 0, "data")
        return x @ widened(w)

    mesh = mesh_of(data=8)
    partitioned = gshard.jit(f, mesh=mesh)
    found = gshard.explain(partitioned, w, x)
    assert found.bytes_by_kind == {"all_gather": size * WHOLE}
    compiled = collectives(partitioned.lower(w, x).compile().as_text())
    assert sum(c.total_bytes for c in compiled) == size * WHOLE
    for got in in_every_way(partitioned, (w, x), mesh):
        np.testing.assert_allclose(got, jax.jit(f)(w, x), rtol=1e-6, atol=1e-6)


def test_it_is_gathered_after_it_is_narrowed(w: np.ndarray, x: np.ndarray) -> None:
    def f(w: Any, x: Any) -> Any:
        w, x = gshard.split(w, 0, "data"), gshard.split(x, 0, "data")
        return x.astype(jnp.bfloat16) @ (jnp.tanh(w) * 2).astype(jnp.bfloat16)

    assert gshard.explain(f, w, x, mesh={"data": 8}).bytes_by_kind == {"all_gather": 2 * WHOLE}


def test_weights_that_are_stored_narrow_with_scales(rng: np.random.Generator, x: np.ndarray) -> None:
    q, scale = rng.integers(-127, 128, (SIZE, SIZE)).astype(np.int8), np.ones((SIZE, 1), np.float32) / 4

    def f(q: Any, scale: Any, x: Any) -> Any:
        q, scale, x = gshard.split((q, scale, x), 0, "data")
        return x @ (jnp.clip(q, -9, 9).astype(jnp.float32) * jnp.abs(scale))

    assert gshard.explain(f, q, scale, x, mesh={"data": 8}).total_bytes == WHOLE + SIZE * 4 * 7 // 8


def test_what_stays_in_place_is_one_group(w: np.ndarray) -> None:
    """Nothing moves: the number of collectives does not change, and the wide array is split like the narrow one."""
    f = gshard.jit(lambda w: rounded(gshard.split(w, 0, "data")) + 1, mesh={"data": 8})
    assert not gshard.explain(f, w).total_bytes
    assert f(w).sharding.shard_shape(w.shape) == (SIZE // 8, SIZE)


@pytest.mark.parametrize("machine", ["v5e:2x4", "h100:1x8"])
def test_it_is_gathered_narrow_if_planned_for_a_machine(machine: str) -> None:
    array = jax.ShapeDtypeStruct
    mesh = gshard.Mesh.abstract(data=8)

    def f(w: Any, x: Any) -> Any:
        w, x = gshard.split(w, 0, "data"), gshard.split(x, 0, "data")
        return x @ rounded(w)

    found = gshard.explain(
        f, array((4096, 4096), "float32"), array((65536, 4096), "float32"), mesh=mesh, machine=machine
    )
    assert found.bytes_by_kind == {"all_gather": 4096 * 4096 * 7 // 8}
