"""Computes the keys for common-subexpression elimination, and determines which equations are pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gshard.comm.collectives import KINDS
from gshard.core.context import Context
from gshard.core.program import Constant, Equation, Value
from gshard.language.traits import traits_of

# Primitives of per-device programs have no rule, but are pure.
_ON_DEVICES = (*KINDS, "axis_index")


def is_pure(e: Equation) -> bool:
    """Whether an equation may run again or not at all: it always gives the same results and has no effects."""
    if not traits_of(e.name).pure or (e.rule is not None and not e.rule.known and e.name not in _ON_DEVICES):
        return False
    return all(is_pure(inner) for block in e.blocks for inner in block.equations)


def common_key(primitive: Any, params: dict[str, Any], inputs: Sequence[Value | Constant], context: Context) -> Any:
    """A key that is equal for equations that compute the same; None for equations that must not be merged."""
    if not traits_of(primitive.name).shared or not any(isinstance(x, Value) for x in inputs):
        return None
    operands = tuple(x if isinstance(x, Value) else literal_key(x) for x in inputs)
    key = primitive, tuple(params.items()), operands, context
    try:
        hash(key)
    except TypeError:  # a parameter without a hash
        return None
    return key


def literal_key(x: Constant) -> Any:
    """A constant as a part of a key: a scalar by its bits, an array by identity."""
    is_scalar = isinstance(x.value, (np.ndarray, np.generic, bool, int, float, complex)) and not x.shape
    return (str(x.dtype), np.asarray(x.value).tobytes()) if is_scalar else id(x.value)
