"""Balance without a loss: a bias of each expert moves against its load (Wang et al. 2024, DeepSeek-V3).

    value, metrics = loss(config, params, batch)                  # config.balance == "bias"
    params = balanced(update(params, gradient), metrics["load"])

The bias is added to the gates for the choice of experts, and not for their weights. It has no gradient, so ``balanced``
updates it after the optimizer's step.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def balanced(params: dict[str, Any], load: dict[str, jax.Array], rate: float = 1e-3) -> dict[str, Any]:
    """The parameters, with a lower bias for each expert whose load is above the mean, and a higher one below it.

    Args:
        params: see ``param_specs``; of a model with ``balance="bias"``.
        load: ``metrics["load"]`` of ``loss`` or ``forward``: for ``encoder`` and ``decoder`` int32 [layers, E].
        rate: the size of the change. If a load is exactly the mean of its layer, its bias stays.

    Returns:
        the same tree; arrays that are no bias are the same objects.

    >>> layer = {"blocks": {"sparse": {"experts": {"bias": jnp.zeros((1, 3))}}}}
    >>> moved = balanced({"decoder": layer}, {"decoder": jnp.array([[5, 3, 1]])}, rate=0.5)
    >>> moved["decoder"]["blocks"]["sparse"]["experts"]["bias"].tolist()
    [[-0.5, 0.0, 0.5]]
    """
    moved = dict(params)
    for half, load_XE in load.items():
        blocks = params[half]["blocks"]
        experts = blocks["sparse"]["experts"]
        bias_XE = experts["bias"] - rate * _above_mean(load_XE).astype(experts["bias"].dtype)
        sparse = {**blocks["sparse"], "experts": {**experts, "bias": bias_XE}}
        moved[half] = {**params[half], "blocks": {**blocks, "sparse": sparse}}
    return moved


def _above_mean(load_XE: jax.Array) -> jax.Array:
    """1 where a load is above the mean of its layer, -1 where it is below, 0 where it is the mean, in integers."""
    all_X1, E = jnp.sum(load_XE, axis=-1, keepdims=True), load_XE.shape[-1]
    is_mean_XE = (load_XE == all_X1 // E) & (all_X1 % E == 0)
    return jnp.where(is_mean_XE, 0, jnp.where(load_XE > all_X1 // E, 1, -1))
