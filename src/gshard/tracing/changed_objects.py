"""Refuses a function that changes an array in an argument and does not return it.

``jax.jit`` works on a copy of a mutable object (a module of Flax NNX), so changes that are not returned are lost. Lists
and dictionaries, which functions often change locally, are not checked.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from gshard.core.errors import ArgumentError, listed
from gshard.core.jax_adapter import closed, user_line
from gshard.core.paths import leaf_names

_CONTAINERS = (tuple, list, dict, type(None))


def has_objects(structure: Any) -> bool:
    """Whether arguments with this tree structure contain objects that hold arrays."""
    return bool(_objects(jax.tree.unflatten(structure, [0] * structure.num_leaves)))


def with_kept_objects(f: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The function with a check that it returns every array of an argument that it changes."""

    @functools.wraps(f)
    def checked(*args: Any, **kwargs: Any) -> Any:
        arguments = args, kwargs
        objects = _objects(arguments)
        leaves_before = jax.tree.leaves(arguments)
        ids_before = {id(x) for x in leaves_before}
        if [id(x) for x in jax.tree.leaves(objects)] != [id(x) for x in jax.tree.leaves(objects)]:
            return f(*args, **kwargs)  # these objects create new arrays at each access
        arrays_before = [(x, dict(jax.tree_util.tree_leaves_with_path(x))) for x in objects]
        results = f(*args, **kwargs)
        kept = ids_before | {id(x) for x in jax.tree.leaves(results)}
        changed = [old for x, arrays in arrays_before for old, new in _changes(x, arrays) if id(new) not in kept]
        if changed:
            positions = [i for i, x in enumerate(leaves_before) if any(x is old for old in changed)]
            lost = _really_changed(f, args, kwargs, positions)
            if lost:
                has_all_leaves = len(leaves_before) == len(jax.tree.leaves(arguments))
                names = leaf_names(f, arguments) if has_all_leaves else ()
                lost_names = [names[i] if names else f"leaf {i}" for i in lost]
                kinds = (np.integer, jax.dtypes.prng_key)  # of the state of random numbers
                counts = any(jax.dtypes.issubdtype(leaves_before[i].dtype, kind) for i in lost for kind in kinds)
                raise _lost(f, name, lost_names, counts)
        return results

    return checked


def _objects(arguments: Any) -> list[Any]:
    """The outermost objects that contain arrays."""
    return [x for x in jax.tree.leaves(arguments, is_leaf=_is_object) if _is_object(x)]


def _is_object(x: Any) -> bool:
    return not isinstance(x, _CONTAINERS) and not jax.tree_util.all_leaves([x]) and bool(jax.tree.leaves(x))


def _changes(x: Any, before: dict[Any, Any]) -> list[tuple[Any, Any]]:
    """Pairs of an array of an object and the array that has replaced it."""
    after = jax.tree_util.tree_leaves_with_path(x)
    return [(before[path], new) for path, new in after if path in before and before[path] is not new]


def _really_changed(f: Callable[..., Any], args: Any, kwargs: Any, positions: Sequence[int]) -> list[int]:
    """The positions of flat arguments, of some positions, whose values the function changes.

    A transformation inside, such as ``nnx.grad``, may replace an array by a result that is the same value.
    """

    def after(*args: Any, **kwargs: Any) -> list[Any]:
        arguments = args, kwargs
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(arguments)]
        f(*args, **kwargs)
        leaves = dict(jax.tree_util.tree_leaves_with_path(arguments))
        return [leaves[paths[i]] for i in positions]

    body, _ = closed(jax.make_jaxpr(after)(*args, **kwargs))
    return [i for i, out in zip(positions, body.outvars, strict=True) if _source(body, out) is not body.invars[i]]


def _source(body: Any, out: Any) -> Any:
    """The origin of a value, through calls of jitted functions that return an argument unchanged."""
    producers = {v: (e, i) for e in body.eqns for i, v in enumerate(e.outvars)}
    while not hasattr(out, "val") and out in producers:
        producer, i = producers[out]
        if producer.primitive.name not in ("jit", "pjit"):
            return out
        inner, _ = closed(producer.params["jaxpr"])
        source = _source(inner, inner.outvars[i])
        if source not in list(inner.invars):
            return out
        out = producer.invars[list(inner.invars).index(source)]
    return out


def _lost(f: Callable[..., Any], name: str, names: Sequence[str], random: bool) -> ArgumentError:
    code = getattr(inspect.unwrap(f), "__code__", None)  # outside of the traced function JAX has no user line
    line = user_line() if code is None else f"{os.path.basename(code.co_filename)}:{code.co_firstlineno} ({name})"
    return ArgumentError(
        f"{name} changes arrays inside of its arguments, and does not return them: the changes would be lost.",
        line,
        f"changed: {', '.join(listed(names))}",
        "Jit it with flax.nnx.jit and call it inside of gshard.instead_of_jit(mesh=...), or return what it changes "
        "(nnx.state(model)) and update the object outside."
        + ("" if random else " If nothing needs the changes, change a copy (nnx.clone(model))."),
    )
