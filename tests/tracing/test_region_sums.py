"""Sums at the end of a ``shard_map``: finished as the program needs them, or kept where the body reads them."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gshard
from emitted import emitted, reported
from placed import mesh_of, three_calls

Function = Callable[..., Any]

LINE = {"a": 8}
WHOLE_SPEC = P()
GRID = {"a": 2, "b": 4}
N = 16 * 24 * 4  # bytes of the array that the bodies sum


@dataclasses.dataclass(frozen=True)
class Region:
    """A region, what reads its results, and the bytes of each kind that a device sends."""

    body: Function
    then: Function
    sends: dict[str, int]
    axes: dict[str, int] = dataclasses.field(default_factory=lambda: LINE)
    out: Any = WHOLE_SPEC
    names: str = ""
    checked: tuple[bool, ...] = (True,)
    exact: bool = False
    explicit: bool = False


def to(*spec):
    """A constraint over the axes of the mesh that the program has."""
    return lambda mesh, y: lax.with_sharding_constraint(y, NamedSharding(mesh, P(*spec)))


def both(*readers):
    return lambda mesh, y: tuple(reader(mesh, y) for reader in readers)


def product(x, w):
    return x.T @ w


def psum(x, w):
    return lax.psum(product(x, w), "a")


def whole_grid(x, w):
    return lax.psum(product(x, w), ("b", "a"))


def in_bfloat16(x, w):
    return lax.psum(product(x, w).astype(jnp.bfloat16), "a").astype(jnp.float32)


def whole_numbers(x, w):
    return lax.psum((product(x, w) * 10).astype(jnp.int32), "a")


def several(x, w):
    y = product(x, w)
    return lax.psum(y, "a"), lax.psum({"mean": y * 2, "number": y.sum()}, "a"), x * 2


def read_inside(x, w):
    y = lax.psum(product(x, w), "a")
    return y, x * y.sum()


def extremes(x, w):
    y = product(x, w)
    return lax.pmax(jnp.where(y > 9, jnp.nan, y), "a"), lax.pmin(jnp.where(y > 0, -0.0, y), "a")


ROWS, WHOLE = to("a"), to()
SCATTERED, REDUCED = N * 7 // 8, 2 * N * 7 // 8

REGIONS = {
    "rows": Region(psum, ROWS, {"reduce_scatter": SCATTERED}, checked=(True, False)),
    "whole": Region(psum, WHOLE, {"all_reduce": REDUCED}, exact=True),
    "read by a sum and in rows": Region(
        psum, both(lambda mesh, y: jnp.sum(y * y), ROWS), {"reduce_scatter": SCATTERED, "all_reduce": 2 * 4 * 7 // 8}
    ),
    "bfloat16": Region(in_bfloat16, ROWS, {"reduce_scatter": SCATTERED // 2}),
    "integers": Region(whole_numbers, ROWS, {"reduce_scatter": SCATTERED}, exact=True),
    "several": Region(
        several,
        lambda mesh, r: (ROWS(mesh, r[0]), ROWS(mesh, r[1]["mean"]), r[1]["number"], r[2]),
        {"reduce_scatter": 2 * SCATTERED, "all_reduce": 2 * 4 * 7 // 8},
        out=(P(), {"mean": P(), "number": P()}, P("a")),
    ),
    "read inside": Region(
        read_inside, lambda mesh, r: (ROWS(mesh, r[0]), r[1]), {"all_reduce": REDUCED}, out=(P(), P("a")),
        checked=(False,),
    ),
    "extremes": Region(
        extremes, lambda mesh, r: [ROWS(mesh, y) for y in r], {"all_reduce": 2 * REDUCED}, out=(P(), P()), exact=True,
        checked=(False,),
    ),
    "uneven": Region(
        lambda x, w: lax.psum(product(x[:, :13], w), "a"), lambda mesh, y: jnp.sin(ROWS(mesh, y)).sum(),
        {"reduce_scatter": SCATTERED, "all_reduce": 2 * 4 * 7 // 8},
    ),
    "the spec names the axis": Region(psum, ROWS, {"all_reduce": REDUCED}, out=P("a"), checked=(False,)),
    "explicit": Region(
        psum, lambda mesh, y: jax.sharding.reshard(y, NamedSharding(mesh, P("a"))), {"reduce_scatter": SCATTERED},
        explicit=True,
    ),
    "two axes": Region(whole_grid, to(("a", "b")), {"reduce_scatter": SCATTERED}, axes=GRID),
    "one of two axes": Region(psum, to("a"), {"reduce_scatter": N // 2}, axes=GRID, checked=(False,)),
    "partly manual": Region(psum, to("a"), {"reduce_scatter": N // 2}, axes=GRID, names="a"),
    "partly manual, read inside": Region(
        read_inside, lambda mesh, r: (to("a")(mesh, r[0]), r[1]), {"all_gather": N * 3 // 8, "all_reduce": N // 4 + 6},
        axes=GRID, names="a", out=(P(), P("a")),
    ),
}  # fmt: skip


def function_of(region, mesh, checked):
    spec = P(("b", "a")) if region.body is whole_grid else P("a")
    names = set(region.names) if region.names else set(region.axes)
    mapped = jax.shard_map(
        region.body, mesh=mesh, in_specs=(spec, spec), out_specs=region.out, axis_names=names, check_vma=checked
    )

    def f(x, w):
        if region.explicit:
            x, w = jax.sharding.reshard((x, w), NamedSharding(mesh, spec))
        return region.then(mesh, mapped(x, w))

    return f


def same(got, want, *, exact):
    assert jax.tree.map(lambda x: (x.shape, x.dtype), got) == jax.tree.map(lambda x: (x.shape, x.dtype), want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        np.testing.assert_allclose(a, b, rtol=0 if exact else 2e-5, atol=0 if exact else 2e-5)
        if exact:
            np.testing.assert_array_equal(np.signbit(a), np.signbit(b))


@pytest.mark.parametrize(("name", "checked"), [(name, checked) for name, r in REGIONS.items() for checked in r.checked])
def test_a_sum_is_finished_as_it_is_read(name, checked, rng):
    region = REGIONS[name]
    mesh = mesh_of(explicit=region.explicit, **region.axes)
    f = function_of(region, mesh, checked)
    x, w = rng.standard_normal((32, 16), np.float32), rng.standard_normal((32, 24), np.float32)
    partitioned, want = gshard.jit(f, mesh=mesh), jax.jit(f)(x, w)
    for got in three_calls(partitioned, mesh, x, w):
        same(got, want, exact=region.exact)
    spmd = partitioned.lower(x, w).spmd
    assert emitted(spmd.jaxpr, spmd.mesh.atom_sizes) == reported(spmd.collectives)
    assert gshard.explain(f, x, w, mesh=mesh).bytes_by_kind == region.sends


def mapped_layer(checked):
    """A layer whose body gets whole weights, as the experts of MaxText do."""
    specs = P(), P("a")
    return jax.shard_map(
        lambda w, x: jnp.tanh(x @ w), mesh=mesh_of(**LINE), in_specs=specs, out_specs=P("a"), check_vma=checked
    )


def gradient(layer):
    return jax.grad(lambda w, x: jnp.sum(layer(w, x) ** 2))


def in_a_loop(layer, w, x):
    return lax.scan(lambda y, scale: (layer(w * scale, y), None), x, jnp.arange(3.0))[0]


SQUARE = 32 * 32 * 4 * 7 // 8  # bytes to scatter or to gather a weight

# What is computed with a layer, and how often a gradient is scattered.
GRADIENTS = {
    "a step": (lambda layer: lambda w, x: w - gradient(layer)(w, x[0]), 1),
    "added in a loop": (
        lambda layer: lambda w, x: lax.scan(lambda c, x: (c + gradient(layer)(w, x), None), jnp.zeros_like(w), x)[0], 1
    ),
    "of layers in a loop": (lambda layer: lambda w, x: gradient(functools.partial(in_a_loop, layer))(w, x[0]), 3),
}  # fmt: skip


@pytest.mark.parametrize(("name", "checked"), list(zip(GRADIENTS, (True, False, True), strict=True)))
def test_gradients_of_whole_weights_are_scattered(name, checked, rng):
    mesh = mesh_of(**LINE)
    of_layer, times = GRADIENTS[name]
    rows = NamedSharding(mesh, P("a"))

    def f(w, x):
        return lax.with_sharding_constraint(of_layer(mapped_layer(checked))(w, x), rows)

    w, x = rng.standard_normal((32, 32), np.float32), rng.standard_normal((4, 16, 32), np.float32)
    partitioned, want = gshard.jit(f, mesh=mesh), jax.jit(f)(w, x)
    for got in three_calls(partitioned, mesh, w, x):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    found = gshard.explain(f, jax.device_put(w, rows), jax.device_put(x, NamedSharding(mesh, P(None, "a"))), mesh=mesh)
    assert found.bytes_by_kind["reduce_scatter"] == times * SQUARE
    assert "all_reduce" not in found.bytes_by_kind
