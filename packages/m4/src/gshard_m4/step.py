"""The training step: one pure function of a state and a batch, and the one place where it is compiled.

`make_step` is written for one device: gradients of the model's loss, then Adafactor. `compile_step` is the only
place that knows of devices: it hands the step to `gshard.jit`, which partitions it as the marks in the MoE layers ask.

A step depends on the state and the batch alone, dropout and the coins of the second expert included: their key is
folded from the seed and the number of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

import gshard
from gshard import moe
from gshard_m4 import optimizer
from gshard_m4.config import TrainConfig

Batch = Mapping[str, Any]
"""``source`` and ``target``, int32 [B, L]: ids, 0 where padded; targets end in 1."""

State = dict[str, Any]
"""``params``, ``moments`` of the optimizer, and int32 ``step`` and ``skipped``: the number of steps taken, and of those
among them that changed nothing because their loss or gradient was not finite."""

Metrics = dict[str, jax.Array]
"""Float32 scalars by name."""


def initial_state(model: moe.TransformerConfig, seed: int, like: State | None = None) -> State:
    """The state before the first step.

    Args:
        model: the model.
        seed: of its parameters.
        like: `jax.ShapeDtypeStruct` with the sharding in which each array is made; on one device if None.
    """

    def make() -> State:
        return {
            "params": moe.init(model, jax.random.key(seed)),
            "moments": optimizer.init(moe.param_specs(model)),
            "step": jnp.int32(0),
            "skipped": jnp.int32(0),
        }

    shardings = jax.tree.map(lambda x: x.sharding, like)  # of nothing is nothing
    return jax.jit(make, out_shardings=shardings)()  # one program instead of one for each array


def make_step(model: moe.TransformerConfig, options: TrainConfig) -> Callable[[State, Batch], tuple[State, Metrics]]:
    """The update as a pure function of state and batch.

    A loss or gradient that is not finite leaves parameters and moments as they are and is counted in ``skipped``.

    With ``options.accumulate`` A above 1 the rows of a batch are dealt out to A micro-batches, one after the other.
    Their gradients are added up, weighted by their target tokens, so that the cross entropy is that of the whole
    batch; groups of tokens, and with them what is dropped and the auxiliary loss, are those of a micro-batch. What the
    loop adds to directly, the gradients of embeddings and final norms, is combined among the devices once, after the
    last micro-batch; those of the stacked layers, which come out of a loop of their own, in every micro-batch.
    """
    specs = moe.param_specs(model)

    def gradients(params: Any, batch: Batch, key: jax.Array, weight: Any = None) -> tuple[Any, Metrics]:
        def objective(params: Any) -> tuple[jax.Array, Metrics]:
            value, metrics = moe.loss(model, params, dict(batch), key=key, label_smoothing=options.label_smoothing)
            # The loss is weighted, not its gradients: parts of a sum are not scaled before they are combined.
            return value if weight is None else weight * value, metrics

        (_, metrics), grads = jax.value_and_grad(objective, has_aux=True)(params)
        return grads, metrics

    def accumulated(params: Any, batch: Batch, key: jax.Array) -> tuple[Any, Metrics]:
        parts = {name: deal(ids, options.accumulate) for name, ids in batch.items()}
        tokens_A = jnp.sum(parts["target"] != 0, axis=(1, 2)).astype(jnp.float32)
        weights_A = tokens_A / jnp.maximum(jnp.sum(tokens_A), 1.0)

        def add(total: Any, part: tuple[Batch, jax.Array, jax.Array]) -> tuple[Any, None]:
            micro_batch, weight, number = part
            found, metrics = gradients(params, micro_batch, jax.random.fold_in(key, number), weight)
            weighted = found, jax.tree.map(lambda x: weight * x, metrics)
            return jax.tree.map(jnp.add, total, weighted), None

        nothing = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype),
            jax.eval_shape(gradients, params, {name: ids[0] for name, ids in parts.items()}, key),
        )
        (grads, metrics), _ = jax.lax.scan(add, nothing, (parts, weights_A, jnp.arange(options.accumulate)))
        return grads, {**metrics, "tokens": jnp.sum(tokens_A)}

    def train_step(state: State, batch: Batch) -> tuple[State, Metrics]:
        key = jax.random.fold_in(jax.random.key(options.seed), state["step"])
        find = gradients if options.accumulate == 1 else accumulated
        grads, metrics = find(state["params"], batch, key)
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(grads)))
        finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(norm)
        updated = optimizer.update(grads, state["moments"], state["params"], state["step"], specs, options.optimizer)
        params, moments = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old), updated, (state["params"], state["moments"])
        )
        skipped = state["skipped"] + jnp.where(finite, 0, 1).astype(jnp.int32)
        rate = optimizer.learning_rate(state["step"], options.optimizer)
        state = {"params": params, "moments": moments, "step": state["step"] + 1, "skipped": skipped}
        return state, {**metrics, "gradient_norm": norm, "learning_rate": rate, "skipped": skipped.astype(jnp.float32)}

    return train_step


def deal(ids_BL: jax.Array, hands: int) -> jax.Array:
    """Rows dealt out like cards, [B, L] -> [hands, B / hands, L]: each hand has rows from all over the batch.

    >>> deal(jnp.arange(4)[:, None], 2)[:, :, 0].tolist()
    [[0, 2], [1, 3]]
    """
    B, L = ids_BL.shape
    return jnp.swapaxes(jnp.reshape(ids_BL, (B // hands, hands, L)), 0, 1)


def make_evaluation(model: moe.TransformerConfig) -> Callable[[Any, Batch], tuple[jax.Array, jax.Array]]:
    """Cross entropy and number of target tokens of a batch: no dropout, no coins, no smoothing."""

    def evaluation_step(params: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        _, metrics = moe.loss(model, params, dict(batch), key=None, label_smoothing=0.0)
        return metrics["cross_entropy"], metrics["tokens"]

    return evaluation_step


def compile_step(
    step: Callable[..., Any],
    mesh: int | Mapping[str, int] | gshard.Mesh,
    *,
    donate: bool = True,
    memory_limit: str | None = None,
    search: bool = False,
) -> Callable[..., Any]:
    """Makes `step` run on devices.

    Args:
        step: a function of a state and a batch, written for one device.
        mesh: the number of devices, the first there are; more than one partitions the step. Or the sizes of its axes,
            or a mesh.
        donate: whether the new state may take the memory of the old one.
        memory_limit: what a device may hold, such as ``"14GiB"``; what does not fit is recomputed.
        search: whether a plan is searched, instead of following from the marks alone.
    """
    donated = (0,) if donate else ()
    if mesh == 1 and memory_limit is None:
        return jax.jit(step, donate_argnums=donated)
    made = gshard.jit(step, mesh=mesh, donate_argnums=donated, memory_limit=memory_limit, search=search and mesh != 1)
    return made  # type: ignore[no-any-return]


def held_out_cross_entropy(evaluate: Callable[..., Any], params: Any, batches: Iterable[Batch]) -> float:
    """Mean over the tokens of all batches, in nats."""
    total = tokens = 0.0
    for batch in batches:
        value, count = evaluate(params, batch)
        total += float(value) * float(count)
        tokens += float(count)
    return total / max(tokens, 1.0)
