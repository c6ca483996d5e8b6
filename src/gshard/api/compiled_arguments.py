"""Checks that the arguments of a compiled program have the structure and types that it was compiled for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax

from gshard.api.signature import Leaf
from gshard.core.errors import ArgumentError
from gshard.core.jax_adapter import user_line
from gshard.core.jax_adapter_references import is_reference_type
from gshard.core.mesh import Mesh
from gshard.core.sharding import Sharding
from gshard.core.uneven import UnevenArray

_HINT = "Lower it for such arguments too, or call what gshard.jit returned."


def flat_arguments(name: str, in_tree: Any, args: Any, kwargs: Any) -> list[Any]:
    """The flat arguments of a call."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    traced = next((type(x).__name__ for x in leaves if isinstance(x, jax.core.Tracer)), None)
    if traced is not None:
        raise ArgumentError(
            "Cannot apply JAX transformations to a function lowered and compiled for a particular signature. "
            f"Detected an argument of type {traced}.",
            user_line(),
            name,
            "Transform the function that gshard.jit returned.",
        )
    if tree != in_tree:
        raise ArgumentError(
            "Function compiled with input pytree does not match the input pytree it was called with.",
            user_line(),
            f"{name} was compiled for {in_tree} and is called with {tree}",
            _HINT,
        )
    return leaves


def check_types(name: str, names: Sequence[str], avals: Sequence[Any], leaves: Iterable[Any]) -> None:
    """Compares arguments with the types that a program was compiled for."""
    wrong = [
        f"Argument '{called}' compiled with {ours.str_short()} and called with {theirs.str_short()}"
        for called, ours, theirs in zip(names, avals, (Leaf.of(x).aval for x in leaves), strict=True)
        if (ours.shape, ours.dtype, is_reference_type(ours)) != (theirs.shape, theirs.dtype, is_reference_type(theirs))
    ]
    if wrong:
        raise ArgumentError(
            f"Argument types differ from the types for which {name} was compiled. The mismatches are:\n"
            + "\n".join(wrong),
            user_line(),
            hint=_HINT,
        )


def as_compiled_for(name: str, i: int, x: Any, padded: Sharding | None, mesh: Mesh) -> Any:
    """Argument ``i`` in padded parts if the program was compiled for such parts, and only then."""
    if isinstance(x, UnevenArray) and (x.partitioning, x.mesh) != (padded, mesh):
        x = x.whole()
    if padded is None or isinstance(x, UnevenArray):
        return x
    raise ArgumentError(
        f"argument {i} of {name} was compiled in padded parts, and is called with an array of another kind.",
        user_line(),
        f"{padded.format(mesh, x.shape, str(x.dtype))}",
        _HINT,
    )
