"""Moves values between device memory and host memory.

The sharding in a ``jax.device_put`` becomes a mark, and the change of memory a transfer: an equation whose result is
the operand in the other memory. Transfers never merge, so what the backward pass fetches again need not stay.
"""

from __future__ import annotations

from typing import Any

import jax

from gshard.core.memory_kinds import is_on_host, space
from gshard.core.program import Constant, Equation, Value
from gshard.core.rule import PARALLEL, Split
from gshard.language.traits import traits_of


def transferred(x: Any, on_host: bool) -> Any:
    """A traced array in host memory or in device memory."""
    return x if is_on_host(x) == on_host else jax.device_put(x, space(on_host))


def in_memory_of(value: Value | Constant, x: Any) -> Any:
    """A traced array in the memory of a value. Constants are in device memory."""
    return transferred(x, isinstance(value, Value) and value.on_host)


def is_transfer(params: dict[str, Any], in_avals: Any) -> bool:
    """Whether a ``device_put`` with these parameters only changes the memory of one array."""
    if len(in_avals) != 1:
        return False
    (target,) = params["devices"]
    return target in (space(True), space(False)) and target is not space(is_on_host(in_avals[0]))


def changes_memory(e: Equation) -> bool:
    """Whether an equation of a program is a transfer."""
    if e.name != "device_put" or not e.inputs or not e.outputs:
        return False
    operand, result = e.inputs[0], e.outputs[0]
    return isinstance(operand, Value) and operand.on_host != result.on_host


def is_handed_on(e: Equation, split: Split) -> bool:
    """Whether an equation with this split runs on values in device memory and in host memory.

    Such an equation only passes on elements, or has a body whose equations fetch their operands. XLA runs it on host
    memory, so gshard fetches only the slice of a layer and not the stack of all layers.
    """
    if e.mark is not None or e.name in ("shard_map", "scan"):
        return True
    split_factors = (e.operator_rule.factors[f] for f, atoms in split.items() if atoms and f >= 0)
    return traits_of(e.name).handed_on and all(factor.kind == PARALLEL for factor in split_factors)
