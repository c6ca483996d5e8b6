"""Static leaves: leaves of arguments and results that are not arrays, such as activation functions.

Under ``gshard.jit(..., static_leaves=True)`` each becomes a node of the pytree, without children and with the leaf in
the structure. So the structure, which is part of every key, tells calls with different leaves apart. A token
(``jax.lax.create_token``), which has no shape and no numbers, becomes such a node in any case, and comes back new.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np

from gshard.core.errors import ArgumentError
from gshard.core.jax_adapter import user_line
from gshard.core.jax_adapter_dispatch import is_token
from gshard.core.uneven import UnevenArray

_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct, UnevenArray)
_TOKEN = object()  # in the place of every token: they do not differ


@jax.tree_util.register_pytree_node_class
class Fixed:
    """A leaf as a part of the structure; equal to others of the same type and value."""

    __slots__ = ("key", "value")

    def __init__(self, value: Any):
        self.value = value
        # Zeros of both signs are equal, and a NaN is not equal to itself; written out they are what they are.
        self.key: Hashable = (type(value), repr(value) if isinstance(value, float | complex) else value)

    @property
    def freed(self) -> Any:
        """The leaf as the user gets it."""
        if self.value is not _TOKEN:
            return self.value
        with jax.ensure_compile_time_eval():
            return jax.lax.create_token()

    def tree_flatten(self) -> tuple[tuple[()], Fixed]:
        """No children, and itself."""
        return (), self

    @staticmethod
    def tree_unflatten(itself: Fixed, children: tuple[()]) -> Fixed:
        """The reverse of ``tree_flatten``."""
        return itself

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fixed) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return f"Fixed({self.value!r})"


def fixed(tree: Any, where: str, every: bool = True) -> Any:
    """The tree with all leaves that are no arrays (or else the tokens only) as parts of its structure."""

    def leaf(path: Any, x: Any) -> Any:
        if is_token(x):
            return Fixed(_TOKEN)
        if not every or isinstance(x, _ARRAYS) or hasattr(type(x), "__jax_array__"):
            return x
        refuse_without_hash(x, f"Non-hashable static leaves are not supported: {where}{jax.tree_util.keystr(path)}.")
        return Fixed(x)

    return jax.tree_util.tree_map_with_path(leaf, tree)


def refuse_without_hash(x: Any, said: str) -> None:
    """Raises an ``ArgumentError`` (also a ``ValueError``, as of ``jax.jit``) for what cannot be part of a key."""
    try:
        hash(x)
    except TypeError as error:
        hint = "Give a tuple or another value that is hashable and does not change."
        raise ArgumentError.like(ValueError(), said, user_line(), f"a {type(x).__name__}", hint) from error


def freed(tree: Any) -> Any:
    """The tree with such leaves in their places again."""
    return jax.tree.map(lambda x: x.freed if isinstance(x, Fixed) else x, tree, is_leaf=lambda x: isinstance(x, Fixed))


def has_fixed(structure: Any) -> bool:
    """Whether there are such leaves in a structure."""
    tree = jax.tree.unflatten(structure, [0] * structure.num_leaves)
    return any(isinstance(x, Fixed) for x in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Fixed)))


def with_freed_arguments(f: Callable[..., Any]) -> Callable[..., Any]:
    """The function of arguments with fixed leaves."""

    @functools.wraps(f)
    def free(*args: Any, **kwargs: Any) -> Any:
        return f(*freed(args), **freed(kwargs))

    return free


def with_fixed_results(f: Callable[..., Any], name: str, every: bool = True) -> Callable[..., Any]:
    """The function with results whose leaves are fixed where they are no arrays, or only where they are tokens."""

    @functools.wraps(f)
    def fix(*args: Any, **kwargs: Any) -> Any:
        return fixed(f(*args, **kwargs), f"the result of {name}", every)

    return fix
