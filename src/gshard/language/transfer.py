"""Transfers: moves values between device memory and host memory.

``jax.device_put`` inside a program may say in which memory a value is, how it is sharded, or both. While a program is
traced it is taken apart (``tracing.put``): the sharding becomes a mark, the change of memory a *transfer*, an equation
of one operand whose result is the same array in the other memory.

Transfers are never merged: a value that is fetched once more for the backward pass need not stay on the device until
then. Nothing is computed in the memory of the host, and no collective reads it: what an equation reads there is
fetched for it, and its result is put back if it is of the host's type.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

from gshard.core.jax_adapter import closed, sub_jaxprs, user_line
from gshard.core.memory_kinds import is_on_host, space
from gshard.core.program import Constant, Equation, Value, itemsize, short_dtype
from gshard.core.rule import PARALLEL
from gshard.core.split import Split
from gshard.language.traits import traits_of


@dataclasses.dataclass(frozen=True, slots=True)
class Transfer:
    """A value of the per-device program that moves between the memory of the device and that of the host.

    Attributes:
        to_host: whether it moves to the host, or from it.
        bytes: of one device's part, in one run.
        times: how often it runs in one call of the program; in a loop whose end is not known, once.
        shape: the part, as text.
        line: the user's source line that it is for.
    """

    to_host: bool
    bytes: int
    times: int
    shape: str
    line: str

    @property
    def total_bytes(self) -> int:
        """Bytes of one device in one call of the program."""
        return self.bytes * self.times


def transfers_of(jaxpr: Any, times: int = 1) -> Iterator[Transfer]:
    """All transfers of a (closed) jaxpr, those of loops and branches included, in order."""
    for eqn in closed(jaxpr)[0].eqns:
        if eqn.primitive.name == "device_put":
            for before, after in zip(eqn.invars, eqn.outvars, strict=True):
                aval = after.aval
                if is_on_host(before.aval) != is_on_host(aval):
                    shape = f"{short_dtype(aval.dtype)}[{','.join(map(str, aval.shape))}]"
                    size = aval.size * itemsize(aval.dtype)
                    yield Transfer(is_on_host(aval), size, times, shape, user_line(eqn.source_info))
        rounds = int(eqn.params["length"]) if eqn.primitive.name == "scan" else 1
        for body in sub_jaxprs(eqn.params):
            yield from transfers_of(body, times * rounds)


def transferred(x: Any, on_host: bool) -> Any:
    """An array, while it is traced, in the memory of the host or in that of the devices."""
    return x if is_on_host(x) == on_host else jax.device_put(x, space(on_host))


def in_memory_of(value: Value | Constant, x: Any) -> Any:
    """An array in the memory in which a value is; constants are in that of the devices."""
    return transferred(x, isinstance(value, Value) and value.on_host)


def is_transfer(params: dict[str, Any], in_avals: Any) -> bool:
    """Whether a ``device_put`` with these parameters does nothing but change the memory of one array."""
    if len(in_avals) != 1:
        return False
    (target,) = params["devices"]
    return target in (space(True), space(False)) and target is not space(is_on_host(in_avals[0]))


def changes_memory(e: Equation) -> bool:
    """Whether an equation of a program is a transfer."""
    (x, *_), (made, *_) = (*e.inputs, None), (*e.outputs, None)
    return e.name == "device_put" and isinstance(x, Value) and made is not None and x.on_host != made.on_host


def is_handed_on(e: Equation, split: Split) -> bool:
    """Whether an equation, split so, runs on values in whatever memory they are.

    It is one that only hands on elements, or one with a body whose own equations fetch what they need. XLA runs these
    on memory of the host: what is fetched of a stack of layers is then the slice that is needed, and not the stack.
    """
    if e.mark is not None or e.name in ("shard_map", "scan"):
        return True
    assert e.rule is not None
    parts = (e.rule.factors[f] for f, atoms in split.items() if atoms and f >= 0)
    return traits_of(e.name).handed_on and all(factor.kind == PARALLEL for factor in parts)
