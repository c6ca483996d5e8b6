"""Moves values between device memory and host memory.

The sharding in a ``jax.device_put`` becomes a mark, and the change of memory a transfer: an equation whose result is
the operand in the other memory. Transfers never merge, so what the backward pass fetches again need not stay.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

from gshard.core.jax_adapter import closed, sub_jaxprs, user_line
from gshard.core.memory_kinds import is_on_host, space
from gshard.core.program import Constant, Equation, Value, itemsize, type_text
from gshard.core.rule import PARALLEL, Split
from gshard.language.traits import traits_of


@dataclasses.dataclass(frozen=True, slots=True)
class Transfer:
    """A transfer of a value of the per-device program between device memory and host memory."""

    to_host: bool  # whether the value moves to the host, or from the host
    bytes: int  # bytes of one device's part
    times: int  # number of runs in one call of the program; a loop with an unknown number of iterations counts once
    shape: str  # one device's part, as text
    line: str  # the user's source line
    array: str = ""  # the name of the value; empty if not known

    @property
    def total_bytes(self) -> int:
        """Bytes that one device moves in one call of the program."""
        return self.bytes * self.times


def transfers_of(jaxpr: Any, times: int = 1) -> Iterator[Transfer]:
    """All transfers of a (closed) jaxpr, including loops and branches, in order."""
    for eqn in closed(jaxpr)[0].eqns:
        if eqn.primitive.name == "device_put":
            for before, after in zip(eqn.invars, eqn.outvars, strict=True):
                aval = after.aval
                if is_on_host(before.aval) != is_on_host(aval):
                    size = aval.size * itemsize(aval.dtype)
                    yield Transfer(is_on_host(aval), size, times, type_text(aval), user_line(eqn.source_info))
        iterations = int(eqn.params["length"]) if eqn.primitive.name == "scan" else 1
        for body in sub_jaxprs(eqn.params):
            yield from transfers_of(body, times * iterations)


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
