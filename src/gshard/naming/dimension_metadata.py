"""Dimension metadata: names of dimensions that arrays carry in a pytree, as Flax writes them.

Linen boxes an array together with its names (``nn.Partitioned``, ``nn.LogicallyPartitioned``); a variable of NNX has
them in its metadata (``out_sharding``). Both are nodes of the pytree with one array inside. They are read by what they
have, so that Flax need not be there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

_KEYS = ("out_sharding", "sharding_names", "sharding")  # what versions of NNX call them
DimensionNames = tuple[str | None, ...]


def is_box(x: Any) -> bool:
    """Whether a node of a pytree is one array with metadata: a box of Linen's or a variable of NNX."""
    return hasattr(type(x), "get_metadata") or (hasattr(x, "names") and hasattr(x, "value") and hasattr(x, "unbox"))


def names_in(box: Any) -> DimensionNames | None:
    """The names that such a node gives its array's dimensions; None if it gives none.

    An entry of several words, which are mesh axes, is no name of a dimension and is left out.
    """
    if hasattr(type(box), "get_metadata"):
        metadata: Mapping[str, Any] = box.get_metadata()
        said = next((metadata[key] for key in _KEYS if metadata.get(key) is not None), None)
    else:
        said = box.names
    if said is None or not isinstance(said, tuple | list | PartitionSpec):
        return None
    return tuple(entry if isinstance(entry, str) else None for entry in said)


def boxes_of(tree: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """The arrays of a pytree with their key paths; one with metadata as the node that has it.

    >>> boxes_of({"w": 1.0})
    [((DictKey(key='w'),), 1.0)]
    """
    return jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_box)


def as_words(tree: Any) -> Any:
    """A pytree of names as ``names=`` of ``jit`` takes them: a tuple becomes a string, metadata a ``PartitionSpec``.

    >>> as_words({"w": ("embed", None), "b": "mlp"})
    {'b': 'mlp', 'w': 'embed _'}
    """

    def is_leaf(x: Any) -> bool:
        return is_box(x) or _is_words(x) or isinstance(x, PartitionSpec) or x is None

    def spec(x: Any) -> Any:
        if is_box(x):
            found = names_in(x)
            return PartitionSpec() if found is None else PartitionSpec(*found)
        return " ".join(word or "_" for word in x) if _is_words(x) else x

    return jax.tree.map(spec, tree, is_leaf=is_leaf)


def _is_words(x: Any) -> bool:
    """Whether it is a tuple of names: of strings and None, one of them at least."""
    words: Sequence[Any] = x if type(x) in (tuple, list) else ()
    return bool(words) and all(word is None or isinstance(word, str) for word in words)
