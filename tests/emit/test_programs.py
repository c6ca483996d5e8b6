"""Whole programs on 8 devices compute what they compute on one, whatever is marked and however uneven it is."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gshard
from gshard import replicate, shard, split
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


def normal(*shape):
    """Values that vary in sign, different for each shape, the same in every run."""
    return np.random.default_rng([*shape, 7]).standard_normal(shape).astype(np.float32)


def mlp(x, w1, w2):
    h = jax.nn.gelu(shard(x, P("data", None)) @ shard(w1, P(None, "model")))
    return shard(h @ w2, P("data"))


def attention(q, k, v):
    q = shard(q, P("data", "model"))
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k)
    return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores), v)


def embed(table, ids):
    return jnp.take(shard(table, P(None, "model")), split(ids, 0, "data"), axis=0)


def recurrent(x, weights):
    def step(carry, xs):
        a, b = xs
        carry = jnp.tanh(shard(carry, P("data", "model")) @ a + b)
        return carry, (carry.sum(0), carry)

    return jax.lax.scan(step, x, weights, reverse=True)


def until(x):
    x = jnp.abs(split(x, 0, "data"))
    return jax.lax.while_loop(lambda c: c[0].sum() < 100, lambda c: (c[0] * 1.5 + 1, c[1] + 1), (x, 0))


def branches(x, i):
    x = split(x, 0, 8)
    return jax.lax.switch(i, [lambda y: y.sum(0), lambda y: y.max(0), lambda y: jnp.sort(y, 0)[0]], x)


def without_rule(x):
    return invented(split(x, 0, "data")) * 2


def along_a_split_dimension(x):
    x = split(x, 1, 4)
    return (
        jnp.cumsum(x, 1), jnp.argmax(x, 1), jax.lax.top_k(x, 2), jnp.sort(x, axis=1), x[:, 1:3],
        jnp.concatenate([x, x], 1), jnp.flip(x, 1), jnp.pad(x, ((0, 0), (1, 2))),
    )  # fmt: skip


def results_of_all_kinds(x):
    return split(x, 0, 2) @ CAPTURED, x, 3, None, {"a": jnp.ones(3)}


CAPTURED = jnp.asarray(normal(6, 6))


def batched(x):
    return jax.vmap(lambda y: split(y, 0, 4) * 2 + jnp.arange(5.0), in_axes=1)(x)


def constraint_of_jax(x):
    axes = (AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=axes)
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("model", "data"))).sum(0)


def random(key, x):
    x = split(x, 0, 8)
    keys = jax.random.key_data(jax.random.split(key, 3))
    return x + jax.random.normal(key, x.shape), jax.random.permutation(key, 7), jax.random.categorical(key, x), keys


def empty(x):
    return split(x, 0, 8) * 2, x.sum(), jnp.zeros((0, 3)), x[:0]


def low_precision_types(x):
    y = split(x.astype(jnp.bfloat16), 0, 4)
    return (y * 2).max(), y.astype(jnp.int8).sum(), (y > 0).any(0), (y > 0).all(), y.astype(jnp.float32).sum(0)


def both_dimensions(x, w):
    return shard(x, P("data", "model")) @ shard(w, P("model", "data"))


def reshapes(x):
    x = shard(x, P("data", "model"))
    return x.reshape(-1), x.reshape(2, -1, 3), x.T.reshape(4, -1)


def transformed(x):
    """What mixes a split dimension wants it whole: its parts move to another one, and the result leaves so."""
    return jnp.fft.fft(split(x, 2, "model"))


def decomposed(x):
    return jnp.linalg.qr(split(x, 2, "model"))


def lengthened(x):
    """The result has an odd number of rows, and leaves cut along its columns."""
    return jnp.pad(split(x, 0, "model"), ((0, 1), (0, 0)))


def over_a_sequence(q, k, v):
    """Each device has all heads of some tokens; attention wants all tokens, of some heads."""
    placed = P(None, None, ("data", "model"))
    q, k, v = (shard(x, placed) for x in (q, k, v))
    weights = jax.nn.softmax(jnp.einsum("bhqd,bhkd->bhqk", q, k))
    return shard(jnp.einsum("bhqk,bhkd->bhqd", weights, v), placed)


def joined(x):
    """The minor of two dimensions that become one is split."""
    return split(x, 1, "model").reshape(-1, x.shape[2]) * 2


def reductions(x):
    x = split(x, 0, 8)
    return jnp.prod(x, 0), jnp.bitwise_xor.reduce(x.astype(int), 0), jnp.min(x), jax.nn.logsumexp(x), jnp.var(x, 0)


def updates_in_a_loop(x):
    return jax.lax.fori_loop(0, 3, lambda i, c: c.at[i].set(c[i + 1] * 2), split(x, 1, "model"))


@jax.custom_vjp
def own_gradient(x):
    return jnp.sin(x)


own_gradient.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * x,))


def rematerialised(x, w):
    block = jax.checkpoint(lambda h: jnp.sin(jnp.tanh(split(h, 0, "data") @ w)))
    return block(block(x)).sum()


def convolutions(x, kernel):
    x = shard(x, P("data", None, "model"))
    y = jax.lax.conv_general_dilated(x, kernel, (2, 1), "SAME")
    return jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, (1, 1, 3, 2), (1, 1, 1, 1), "SAME")


def device_order(x):
    return shard(x, np.arange(8).reshape(4, 2).T) + 1


def replicated_then_split(x):
    return split(jnp.sin(replicate(x)), 1, 8)


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


IDS = np.random.default_rng(3).integers(0, 11, (5, 3))
CASES = [
    Case("mlp", mlp, (normal(8, 16), normal(16, 32), normal(32, 16)), {"all_reduce"}),
    Case("mlp, uneven", mlp, (normal(6, 5), normal(5, 7), normal(7, 3))),
    Case("attention", attention, (normal(4, 4, 5, 3), normal(4, 4, 6, 3), normal(4, 4, 6, 3)), set()),
    Case(
        "attention, gradient, uneven",
        jax.grad(lambda q, k, v: attention(q, k, v).sum(), (0, 1, 2)),
        (normal(3, 5, 5, 3), normal(3, 5, 6, 3), normal(3, 5, 6, 3)),
    ),
    Case("embedding", embed, (normal(11, 6), IDS)),
    Case("embedding, gradient", jax.grad(lambda t, i: (embed(t, i) ** 2).sum()), (normal(11, 6), IDS)),
    Case("scan", recurrent, (normal(4, 6), (normal(3, 6, 6), normal(3, 6)))),
    Case(
        "scan, gradient",
        jax.grad(lambda x, w: recurrent(x, w)[1][0].sum(), (0, 1)),
        (normal(4, 6), (normal(3, 6, 6), normal(3, 6))),
    ),
    Case("while", until, (normal(5, 3),)),
    *(Case(f"cond {i}", branches, (normal(6, 4), i)) for i in range(3)),
    Case("without rule", without_rule, (normal(8, 6),), {"all_gather"}, ("invented",)),
    Case("along a split dimension", along_a_split_dimension, (normal(4, 7),)),
    Case("results of all kinds", results_of_all_kinds, (normal(4, 6),)),
    Case("vmap", batched, (normal(5, 3),)),
    Case("with_sharding_constraint", constraint_of_jax, (normal(8, 4),), {"all_reduce"}),
    Case("random", random, (jax.random.key(3), normal(5, 6))),
    Case("size 1", empty, (normal(1, 4),)),
    Case("size 0", empty, (normal(0, 4),)),
    Case("low precision types", low_precision_types, (normal(6, 4),)),
    Case("both dimensions", both_dimensions, (normal(8, 8), normal(8, 8))),
    Case("both dimensions, uneven", both_dimensions, (normal(5, 6), normal(6, 7))),
    Case("reshape", reshapes, (normal(4, 12),)),
    Case("reductions", reductions, (normal(7, 3),)),
    Case("loop with updates", updates_in_a_loop, (normal(5, 4),), set()),
    Case("custom gradient", jax.grad(lambda x: own_gradient(split(x, 0, 2)).sum()), (normal(4, 3),), set()),
    Case("remat, gradient", jax.grad(rematerialised, (0, 1)), (normal(6, 5), normal(5, 5))),
    Case("convolutions", convolutions, (normal(4, 2, 11, 6), normal(3, 2, 3, 3))),
    Case(
        "convolutions, gradient",
        jax.grad(lambda x, k: (convolutions(x, k) ** 2).sum(), (0, 1)),
        (normal(4, 2, 11, 6), normal(3, 2, 3, 3)),
    ),
    Case("scan over a split dimension", over_split_layers, (normal(3, 16), normal(8, 16, 16) / 4)),
    Case("scan over a split dimension, uneven", over_split_layers, (normal(3, 5), normal(7, 5, 5) / 2)),
    Case(
        "scan over a split dimension, gradient",
        jax.grad(lambda x, w: (over_split_layers(x, w)[1] ** 2).sum(), (0, 1)),
        (normal(3, 16), normal(8, 16, 16) / 4),
    ),
    Case("calls", calls, (normal(8, 3),), set()),
    # No spec over whole axes of the user's mesh says that order, so the result is gathered along the others.
    Case("device ids", device_order, (normal(4, 8),), {"all_gather"}),
    Case("parts move to a parallel dimension", transformed, (normal(4, 3, 8),), {"all_to_all"}),
    Case("two results leave as they are made", decomposed, (normal(4, 5, 8),), {"all_to_all"}),
    Case(
        "attention over a split sequence",
        over_a_sequence,
        (normal(2, 8, 16, 4), normal(2, 8, 16, 4), normal(2, 8, 16, 4)),
        {"all_to_all"},
    ),
    Case("reshape that joins a split dimension", joined, (normal(4, 8, 12),), {"all_to_all"}),
    Case("an uneven result leaves cut elsewhere", lengthened, (normal(8, 4),), {"all_to_all"}),
    Case("replicated, then split", replicated_then_split, (normal(3, 5),), {"all_gather"}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.one_in(2)
def test_equals_the_program_on_one_device(case, mesh_2x4):
    jitted = gshard.jit(case.function, mesh=mesh_2x4)
    results = jitted(*case.arguments)
    expected = jax.jit(case.function)(*case.arguments)
    assert jax.tree.structure(results) == jax.tree.structure(expected)
    for got, want in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        if jnp.issubdtype(want.dtype, jnp.inexact):
            # Sums in another order: a few units in the last place of the largest term.
            wide = np.complex128 if jnp.issubdtype(want.dtype, jnp.complexfloating) else np.float64
            np.testing.assert_allclose(np.asarray(got, wide), np.asarray(want, wide), rtol=2e-5, atol=1e-5)
        else:
            np.testing.assert_array_equal(got, want)
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
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, around(jnp.sin)(x))
    assert not gshard.explain(jitted, x).bytes_by_kind
    text = gshard.jit(around(f), mesh=8).trace(x).lower(lowering_platforms=("tpu",)).as_text()
    assert "tpu_custom_call" in text or inside == "grad"
    assert "sine" not in text
