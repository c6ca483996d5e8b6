"""Whole programs on 8 devices compute what they compute on one, whatever is marked and however uneven it is."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import gshard
from checked_calls import near
from gshard import shard, split
from harness import normal
from invented import invented
from placed import mesh_of, three_calls


@dataclasses.dataclass(frozen=True)
class Case:
    """A marked function, its arguments, and the collectives that it may have (None: any)."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    kinds: set[str] | None = None
    gathered: tuple[str, ...] = ()


def without_rule(x):
    return invented(split(x, 0, "data")) * 2


def transformed(x):
    """What mixes a split dimension wants it whole: its parts move to another one, and the result leaves so."""
    return jnp.fft.fft(split(x, 2, "model"))


def lengthened(x):
    """The result has an odd number of rows, and leaves cut along its columns."""
    return jnp.pad(split(x, 0, "model"), ((0, 1), (0, 0)))


def joined(x):
    """The minor of two dimensions that become one is split."""
    return split(x, 1, "model").reshape(-1, x.shape[2]) * 2


def device_order(x):
    return shard(x, np.arange(8).reshape(4, 2).T) + 1


def over_split_layers(x, weights):
    return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), c[:, 0]), x, split(weights, 0, 8))


@jax.custom_batching.custom_vmap
def own_vmap(x):
    return jnp.sin(x)


own_vmap.def_vmap(lambda size, mapped, x: (jnp.cos(x), True))


def calls(x):
    """Everything that JAX keeps as one equation although it only runs a body."""
    x = split(x, 0, 8)
    linear = jax.custom_derivatives.linear_call(lambda r, x: r * x, lambda r, t: r * t, x, x)
    by_platform = jax.lax.platform_dependent(x, cpu=lambda x: x + 1, default=lambda x: x - 1)
    root = jax.lax.custom_root(lambda y: y - x, x, lambda f, y: x, lambda f, y: y)
    composite = jax.lax.composite(lambda x: jnp.sin(x) + 1, name="my.composite")(x)
    return jax.vmap(own_vmap)(x), own_vmap(x), linear, by_platform, root, composite, jax.jit(jnp.tanh)(x)


CASES = [
    Case("without rule", without_rule, (normal(8, 6),), {"all_gather"}, ("invented",)),
    Case("scan over a split dimension", over_split_layers, (normal(3, 16), normal(8, 16, 16) / 4)),
    Case("calls", calls, (normal(8, 3),), set()),
    # No spec over whole axes of the user's mesh says that order, so the result is gathered along the others.
    Case("device ids", device_order, (normal(4, 8),), {"all_gather"}),
    Case("parts move to a parallel dimension", transformed, (normal(4, 3, 8),), {"all_to_all"}),
    Case("reshape that joins a split dimension", joined, (normal(4, 8, 12),), {"all_to_all"}),
    Case("an uneven result leaves cut elsewhere", lengthened, (normal(8, 4),), {"all_to_all"}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.one_in(2)
def test_equals_the_program_on_one_device(case, mesh_2x4):
    jitted = gshard.jit(case.function, mesh=mesh_2x4)
    results = jitted(*case.arguments)
    expected = jax.jit(case.function)(*case.arguments)
    near(results, expected, 2e-5, 1e-5)  # sums in another order: a few units in the last place of the largest term
    lowered = jitted.lower(*case.arguments)
    assert {e.name for e in lowered.plan.gathered} == set(case.gathered)
    if case.kinds is not None:
        assert {c.kind for c in lowered.spmd.collectives} == case.kinds


def test_a_loop_over_split_layers_gathers_no_layers():
    """The stack moves to another dimension once; no device ever holds more than one whole layer."""
    x, weights = normal(3, 16), normal(8, 16, 16) / 4
    for function in (over_split_layers, jax.grad(lambda x, w: over_split_layers(x, w)[0].sum(), (0, 1))):
        sent = gshard.explain(function, x, weights, mesh=8).collectives
        needed = "operand 1 of scan, which loops over the split dimension: split another"
        assert any(row.kind == "all_to_all" and row.why == needed for row in sent)
        assert all(row.bytes // row.times <= weights[0].nbytes for row in sent if row.kind == "all_gather")


@pytest.mark.parametrize("inside", ["straight", "scan", "grad"])
def test_of_the_branches_by_platform_one_is_compiled(inside):
    """A kernel for TPU does not compile on CPU, and what its branch sends is not sent there."""
    shape = jax.ShapeDtypeStruct((8, 8), np.float32)
    kernel = jax.custom_jvp(pl.pallas_call(lambda x, out: out.__setitem__(..., x[...] * 2), out_shape=shape))
    kernel.defjvps(lambda g, y, x: 2 * g)

    def f(x):
        return jax.lax.platform_dependent(split(x, 0, 8), tpu=lambda x: kernel(x) + x.sum(0), default=jnp.sin)

    around = {
        "straight": lambda f: f,
        "scan": lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), c), x, None, length=2),
        "grad": lambda f: jax.grad(lambda x: f(x).sum()),
    }[inside]
    x, jitted = normal(8, 8), gshard.jit(around(f), mesh=8, strict=True)
    for got in three_calls(jitted, mesh_of(d=8), x):
        near(got, around(jnp.sin)(x), 1e-6, 0)
    assert not gshard.explain(jitted, x).bytes_by_kind
    text = gshard.jit(around(f), mesh=8).trace(x).lower(lowering_platforms=("tpu",)).as_text()
    assert "tpu_custom_call" in text or inside == "grad"
    assert "sine" not in text
