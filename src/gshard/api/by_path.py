"""Marks many arrays of a pytree at once, by patterns of their paths (``shard_by_path``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gshard.api.marks import T, shard
from gshard.api.sending import holds_floats, nothing_to_send, precision_of
from gshard.core.errors import ShardingError, known_names
from gshard.core.jax_adapter import user_line
from gshard.core.jax_adapter_tracebacks import without_our_frames
from gshard.core.paths import is_below, path_inside

_SHOWN = 12  # paths in a message


@without_our_frames
def shard_by_path(x: T, assignments: Mapping[str, Any], *, send: Any = None) -> T:
    """Marks the arrays of a pytree whose paths match a pattern; all other arrays stay open.

    Args:
        x: pytree of any kind: dictionaries, an NNX state, an Equinox module. The path of ``x["layers"][0]["w1"]`` and
            of ``x.layers[0].w1`` is ``layers/0/w1``. What no pattern matches need not be an array.
        assignments: for each pattern what ``shard`` takes for one array, such as a ``PartitionSpec``. In a pattern
            ``*`` stands for anything inside of a component and ``**`` for any number of components. A pattern is for
            all that is below the paths that it matches. The first pattern that matches counts.
        send: ``"int8"`` or ``"bfloat16"``: see ``split``.

    Returns:
        the same values; with ``send`` floats that a pattern matches are rounded.

    Raises:
        ShardingError: a pattern matches nothing, or nothing that an earlier one does not match; or an assignment does
            not fit an array.

    >>> import jax.numpy as jnp
    >>> from jax.sharding import PartitionSpec as P
    >>> params = {"layers": [{"w1": jnp.ones((8, 4)), "b": jnp.ones(4)}] * 2}
    >>> jax.tree.map(jnp.shape, shard_by_path(params, {"layers/*/w1": P("data")}))
    {'layers': [{'b': (4,), 'w1': (8, 4)}, {'b': (4,), 'w1': (8, 4)}]}
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(x)
    used: set[str] = set()
    marked, paths = [], []
    send, is_sent = precision_of(send), False
    for keys, leaf in leaves:
        path = path_inside(keys)
        paths.append(path)
        pattern = next((p for p in assignments if is_below(p, path)), None)
        if pattern is not None:
            used.add(pattern)
            may_send = send is not None and (holds_floats(leaf) or jnp.iscomplexobj(leaf))  # complex: an error
            is_sent |= may_send
            leaf = _sharded(leaf, assignments[pattern], path, pattern, send if may_send else None)
        marked.append(leaf)
    for pattern in assignments:
        if pattern not in used:
            raise unused_pattern(pattern, paths)
    if send is not None and used and not is_sent:
        raise nothing_to_send(f"a pytree of {len(paths)}", send)
    return jax.tree.unflatten(tree, marked)


def unused_pattern(pattern: str, paths: Sequence[str]) -> ShardingError:
    """The error for a pattern that marks nothing in a pytree with these paths."""
    hidden = any(is_below(pattern, path) for path in paths)
    what = "matches only what an earlier pattern matches" if hidden else "matches no path"
    hint = "Put it in front." if hidden else known_names(pattern, paths[:_SHOWN], "Paths are")
    return ShardingError(f"the pattern {pattern!r} {what}.", user_line(), f"a pytree of {len(paths)}", hint)


def _sharded(leaf: Any, assignment: Any, path: str, pattern: str, send: str | None) -> Any:
    try:
        return shard(leaf, assignment, send=send)
    except ShardingError as error:
        raise ShardingError(error.what, error.where, f"{path} ({pattern!r}): {error.got}", error.hint) from None
