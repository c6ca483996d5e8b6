"""Adafactor, as the GShard paper trained with it: no momentum, factored second moments, relative steps.

The second moment of a matrix's gradient is kept as its row means and column means only (Shazeer and Stern,
2018), so an expert of M x H weights costs M + H numbers of optimizer state. Two things differ from the
common implementations, which decide by size which dimensions to average over:

* A parameter's *named* dimensions say which are stacks of variables. ``layers`` and ``experts`` are such
  batch dimensions and are never averaged over, however large they are; the two largest of the others are
  the rows and columns.
* The size of a parameter and the clipping of its update are measured per layer: one index of ``layers`` is
  one variable, and the experts of one layer are one variable together.

The learning rate of the paper ("1.0 with square root decay after 10k steps") is `learning_rate`:
``rsqrt(max(step, 10000))``, a flat 0.01 and then ``1/sqrt(step)``, relative to the size of the parameter.
The paper's "beta2 = 0.99" is not used by the code that trained it: the decay is ``1 - (t + 1)**-0.8``.

>>> import jax.numpy as jnp
>>> from gshard.moe import Param
>>> specs = {"w": Param((2, 3, 4), ("layers", "model", "hidden"))}
>>> state = init(specs)
>>> {name: moment.shape for name, moment in state["w"].items()}
{'row': (2, 3), 'column': (2, 4)}
>>> params = {"w": jnp.ones((2, 3, 4))}
>>> params, state = update({"w": jnp.ones((2, 3, 4))}, state, params, jnp.int32(0), specs, Adafactor(peak_step=100))
>>> print(f"{params['w'][0, 0, 0]:.3f}")
0.900
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from gshard.moe import Param

Specs: TypeAlias = Mapping[str, Any]
"""Nested dictionaries with a `gshard.moe.Param` at every leaf."""

Moments: TypeAlias = dict[str, Any]
"""The tree of the parameters with ``{"row", "column"}`` or ``{"full"}`` at every leaf, all float32."""


@dataclass(frozen=True, slots=True)
class Adafactor:
    """The constants of the update; the defaults are those of the paper (appendix A.2).

    Attributes:
        scale: factor of the learning rate.
        peak_step: the step until which the learning rate is flat; it falls as ``1/sqrt(step)`` after it.
        warmup_steps: steps of linear growth at the start; 0 for none, as in the paper.
        steps, cooldown_steps: the number of all steps, and of those at the end in which the learning rate falls
            linearly to zero; 0 for none, as in the paper.
        decay_exponent: the second moments decay by ``1 - (step + 1)**-decay_exponent``.
        clip: the largest root mean square of an update before the learning rate is applied.
        smallest_size: floor under a parameter's root mean square, so that a zero parameter can move.
        epsilon: added to squared gradients.
    """

    scale: float = 1.0
    peak_step: int = 10_000
    warmup_steps: int = 0
    steps: int = 0
    cooldown_steps: int = 0
    decay_exponent: float = 0.8
    clip: float = 1.0
    smallest_size: float = 1e-3
    epsilon: float = 1e-30


def learning_rate(step: jax.Array | int, config: Adafactor = Adafactor()) -> jax.Array:
    """The relative step size at `step`, counted from 0.

    It is ``scale * rsqrt(max(step, peak_step))`` between the warm-up and the cool-down.
    """
    step = jnp.asarray(step, jnp.float32)
    rate = config.scale * jax.lax.rsqrt(jnp.maximum(step, float(max(config.peak_step, 1))))
    if config.warmup_steps:
        rate = rate * jnp.minimum(1.0, (step + 1.0) / config.warmup_steps)
    if config.cooldown_steps:
        rate = rate * jnp.clip((config.steps - step) / config.cooldown_steps, 0.0, 1.0)
    return rate


def init(specs: Specs) -> Moments:
    """Zero second moments for the parameters that `specs` describe."""

    def zeros(spec: Param) -> dict[str, jax.Array]:
        matrix = spec.factor_axes
        if matrix is None:
            return {"full": jnp.zeros(spec.shape, jnp.float32)}
        row, column = matrix
        return {
            "row": jnp.zeros(_without(spec.shape, column), jnp.float32),
            "column": jnp.zeros(_without(spec.shape, row), jnp.float32),
        }

    return jax.tree.map(zeros, dict(specs))


def update(
    grads: Any, state: Moments, params: Any, step: jax.Array | int, specs: Specs, config: Adafactor = Adafactor()
) -> tuple[Any, Moments]:
    """Takes one step; pure.

    Args:
        grads: gradients, a tree like `params`.
        state: what `init` or the last `update` returned.
        params: the parameters; each keeps its dtype, the arithmetic is float32.
        step: steps taken before this one; the first is 0.
        specs: the descriptions of the parameters, a tree like `params`.
        config: the constants.

    Returns:
        The new parameters and the new state.
    """
    step = jnp.asarray(step, jnp.float32)
    decay = 1.0 - (step + 1.0) ** -config.decay_exponent
    rate = learning_rate(step, config)

    def one(spec: Param, *leaves: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        grad, moments, param = leaves
        return _update_one(spec, grad, moments, param, decay, rate, config)

    described = dict(specs)
    pairs = jax.tree.map(one, described, grads, state, params)
    new_params = jax.tree.map(lambda _, pair: pair[0], described, pairs)
    new_state = jax.tree.map(lambda _, pair: pair[1], described, pairs)
    return new_params, new_state


def _update_one(
    spec: Param,
    grad: jax.Array,
    moments: dict[str, jax.Array],
    param: jax.Array,
    decay: jax.Array,
    rate: jax.Array,
    config: Adafactor,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The step of one parameter (Shazeer and Stern, algorithms 4 and 5)."""
    g = grad.astype(jnp.float32)
    value = param.astype(jnp.float32)
    squared = jnp.square(g) + config.epsilon

    matrix = spec.factor_axes
    if matrix is None:
        full = decay * moments["full"] + (1.0 - decay) * squared
        moments = {"full": full}
        direction = g * jax.lax.rsqrt(full)
    else:
        row_dim, column_dim = matrix
        row = decay * moments["row"] + (1.0 - decay) * jnp.mean(squared, axis=column_dim)
        column = decay * moments["column"] + (1.0 - decay) * jnp.mean(squared, axis=row_dim)
        moments = {"row": row, "column": column}
        # v_ij = row_i * column_j / mean(row). The mean is over the rows of each matrix of the stack; the row
        # dimension keeps its place in `row` because the column dimension, which is gone, comes after it.
        relative = row / jnp.mean(row, axis=row_dim, keepdims=True)
        direction = (
            g * jnp.expand_dims(jax.lax.rsqrt(relative), column_dim) * jnp.expand_dims(jax.lax.rsqrt(column), row_dim)
        )

    direction = direction / jnp.maximum(1.0, _size(direction, spec) / config.clip)
    size = jnp.maximum(_size(value, spec), config.smallest_size)
    return (value - rate * size * direction).astype(param.dtype), moments


def _size(value: jax.Array, spec: Param) -> jax.Array:
    """Root mean square per layer; keeps its dimensions so that it broadcasts."""
    within = tuple(i for i, name in enumerate(spec.dims) if name != "layers")
    return jnp.sqrt(jnp.mean(jnp.square(value), axis=within, keepdims=True))


def _without(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return (*shape[:dim], *shape[dim + 1 :])
