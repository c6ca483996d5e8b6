"""A user's program for type checkers. ``make types`` and ``test_types.py`` run them on it in strict mode."""

from typing import Any, NamedTuple, assert_type

import jax
import jax.numpy as jnp

import gshard


class State(NamedTuple):
    w: jax.Array
    step: int


def update(state: State, x: jax.Array, rate: float = 0.1) -> State:
    state, x = gshard.split((state, x), 0, "data")
    assert_type(state, State)
    assert_type(x, jax.Array)
    return State(state.w - rate * jnp.sum(x @ state.w), state.step + 1)


# What jit returns has the types of the function: called, as a decorator, and with options.
step = gshard.jit(update, mesh={"data": 4, "model": 2}, donate_argnames="state")


@gshard.jit
def plain(x: jax.Array, n: int) -> tuple[jax.Array, int]:
    return x, n


@gshard.jit(mesh=8, static_argnums=1, machine="h100:1x8")
def scaled(x: jax.Array, n: int) -> jax.Array:
    return gshard.split(x, 0, 8) * n


class Model:
    """Methods keep the types of their arguments without ``self``."""

    @gshard.jit(mesh=8, static_argnums=0)
    def double(self, x: jax.Array) -> jax.Array:
        return gshard.split(x, dim=0, over="devices") * 2

    @gshard.jit
    def plain(self, x: jax.Array) -> jax.Array:
        return x


def trained(run: gshard.stages.Jitted[[State, jax.Array], State], state: State, x: jax.Array) -> State:
    assert isinstance(run, gshard.stages.Jitted)
    return run(state, x)


def calls(state: State, x: jax.Array) -> None:
    assert_type(step(state, x, rate=0.2), State)
    assert_type(step.on(8)(state, x), State)
    assert_type(plain.on(8)(x, 3), tuple[jax.Array, int])
    assert_type(scaled(x, 3), jax.Array)
    assert_type(Model().double(x), jax.Array)


def stages(state: State, shape: jax.ShapeDtypeStruct) -> None:
    lowered = step.lower(state, shape)
    assert_type(lowered, gshard.stages.Lowered)
    assert_type(lowered.plan, gshard.stages.Plan)
    assert_type(lowered.spmd, gshard.stages.SpmdProgram)
    assert_type(lowered.compile(), gshard.stages.Compiled)
    assert_type(gshard.stages.compile(lowered.spmd), gshard.stages.Executable)
    assert_type(lowered.as_text(), str)
    step.trace(state, shape).lower()
    assert_type(step.eval_shape(state, shape), Any)
    assert_type(step.clear_cache(), None)


def marks(x: jax.Array, tree: dict[str, jax.Array], spec: jax.P) -> None:
    assert_type(gshard.split(x, 0, "data"), jax.Array)
    assert_type(gshard.split(x, {0: "data", 1: ("model",)}), jax.Array)
    assert_type(gshard.split(tree, 0, ("data", "model")), dict[str, jax.Array])
    assert_type(gshard.replicate(tree), dict[str, jax.Array])
    assert_type(gshard.shard(tree, spec), dict[str, jax.Array])
    assert_type(gshard.shard_by_path(tree, {"**": spec}), dict[str, jax.Array])
    assert_type(gshard.name(x, "batch embed"), jax.Array)


def explained(state: State, x: jax.Array) -> None:
    found = gshard.explain(update, state, x, mesh=gshard.Mesh.abstract(data=8), machine="h100:1x8")
    assert_type(found, gshard.stages.Explanation)
    assert_type(found.cost().seconds, float)
    assert_type(found.total_bytes, int)
    assert_type(found.lists["unused"], tuple[str, ...])


def searched(x: jax.Array) -> None:
    mesh = gshard.Mesh.abstract(data=8)
    found = gshard.search(plain, x, 3, mesh=mesh, machine="h100:1x8")
    assert_type(found, gshard.stages.SearchResult)
    assert_type(found.plan, gshard.stages.Plan)


def mistakes(state: State, x: jax.Array) -> None:
    """Each ``ignore`` is needed: an unused one is an error in strict mode."""
    step(x, state)  # type: ignore[arg-type]
    plain(x, 3, rate=1)  # type: ignore[call-arg]
    Model().double(3)  # type: ignore[arg-type]
    gshard.jit(update, mseh=8)  # type: ignore[call-overload]
    gshard.split(x, "data")  # type: ignore[call-overload]
    gshard.jitt(update)  # type: ignore[attr-defined]
