"""Computes paths and names of the leaves of arguments, and matches patterns with paths.

The path of ``params['layers'][0]['w1']`` is ``params/layers/0/w1``. In a pattern ``*`` matches any characters inside a
component, and ``**`` any number of components.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from gshard.core.planning_tables import tabulated


def path_of(argument: str, keys: Sequence[Any]) -> str:
    """The path of a leaf.

    >>> import jax
    >>> [(keys, _)], _ = jax.tree_util.tree_flatten_with_path({"layers": [1.0]})
    >>> path_of("params", keys)
    'params/layers/0'
    """
    return "/".join([argument, *map(component, keys)])


def path_inside(keys: Sequence[Any]) -> str:
    """The path of a leaf inside of its pytree."""
    return "/".join(map(component, keys))


def component(key: Any) -> str:
    """The component of one entry of a key path."""
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


@tabulated(4096)
def matches(pattern: str, path: str) -> bool:
    """Whether a pattern matches a path."""
    return _match(tuple(pattern.split("/")), tuple(path.split("/")))


def is_below(pattern: str, path: str) -> bool:
    """Whether a pattern matches a path or one of its parents.

    >>> is_below("params", "params/layers/0/w1"), is_below("params", "state/params")
    (True, False)
    """
    return matches(f"{pattern}/**", path)


def _match(pattern: tuple[str, ...], path: tuple[str, ...]) -> bool:
    if not pattern:
        return not path
    if pattern[0] == "**":
        return _match(pattern[1:], path) or (bool(path) and _match(pattern, path[1:]))
    return bool(path) and _fits(pattern[0], path[0]) and _match(pattern[1:], path[1:])


def _fits(pattern: str, word: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), word, re.DOTALL) is not None


def parameters_of(f: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """A function's parameters by name; none if Python has no signature for it."""
    try:
        return inspect.signature(f).parameters
    except (TypeError, ValueError):
        return {}


def positional_names(f: Callable[..., Any], count: int) -> tuple[str, ...]:
    """The names of the first positional arguments of a function.

    >>> positional_names(lambda x, *xs, key=None: x, 3)
    ('x', 'xs[0]', 'xs[1]')
    """
    parameters = parameters_of(f).values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "args")
    return *names[:count], *(f"{rest}[{i}]" for i in range(count - len(names)))


def leaf_names(f: Callable[..., Any], arguments: tuple[Any, Any]) -> tuple[str, ...]:
    """The names of the flat arguments, in the user's terms: ``params['wi']`` for a leaf of the argument ``params``."""
    positional = positional_names(f, len(arguments[0]))
    paths, _ = jax.tree_util.tree_flatten_with_path(arguments)
    names = []
    for (kind, argument, *rest), _ in paths:
        name = positional[argument.idx] if kind.idx == 0 else argument.key
        names.append(f"{name}{jax.tree_util.keystr(tuple(rest))}")
    return tuple(names)
