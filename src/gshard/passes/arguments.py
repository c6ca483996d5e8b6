"""Arguments: which of them a number or a name means, what programs they can share, and where they lie."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax

from gshard.core.uneven import UnevenArray


def positions_and_names(
    f: Callable[..., Any], numbers: int | Sequence[int], names: str | Sequence[str]
) -> frozenset[int | str]:
    """Arguments named in either way, in both ways as far as Python knows the function's parameters."""
    positions = [numbers] if isinstance(numbers, int) else list(numbers)
    words = [names] if isinstance(names, str) else list(names)
    try:
        parameters = [
            p.name
            for p in inspect.signature(f).parameters.values()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
    except (TypeError, ValueError):
        parameters = []
    positions = [p % len(parameters) if p < 0 and parameters else p for p in positions]
    both: set[int | str] = {*positions, *words}
    both |= {parameters[p] for p in positions if p < len(parameters)}
    both |= {parameters.index(w) for w in words if w in parameters}
    return frozenset(both)


def kind(x: Any) -> tuple[Any, ...]:
    """What arguments of one program have in common."""
    if isinstance(x, UnevenArray):
        return (x.shape, x.dtype, x.lies)
    aval = jax.typeof(x) if not isinstance(x, jax.ShapeDtypeStruct) else x
    return (aval.shape, aval.dtype, getattr(aval, "weak_type", False))


def own_sharding(x: Any) -> Any:
    """Where a committed array lies; None if JAX may place it."""
    sharding = getattr(x, "sharding", None)
    if sharding is None or not getattr(x, "committed", isinstance(x, jax.ShapeDtypeStruct | UnevenArray)):
        return None
    return sharding


def agree(lies: tuple[Any, ...], targets: tuple[Any, ...]) -> bool:
    """Whether every committed argument lies as a program takes it."""
    return all(s is None or s == t for s, t in zip(lies, targets, strict=True))
