"""Reads the names of dimensions that Flax stores beside arrays in a pytree.

Linen boxes an array with its names (``nn.Partitioned``, ``nn.LogicallyPartitioned``). A variable of NNX has them in its
metadata (``out_sharding``). Both are nodes of the pytree that contain one array. gshard recognises them by their
attributes, so that it does not import Flax.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

_KEYS = ("out_sharding", "sharding_names", "sharding")  # the metadata in versions of NNX
DimensionNames = tuple[str | None, ...]


def is_box(x: Any) -> bool:
    """Whether a node of a pytree is an array with metadata: a box of Linen or a variable of NNX."""
    return hasattr(type(x), "get_metadata") or (hasattr(x, "names") and hasattr(x, "value") and hasattr(x, "unbox"))


def names_in(box: Any) -> DimensionNames | None:
    """The names of an array's dimensions in the metadata of such a node; None without names.

    An entry of several words contains mesh axes and not the name of a dimension. Its name is None.
    """
    if hasattr(type(box), "get_metadata"):
        metadata: Mapping[str, Any] = box.get_metadata()
        names = next((metadata[key] for key in _KEYS if metadata.get(key) is not None), None)
    else:
        names = box.names
    if not isinstance(names, tuple | list | PartitionSpec):
        return None
    return tuple(entry if isinstance(entry, str) else None for entry in names)


def boxes_of(tree: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """The arrays of a pytree with their key paths; for an array with metadata the node that contains it.

    >>> boxes_of({"w": 1.0})
    [((DictKey(key='w'),), 1.0)]
    """
    return jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_box)
