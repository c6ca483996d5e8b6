"""Paths: positions and names of the leaves of arguments, and patterns of paths.

``params['layers'][0]['w1']`` is at ``params/layers/0/w1``. In a pattern ``*`` stands for anything inside of a component
and ``**`` for any number of components.

    >>> matches("params/**/w*", "params/layers/0/w1"), matches("params/*", "params/layers/0/w1")
    (True, False)
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax

from gshard.core.planning_tables import tabulated


def path_of(argument: str, keys: Sequence[Any]) -> str:
    """The path of a leaf.

    Args:
        argument: the name of the argument it belongs to.
        keys: JAX's key path below that.

    >>> import jax
    >>> [(keys, _)], _ = jax.tree_util.tree_flatten_with_path({"layers": [1.0]})
    >>> path_of("params", keys)
    'params/layers/0'
    """
    return "/".join([argument, *map(component, keys)])


def component(key: Any) -> str:
    """One entry of a key path as a component."""
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


@tabulated(4096)
def matches(pattern: str, path: str) -> bool:
    """Whether a pattern is one of this path."""
    return _match(tuple(pattern.split("/")), tuple(path.split("/")))


def is_below(pattern: str, path: str) -> bool:
    """Whether a pattern is one of this path, or of something that it is inside of.

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


def parameters_of(f: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the parameters, where Python knows them."""
    try:
        return tuple(inspect.signature(f).parameters)
    except (TypeError, ValueError):
        return ()


def place_of_definition(f: Callable[..., Any]) -> tuple[str, int] | None:
    """The file and first line (that of a decorator) where a function is defined; None where Python knows of none.

    >>> place_of_definition(len) is None
    True
    """
    f = inspect.unwrap(f)
    while isinstance(f, functools.partial):
        f = inspect.unwrap(f.func)
    code = getattr(f, "__code__", None)
    return None if code is None else (code.co_filename, code.co_firstlineno)


def leaf_names(f: Callable[..., Any], arguments: tuple[Any, Any]) -> tuple[str, ...]:
    """The flat arguments in the user's words: ``params['wi']`` for a leaf of the argument ``params``.

    Args:
        f: the function.
        arguments: positional and named ones.
    """
    parameters = parameters_of(f)
    paths, _ = jax.tree_util.tree_flatten_with_path(arguments)
    return tuple(_leaf_name(path, parameters) for path, _ in paths)


def _leaf_name(path: Sequence[Any], parameters: Sequence[str]) -> str:
    which, entry, rest = path[0].idx, path[1], jax.tree_util.keystr(tuple(path[2:]))
    if which == 1:
        return f"{entry.key}{rest}"
    return f"{parameters[entry.idx] if entry.idx < len(parameters) else f'args[{entry.idx}]'}{rest}"
