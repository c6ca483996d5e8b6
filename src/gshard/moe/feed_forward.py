"""Feed-forward layers, of an expert or dense: two products with a ReLU between them, or three with SwiGLU.

The ReLU layer is ``relu(x wi) wo``, SwiGLU is ``(silu(x wi_gate) * x wi) wo``. Each dispatch computes products in
another way, so ``hidden`` takes a function for them.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from gshard.moe.config import TransformerConfig
from gshard.moe.param import Param


def feed_forward_specs(config: TransformerConfig, hidden: int, experts: int = 0) -> dict[str, Param]:
    """wi [M, H], wo [H, M] and, with SwiGLU, wi_gate [M, H], no biases; for experts with a dimension E in front.

    >>> sorted(feed_forward_specs(TransformerConfig(9, 9, activation="swiglu"), 64))
    ['wi', 'wi_gate', 'wo']
    """
    M, H = config.model_dim, hidden
    shape, dims = ((experts,), ("experts",)) if experts else ((), ())
    into = Param((*shape, M, H), (*dims, "model", "hidden"), "normal", M**-0.5)
    specs = {"wi": into, "wo": Param((*shape, H, M), (*dims, "hidden", "model"), "normal", H**-0.5)}
    return specs | ({"wi_gate": into} if config.activation == "swiglu" else {})


def hidden(activation: str, into: Callable[[str], jax.Array]) -> jax.Array:
    """The hidden layer.

    >>> hidden("relu", lambda name: jnp.array([-2.0, 3.0])).tolist()
    [0.0, 3.0]
    """
    if activation == "relu":
        return jax.nn.relu(into("wi"))
    return jax.nn.silu(into("wi_gate")) * into("wi")


def feed_forward(activation: str, params: dict[str, jax.Array], inputs_BLM: jax.Array) -> jax.Array:
    """The dense counterpart of one expert.

    >>> eye = jnp.eye(2)
    >>> feed_forward("relu", {"wi": eye, "wo": eye}, jnp.array([[[-2.0, 3.0]]])).tolist()
    [[[0.0, 3.0]]]
    """
    dtype = inputs_BLM.dtype
    hidden_BLH = hidden(activation, lambda name: jnp.einsum("BLM,MH->BLH", inputs_BLM, params[name].astype(dtype)))
    return jnp.einsum("BLH,HM->BLM", hidden_BLH, params["wo"].astype(dtype))
