"""Common-subexpression elimination: the key that equal equations share, and which equations are pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gshard.comm.collectives import KINDS
from gshard.core.context import Context
from gshard.core.program import Constant, Equation, Value
from gshard.language.traits import traits_of

# They have no rule, because they work on devices and not on arrays. Each run gives the same results.
_ON_DEVICES = (*KINDS, "axis_index")


def is_pure(e: Equation) -> bool:
    """Whether an equation may run once more, or not at all: it gives the same results and has no effects."""
    if not traits_of(e.name).pure or (e.rule is not None and not e.rule.known and e.name not in _ON_DEVICES):
        return False
    return all(is_pure(inner) for block in e.blocks for inner in block.equations)


def common_key(primitive: Any, params: dict[str, Any], inputs: Sequence[Value | Constant], context: Context) -> Any:
    """The key that equations share if they compute the same; None for equations that stay separate."""
    if not traits_of(primitive.name).shared or not any(isinstance(x, Value) for x in inputs):
        return None
    operands = tuple(x if isinstance(x, Value) else _literal(x) for x in inputs)
    key = primitive, tuple(params.items()), operands, context
    try:
        hash(key)
    except TypeError:  # a parameter without a hash
        return None
    return key


def _literal(x: Constant) -> Any:
    """A constant as part of a key: a number by its bits, an array by identity."""
    plain = isinstance(x.value, (np.ndarray, np.generic, bool, int, float, complex)) and not x.shape
    return (str(x.dtype), np.asarray(x.value).tobytes()) if plain else id(x.value)
