"""Reads JAX's specs and shardings, and pytree prefixes of them, as marks.

A spec is ``P("data")``, ``"data"`` or a ``NamedSharding``; None says nothing. As in ``jax.jit``, a prefix stands for
every array below it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from gshard.core.errors import ShardingError
from gshard.core.jax_adapter import is_mapped, user_line
from gshard.core.mark import Mark, text_of_spec, words_of
from gshard.core.memory_kinds import memory_of
from gshard.tracing.expand import mark_of_any_sharding, mark_of_named_sharding


def is_spec(x: Any) -> bool:
    """Whether it says how one array is cut: a ``PartitionSpec``, a sharding of JAX's, an axis name, or None."""
    return x is None or isinstance(x, PartitionSpec | jax.sharding.Sharding | str)


def mark_of_spec(spec: Any, x: Any, leaf: str = "") -> Mark | None:
    """A ``PartitionSpec``, a sharding of JAX's or an axis name as a mark on an array; None says nothing."""
    if spec is None:
        return None
    if not is_spec(spec):
        raise ShardingError(
            f"{type(spec).__name__} is no sharding.",
            user_line(),
            f"{leaf}: {spec!r}"[:200] if leaf else f"{spec!r}"[:200],
            "Give a PartitionSpec, a NamedSharding, the name of a mesh axis, or None.",
        )
    if isinstance(spec, jax.sharding.Sharding) and not isinstance(spec, NamedSharding):
        return mark_of_any_sharding(spec, np.shape(x), leaf)
    said = spec.spec if isinstance(spec, NamedSharding) else PartitionSpec(spec) if isinstance(spec, str) else spec
    (entries, more), ndim = words_of(said, user_line()), np.ndim(x)
    if len(entries) > ndim:
        raise ShardingError(
            f"{text_of_spec(entries)} names {len(entries)} dimensions of an array of {ndim}.",
            user_line(),
            f"{leaf}: {describe(x)}" if leaf else describe(x),
            ("Give at most one entry for each dimension." if ndim else "A scalar has none: give P() or None.")
            + hidden_by_vmap([x]),
        )
    if isinstance(spec, NamedSharding):
        return mark_of_named_sharding(spec, ndim, leaf)
    return Mark("spec", spec=entries, leaf=leaf, **more)


def hidden_by_vmap(arrays: Iterable[Any]) -> str:
    """What else to say where dimensions do not exist: the user may have counted one that ``jax.vmap`` hides."""
    if not any(map(is_mapped, arrays)):
        return ""
    return " Inside vmap the dimension that it maps over is hidden: count without it, or mark outside."


def spread(what: str, prefix: Any, tree: Any, is_leaf: Callable[[Any], bool] = is_spec) -> list[tuple[str, Any, Any]]:
    """What a pytree prefix says of each leaf of a tree: its name, what is said, and the leaf."""
    said: list[Any] = []
    try:
        jax.tree.map(lambda s, part: said.extend([s] * len(jax.tree.leaves(part))), prefix, tree, is_leaf=is_leaf)
    except ValueError as error:
        raise ShardingError(
            f"the pytree of {what} does not match the pytree that is marked.",
            user_line(),
            " ".join(str(error).replace("tree_map tree", what).split()),
            f"Give one for all, or a pytree that is a prefix; for arguments a tuple, {what}=(...,). "
            "For the dimensions of one array write P('data', None).",
        ) from error
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path), s, x) for (path, x), s in zip(leaves, said, strict=True)]


def memories_of(in_shardings: Any, arguments: tuple[Any, Any]) -> list[str | None]:
    """The memory kind in which ``in_shardings`` puts each leaf of ``(positional, named)`` arguments; None for any."""
    positional, named = arguments
    prefix = tuple(in_shardings) if isinstance(in_shardings, list) else in_shardings
    kinds = [memory_of(spec) for _, spec, _ in spread("in_shardings", prefix, positional)]
    return [*kinds, *(None for _ in jax.tree.leaves(named))]


def as_array(x: Any, leaf: str, what: str) -> Any:
    """A leaf as an array that can be marked; None for the gradient of an integer, which has no elements."""
    if getattr(x, "dtype", None) == jax.dtypes.float0:
        return None
    try:
        return jnp.asarray(x)
    except TypeError as error:
        raise ShardingError(
            f"{leaf or 'what is marked'} is of type {type(x).__name__}, not an array.",
            user_line(),
            f"{what} of {x!r}"[:200],
            "Mark arrays only: leave it out of the pytree, or split the pytree in arrays and the rest.",
        ) from error


def describe(x: Any) -> str:
    """The type of an array as text, such as ``f32[8,4]``."""
    is_shape = isinstance(x, jax.ShapeDtypeStruct | jax.core.ShapedArray)
    aval = jax.core.ShapedArray(x.shape, x.dtype) if is_shape else jax.typeof(x)
    return aval.str_short(short_dtypes=True) if hasattr(aval, "str_short") else str(aval)


def told(x: Any) -> str:
    """What something is, in a message: ``an array f32[8,4]``."""
    return f"an array {describe(x)}" if isinstance(x, jax.Array | np.ndarray | jax.ShapeDtypeStruct) else repr(x)[:200]
