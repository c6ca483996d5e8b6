"""Steps that frameworks jit are partitioned in a block of instead_of_jit: equal losses, state as it came."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gshard

MESH = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
SPLIT = NamedSharding(MESH, P("data"))
X = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)


class MLP(nnx.Module):
    """Two layers, with state of all kinds: weights, statistics, a counter of keys."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first, self.second = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 32, rngs=rngs)
        self.norm, self.dropout = nnx.BatchNorm(64, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.second(self.dropout(self.norm(nnx.gelu(self.first(x)))))


def nnx_step(model: Any, optimizer: Any, x: Any) -> Any:
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - x) ** 2))(model)
    optimizer.update(model, grads)
    return loss


# As most programs have it: decorated when the module is imported, far from any block.
jitted_nnx_step = functools.partial(nnx.jit, donate_argnames=("model", "optimizer"))(nnx_step)


def train_nnx(step: Callable[..., Any], place: bool) -> tuple[list[float], Any]:
    model = MLP(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    if place:  # FSDP: weights and moments of Adam are split where they divide
        state = nnx.state((model, optimizer))
        placed = jax.tree.map(lambda x: jax.device_put(x, SPLIT) if np.ndim(x) and x.shape[0] % 8 == 0 else x, state)
        nnx.update((model, optimizer), placed)
    losses = [float(step(model, optimizer, jax.device_put(X, SPLIT) if place else X)) for _ in range(3)]
    return losses, model.first.kernel[...]


def loss_of(model: Any, x: Any) -> Any:
    return jnp.mean((jax.vmap(model)(x) - x) ** 2)


OPTIMIZER = optax.adam(1e-2)


def eqx_step(model: Any, state: Any, x: Any, kind: str) -> Any:
    assert kind == "train"
    loss, grads = eqx.filter_value_and_grad(loss_of)(model, x)
    updates, state = OPTIMIZER.update(grads, state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), state, loss, kind


jitted_eqx_step = eqx.filter_jit(eqx_step, donate="all-except-first")


def train_eqx(step: Callable[..., Any], place: bool) -> tuple[list[float], Any]:
    model = eqx.nn.MLP(32, 32, 64, 1, key=jax.random.key(0))  # its activation function is a leaf too
    state = OPTIMIZER.init(eqx.filter(model, eqx.is_array))
    losses = []
    for _ in range(3):
        x = jax.device_put(X, SPLIT) if place else jnp.asarray(X)
        model, state, loss, kind = step(model, state, gshard.split(x, 0, 8) if not place else x, "train")
        assert kind == "train"
        assert model.activation is not None
        losses.append(float(loss))
    return losses, model.layers[0].weight


class Linen(nn.Module):
    """The same in Flax Linen."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(32)(nn.gelu(nn.Dense(64)(x)))


def linen_step(state: Any, x: Any) -> Any:
    loss, grads = jax.value_and_grad(lambda p: jnp.mean((state.apply_fn({"params": p}, x) - x) ** 2))(state.params)
    return state.apply_gradients(grads=grads), loss


jitted_linen_step = jax.jit(linen_step, donate_argnums=0)


def train_linen(step: Callable[..., Any], place: bool) -> tuple[list[float], Any]:
    model = Linen()
    params = model.init(jax.random.key(0), X)["params"]
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=OPTIMIZER)
    losses = []
    for _ in range(3):
        state, loss = step(state, jax.device_put(X, SPLIT) if place else X)
        losses.append(float(loss))
    return losses, state.params["Dense_0"]["kernel"]


STEPS: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[[], Any]]] = {
    "nnx": (train_nnx, jitted_nnx_step, lambda: nnx.jit(nnx_step)),
    "equinox": (train_eqx, jitted_eqx_step, lambda: eqx.filter_jit(eqx_step)),
    "linen": (train_linen, jitted_linen_step, lambda: jax.jit(linen_step)),
}
FAST = {("nnx", True, "before")}


@pytest.mark.parametrize(
    ("framework", "place", "when"),
    [
        pytest.param(*case, marks=[] if case in FAST else pytest.mark.slow)
        for case in itertools.product(STEPS, (True, False), ("before", "inside"))
    ],
)
def test_three_steps(framework: str, place: bool, when: str) -> None:
    """Jitted before the block or in it, the losses are those of one device; outside it trains as ever."""
    train, before, jit = STEPS[framework]
    expected, _ = train(before if when == "before" else jit(), False)
    with gshard.instead_of_jit(mesh=MESH):
        found, weight = train(before if when == "before" else jit(), place)
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert len(weight.sharding.device_set) == 8
    if place and framework == "nnx":
        assert weight.sharding.spec == P("data")
    if when == "before":
        after, weight = train(before, False)
        assert after == expected
        assert len(weight.sharding.device_set) == 1


def test_equinox_lowered() -> None:
    model = eqx.nn.MLP(32, 32, 64, 1, key=jax.random.key(0))
    state = OPTIMIZER.init(eqx.filter(model, eqx.is_array))
    with gshard.instead_of_jit(mesh=MESH):
        lowered = jitted_eqx_step.lower(model, state, jax.device_put(X, SPLIT), "train")
        assert isinstance(lowered.lowered, gshard.stages.Lowered)
        compiled = lowered.compile()
        found = compiled(model, state, jax.device_put(X, SPLIT), "train")[2]
    np.testing.assert_allclose(found, loss_of(model, X), rtol=1e-5)
