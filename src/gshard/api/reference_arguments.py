"""Reads references (``jax.Ref``) that are passed or closed over before a call, and writes them after it.

The program takes the array that a reference holds, and may overwrite its memory; its final value is a further result.
A reference keeps its sharding: the result leaves as the array came, and where the plan cannot do that it is moved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from gshard.core.errors import ArgumentError
from gshard.core.jax_adapter import no_mesh_set, user_line
from gshard.core.jax_adapter_references import array_of, is_reference, write


def arrays_of(arguments: Sequence[Any]) -> list[Any]:
    """The arguments of a call with the arrays that references hold in their place."""
    return [array_of(x) if is_reference(x) else x for x in arguments]


def refuse_twice(arguments: Sequence[Any], names: Callable[[], Sequence[str]], function: str) -> None:
    """Refuses a reference that is given twice: what one name writes the other one would not see."""
    references = [id(x) for x in arguments if is_reference(x)]
    if len({*references}) == len(references):
        return
    first: dict[int, str] = {}
    for x, name in zip(arguments, names(), strict=True):
        if is_reference(x) and first.setdefault(id(x), name) != name:
            raise ArgumentError.like(
                ValueError(),
                f"{function} is given one reference twice, as {first[id(x)]} and {name}.",
                user_line(),
                "only one reference to a mutable array may be passed as an argument to a function",
                "Give it once, or give the array that it holds (ref[...]) where it is only read.",
            )


def write_back(references: Sequence[Any], values: Sequence[Any]) -> None:
    """Writes final values into references, each with the sharding that the reference has."""
    for reference, value in zip(references, values, strict=True):
        here = reference.sharding
        if value.sharding != here:
            with no_mesh_set():
                value = jax.device_put(value, here)
        write(reference, value)
