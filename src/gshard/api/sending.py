"""Checks ``send=`` of marks, and marks the arrays of a pytree in the precision in which they are sent."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gshard.api.specs import describe
from gshard.core.errors import ShardingError, known_names
from gshard.core.jax_adapter import user_line
from gshard.core.mark import Mark
from gshard.language.low_precision import SENT, rounded
from gshard.language.mark_primitive import bind_mark


def marked(x: Any, leaves: Sequence[tuple[str, Any]], marks: Sequence[Mark | None], send: Any) -> Any:
    """The pytree with its arrays marked; those without a mark as they are."""
    given, tree = jax.tree.flatten(x)
    sent_as = precision_of(send)
    if sent_as is not None:
        marks = _with_precision(leaves, marks, sent_as, is_one=jax.tree_util.all_leaves([x]))
    found = zip(given, leaves, marks, strict=True)
    return jax.tree.unflatten(tree, [old if m is None or a is None else _bound(a, m) for old, (_, a), m in found])


def _bound(x: Any, mark: Mark) -> Any:
    return rounded(jnp.asarray(x), mark) if mark.send else bind_mark(x, mark)


def precision_of(send: Any) -> str | None:
    """The name of the dtype that ``send=`` gives; None for None."""
    if send is None:
        return None
    try:
        name = send if isinstance(send, str) else str(jnp.dtype(send))
    except TypeError:
        name = repr(send)
    if name not in SENT:
        raise ShardingError(f"arrays cannot be sent as {name}.", user_line(), hint=known_names(name, SENT, "Use"))
    return name


def _with_precision(
    leaves: Sequence[tuple[str, Any]], marks: Sequence[Mark | None], send: str, *, is_one: bool
) -> list[Mark | None]:
    """The marks with ``send``, where an array is wider floats. Other arrays of a pytree keep the plain mark."""
    found = [
        mark if mark is None or array is None else _mark_of(name, array, mark, send)
        for (name, array), mark in zip(leaves, marks, strict=True)
    ]
    arrays = [array for (_, array), mark in zip(leaves, marks, strict=True) if mark is not None and array is not None]
    if arrays and not any(map(holds_floats, arrays)):
        raise nothing_to_send(describe(arrays[0]), send, arrays[0] if is_one else None)
    return found


def nothing_to_send(shown: str, send: str, array: Any = None) -> ShardingError:
    """The error for a pytree without floats, or for one array of something else."""
    what = "no array of the pytree has floats to round."
    if array is not None:
        what = f"{'a Python number' if _is_python_number(array) else array.dtype} is not rounded."
    hint = f"Leave out send={send!r}: it rounds floats."
    return ShardingError(what, user_line(), f"{shown}; send={send!r}", hint)


def holds_floats(x: Any) -> bool:
    """Whether it is an array of floats, which ``send`` may round."""
    return hasattr(x, "dtype") and bool(jnp.issubdtype(x.dtype, jnp.floating)) and not _is_python_number(x)


def _is_python_number(x: Any) -> bool:
    return not x.shape and getattr(x, "weak_type", False)


def _mark_of(name: str, array: Any, mark: Mark, send: str) -> Mark:
    """The mark of one array."""
    shown = f"{name}: {describe(array)}; send={send!r}" if name else f"{describe(array)}; send={send!r}"
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        hint = "Mark its real and its imaginary part, or leave out send=."
        raise ShardingError(f"complex numbers cannot be sent as {send}.", user_line(), shown, hint)
    if not holds_floats(array) or array.dtype == send:
        return mark
    if array.dtype.itemsize <= jnp.dtype(send).itemsize:
        what = f"{array.dtype} has no wider elements than {send}."
        raise ShardingError(what, user_line(), shown, "Leave out send=.")
    if mark.unreduced or mark.reduced:
        what = f"parts of a sum cannot be sent as {send}."
        hint = "Reduce the sum first: mark it without unreduced and reduced, then with send=."
        raise ShardingError(what, user_line(), f"{shown}; {mark}", hint)
    return dataclasses.replace(mark, send=send, wide=str(array.dtype))
