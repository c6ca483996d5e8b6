"""A partitioned function under JAX's own transformations computes what the function itself does under them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import checkpoint_policies
from jax._src.ad_checkpoint import saved_residuals
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import jet, sparse

import gshard
from gshard.xla.hlo_collectives import collectives
from placed import mesh_of, three_calls

Weights = dict[str, Any]


def loss(w: Weights, x: Any) -> Any:
    x = gshard.split(x, 0, 8)
    h = jnp.tanh(x @ w["a"])
    return jnp.mean((h @ w["b"]) ** 2)


@pytest.fixture
def arguments(rng: np.random.Generator) -> tuple[Weights, Any, Any]:
    w = {"a": rng.standard_normal((12, 16), np.float32), "b": rng.standard_normal((16, 5), np.float32)}
    return w, rng.standard_normal((24, 12), np.float32), rng.standard_normal((3, 24, 12), np.float32)


def over_scan(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda w, x, xs: jax.lax.scan(lambda c, v: (c + f(w, v), c), 0.0, xs)


def hessian_vector(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda w, x, xs: jax.jvp(jax.grad(lambda v: f(w, v)), (x,), (xs[0],))[1]


TRANSFORMATIONS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "jit": lambda f: lambda w, x, xs: jax.jit(f)(w, x),
    "grad": lambda f: lambda w, x, xs: jax.grad(f)(w, x),
    "jit of grad": lambda f: lambda w, x, xs: jax.jit(jax.grad(f))(w, x),
    "value_and_grad": lambda f: lambda w, x, xs: jax.value_and_grad(f, argnums=1)(w, x),
    "jvp": lambda f: lambda w, x, xs: jax.jvp(f, (w, x), (w, x)),
    "vmap": lambda f: lambda w, x, xs: jax.vmap(f, in_axes=(None, 0))(w, xs),
    "vmap of grad": lambda f: lambda w, x, xs: jax.jit(jax.vmap(jax.grad(f), in_axes=(None, 0)))(w, xs),
    "grad of vmap": lambda f: lambda w, x, xs: jax.grad(lambda v: jnp.sum(jax.vmap(f, in_axes=(None, 0))(v, xs)))(w),
    "checkpoint": lambda f: lambda w, x, xs: jax.jit(jax.grad(lambda v: jax.checkpoint(f)(v, x)))(w),
    "checkpoint, outside of jit": lambda f: lambda w, x, xs: jax.grad(lambda v: jax.checkpoint(f)(v, x))(w),
    "scan": lambda f: lambda w, x, xs: jax.jit(over_scan(f))(w, x, xs),
    "grad of scan": lambda f: lambda w, x, xs: jax.jit(jax.grad(lambda v: over_scan(f)(v, x, xs)[0]))(w),
    "second derivative": hessian_vector,
    "jit of second derivative": lambda f: jax.jit(hessian_vector(f)),
    "grad of a norm of grad": lambda f: (
        lambda w, x, xs: jax.grad(lambda v: jnp.sum(jax.grad(lambda u: f(w, u))(v) ** 2))(x)
    ),
    "jet": lambda f: lambda w, x, xs: jet.jet(lambda v: f(w, v), (x,), [list(xs[:2])]),
    "jit of jet": lambda f: jax.jit(lambda w, x, xs: jet.jet(lambda v: f(w, v), (x,), [list(xs)])),
    "sparsify": lambda f: (
        lambda w, x, xs: sparse.sparsify(f)(w | {"a": sparse.BCOO.fromdense(jnp.tril(jnp.asarray(w["a"])), nse=180)}, x)
    ),
    "another gshard.jit": lambda f: lambda w, x, xs: gshard.jit(lambda v: f(w, v) + 1, mesh=8)(x),
    "a step under another gshard.jit": lambda f: lambda w, x, xs: gshard.jit(jax.grad(f), mesh=8)(w, x),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
@pytest.mark.one_in(2)
def test_transformations_of_a_partitioned_function(name: str, arguments: tuple[Weights, Any, Any]) -> None:
    transform = TRANSFORMATIONS[name]
    got = transform(gshard.jit(loss, mesh=8))(*arguments)
    want = transform(loss)(*arguments)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=3e-5, atol=3e-5), got, want)


def test_a_derivative_is_partitioned_too(arguments: tuple[Weights, Any, Any]) -> None:
    """What backward needs of the forward half comes sharded as it is: one all-reduce of the gradients, no gather."""
    w, x, _ = arguments
    compiled = jax.jit(jax.grad(gshard.jit(loss, mesh=8))).lower(w, x).compile()
    kinds = {c.kind for c in collectives(compiled.as_text())}
    assert kinds == {"all_reduce"}


def test_a_derivative_is_planned_once(arguments: tuple[Weights, Any, Any]) -> None:
    w, x, _ = arguments
    traced = 0

    def counted(w: Weights, x: Any) -> Any:
        nonlocal traced
        traced += 1
        return loss(w, x)

    gradient = jax.grad(gshard.jit(counted, mesh=8))
    gradient(w, x)
    gradient(w, x)
    assert traced == 1


def test_marks_of_results_and_arguments_hold_inside(arguments: tuple[Weights, Any, Any]) -> None:
    _, x, _ = arguments
    spec = jax.sharding.PartitionSpec("devices")
    doubled = gshard.jit(lambda v: v * 2, mesh=8, in_shardings=(spec,), out_shardings=spec)
    out = jax.jit(doubled)(x)
    np.testing.assert_array_equal(out, 2 * x)
    assert out.sharding.shard_shape(out.shape) == (3, 12)


def test_integers_have_no_derivative(rng: np.random.Generator) -> None:
    table, at = rng.standard_normal((10, 4), np.float32), np.array([3, 1, 9, 3], np.int32)

    def looked_up(table: Any, at: Any) -> tuple[Any, Any]:
        table = gshard.split(table, 0, 8)
        return jnp.sum(table[at] ** 2), at + 1

    def gradient(f: Callable[..., Any]) -> Any:
        return jax.grad(lambda t: f(t, at)[0])(table)

    np.testing.assert_allclose(gradient(gshard.jit(looked_up, mesh=8)), gradient(looked_up), rtol=1e-6)


def test_random_keys_pass_through(rng: np.random.Generator) -> None:
    x = rng.standard_normal((16, 3), np.float32)

    def noisy(key: Any, x: Any) -> Any:
        x = gshard.split(x, 0, 8)
        return jnp.sum(x * jax.random.normal(key, x.shape))

    key = jax.random.key(3)
    got = jax.grad(gshard.jit(noisy, mesh=8), argnums=1)(key, x)
    # The same bits; the normal numbers made of them may differ in the last place between arrays of other shapes.
    np.testing.assert_allclose(got, jax.grad(noisy, argnums=1)(key, x), rtol=1e-6)


POLICIES = {
    "names": checkpoint_policies.save_only_these_names("h"),
    "offload": checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=(),
        names_which_can_be_offloaded=("h",),
        offload_src="device",
        offload_dst="pinned_host",
    ),
    "products": checkpoint_policies.dots_saveable,
    "nothing": checkpoint_policies.nothing_saveable,
}


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_of_checkpoint_selects_values_inside(name: str, rng: np.random.Generator) -> None:
    w, x = rng.standard_normal((3, 16, 16), np.float32) / 8, rng.standard_normal((64, 16), np.float32)

    def layer(x: Any, w: Any) -> Any:
        return jnp.sin(checkpoint_name(jnp.tanh(gshard.split(x, 0, 8) @ w), "h") @ w.T)

    def gradient(layer: Callable[..., Any], **policy: Any) -> Callable[..., Any]:
        body = jax.checkpoint(layer, **policy)
        return jax.grad(lambda w, x: jnp.sum(jax.lax.scan(lambda c, w: (body(c, w), None), x, w)[0] ** 2))

    partitioned, policy = gshard.jit(layer, mesh=8), POLICIES[name]
    shapes = [
        sorted(str(aval) for aval, _ in saved_residuals(jax.checkpoint(f, policy=policy), x, w[0]))
        for f in (partitioned, jax.jit(layer))
    ]
    assert shapes[0] == shapes[1]
    want = jax.jit(gradient(layer))(w, x)
    for run in (
        jax.jit(gradient(partitioned, policy=policy)),
        gshard.jit(gradient(partitioned, policy=policy), mesh=8),
    ):
        for got in three_calls(run, mesh_of(d=8), w, x):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    text = run.trace(w, x).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("annotate_device_placement") == (2 if name == "offload" else 0)


@pytest.mark.parametrize("wrapped", [lambda f: f, jax.jit, gshard.jit(mesh=8)])
def test_a_reducer_can_be_partitioned(wrapped: Callable[..., Any]) -> None:
    """XLA takes no region for all devices as a reducer: a call of scalars is as the function itself."""
    reducer = gshard.jit(lambda a, b: a + b, mesh=8)
    f = wrapped(lambda x: jax.lax.reduce(x, np.float32(0), reducer, (0,)))
    x = np.arange(64, dtype=np.float32)
    for got in three_calls(f, mesh_of(d=8), x):
        assert got == x.sum()
