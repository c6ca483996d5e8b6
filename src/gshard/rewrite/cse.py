"""Common subexpressions: equations that compute the same are computed once; which may be computed twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gshard.comm.collectives import KINDS
from gshard.core.context import Context
from gshard.core.program import Constant, Equation, Value

# Each use of them may be sharded as it likes: made once for all they would tie together what is far apart. What is
# fetched from the host twice need not stay on the device in between.
_MADE_ANEW = ("broadcast_in_dim", "optimization_barrier", "rng_uniform", "device_put")

# Each run of them is another: it draws other numbers, or somebody outside notices it.
_ONCE = (
    "rng_uniform",
    "pure_callback",
    "io_callback",
    "debug_callback",
    "debug_print",
    "inspect_sharding",
    "ffi_call",
    "infeed",
    "outfeed",
)

# No rule is known for them, for they are of devices and not of arrays. Each run of them is the same.
_OF_DEVICES = (*KINDS, "axis_index")


def is_repeatable(e: Equation) -> bool:
    """Whether an equation may run once more, with the same results and without anybody noticing."""
    if e.name in _ONCE or (e.rule is not None and not e.rule.known and e.name not in _OF_DEVICES):
        return False
    return all(is_repeatable(inner) for block in e.blocks for inner in block.equations)


def common_key(primitive: Any, params: dict[str, Any], inputs: Sequence[Value | Constant], context: Context) -> Any:
    """What two equations have in common that compute the same; None for those that are left apart."""
    if primitive.name in _MADE_ANEW or not any(isinstance(x, Value) for x in inputs):
        return None
    operands = tuple(x if isinstance(x, Value) else _literal(x) for x in inputs)
    key = primitive, tuple(params.items()), operands, context
    try:
        hash(key)
    except TypeError:  # a parameter that cannot be compared
        return None
    return key


def _literal(x: Constant) -> Any:
    """A constant as part of a key: a number by its bits, an array by identity."""
    plain = isinstance(x.value, (np.ndarray, np.generic, bool, int, float, complex)) and not x.shape
    return (str(x.dtype), np.asarray(x.value).tobytes()) if plain else id(x.value)
