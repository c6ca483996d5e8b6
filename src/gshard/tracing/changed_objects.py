"""Refuses a function that changes an array in an argument and does not return it.

A pytree may be an object that can be changed, as a module of Flax NNX is. A jitted function is given a copy of it. What
the function changes in the copy and does not return is lost: weights that an optimizer updates, statistics of a batch
normalisation, the counter of dropout's keys. ``nnx.jit`` returns such changes by itself; ``jax.jit`` loses them.
Lists and dictionaries are not checked, because functions often change them for their own use; nor are arrays that an
object gets inside of the function.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax

from gshard.core.errors import ArgumentError
from gshard.core.jax_adapter import closed, user_line
from gshard.core.paths import leaf_names

_CONTAINERS = (tuple, list, dict, type(None))


def has_objects(structure: Any) -> bool:
    """Whether there are objects with arrays in them in the structure of some arguments."""
    return bool(_objects(jax.tree.unflatten(structure, [0] * structure.num_leaves)))


def with_kept_objects(f: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The function, refused when it is traced if it changes an array in an argument and does not return it.

    Raises:
        ArgumentError: when called, with the names of what is changed.
    """

    @functools.wraps(f)
    def checked(*args: Any, **kwargs: Any) -> Any:
        arguments = args, kwargs
        objects, before = _objects(arguments), jax.tree.leaves(arguments)
        known = {id(x) for x in before}
        if [id(x) for x in jax.tree.leaves(objects)] != [id(x) for x in jax.tree.leaves(objects)]:
            return f(*args, **kwargs)  # they make new arrays whenever they are read
        found = [(x, dict(jax.tree_util.tree_leaves_with_path(x))) for x in objects]
        results = f(*args, **kwargs)
        kept = known | {id(x) for x in jax.tree.leaves(results)}
        changed = [old for x, olds in found for old, new in _changes(x, olds) if id(new) not in kept]
        if changed:
            places = [i for i, x in enumerate(before) if any(x is old for old in changed)]
            lost = _really_changed(f, args, kwargs, places)
            if lost:
                names = leaf_names(f, arguments) if len(before) == len(jax.tree.leaves(arguments)) else ()
                raise _lost(f, name, [names[i] if names else f"leaf {i}" for i in lost])
        return results

    return checked


def _objects(arguments: Any) -> list[Any]:
    """The outermost objects with arrays in them."""
    return [x for x in jax.tree.leaves(arguments, is_leaf=_is_object) if _is_object(x)]


def _is_object(x: Any) -> bool:
    return not isinstance(x, _CONTAINERS) and not jax.tree_util.all_leaves([x]) and bool(jax.tree.leaves(x))


def _changes(x: Any, before: dict[Any, Any]) -> list[tuple[Any, Any]]:
    """The arrays of an object that others have taken the places of, and these."""
    after = jax.tree_util.tree_leaves_with_path(x)
    return [(before[path], new) for path, new in after if path in before and before[path] is not new]


def _really_changed(f: Callable[..., Any], args: Any, kwargs: Any, places: Sequence[int]) -> list[int]:
    """Of some flat arguments those that have another value afterwards.

    A transformation inside, such as ``nnx.grad``, may put back what it was given as a result of its own.
    """

    def after(*args: Any, **kwargs: Any) -> list[Any]:
        arguments = args, kwargs
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(arguments)]
        f(*args, **kwargs)
        now = dict(jax.tree_util.tree_leaves_with_path(arguments))
        return [now[paths[i]] for i in places]

    body, _ = closed(jax.make_jaxpr(after)(*args, **kwargs))
    return [i for i, out in zip(places, body.outvars, strict=True) if _source(body, out) is not body.invars[i]]


def _source(body: Any, out: Any) -> Any:
    """Where a value comes from, through calls of jitted functions that return it as they got it."""
    makers = {v: (e, i) for e in body.eqns for i, v in enumerate(e.outvars)}
    while not hasattr(out, "val") and out in makers:
        made, i = makers[out]
        if made.primitive.name not in ("jit", "pjit"):
            return out
        inner, _ = closed(made.params["jaxpr"])
        source = _source(inner, inner.outvars[i])
        if source not in list(inner.invars):
            return out
        out = made.invars[list(inner.invars).index(source)]
    return out


def _lost(f: Callable[..., Any], name: str, names: Sequence[str]) -> ArgumentError:
    code = getattr(inspect.unwrap(f), "__code__", None)  # JAX keeps no line outside of what is being traced
    line = user_line() if code is None else f"{os.path.basename(code.co_filename)}:{code.co_firstlineno} ({name})"
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ArgumentError(
        f"{name} changes arrays inside of its arguments, and does not return them: the changes would be lost.",
        line,
        f"changed: {', '.join(names[:3])}{more}",
        "Jit it with flax.nnx.jit and call it inside of gshard.instead_of_jit(mesh=...), or return what it changes "
        "(nnx.state(model)) and update the object outside.",
    )
