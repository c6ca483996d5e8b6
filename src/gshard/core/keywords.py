"""Checks the keyword arguments of public functions: accepts old names, and suggests a name for an unknown one.

    @keywords("Write split(x, 0, 'data').", num_partitions="over")
    def split(x, dim, over): ...

    split(x, 0, num_partitions=8)     # DeprecationWarning: write over=
    split(x, 0, ovr=8)                # ArgumentError: Did you mean 'over'?

An old name works for one version.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from gshard.core.errors import ArgumentError, known_names
from gshard.core.jax_adapter import user_line
from gshard.core.jax_adapter_tracebacks import without_our_frames

F = TypeVar("F", bound=Callable[..., Any])
_CALLER = 5  # frames from the warning up to the caller; the boundary of the traceback adds two


def keywords(hint: str = "", package: str = "gshard", /, **new_of_old: str) -> Callable[[F], F]:
    """A decorator that accepts old names of arguments with a warning and refuses unknown ones with the nearest name.

    Args:
        hint: a sentence for the message of an unknown name.
        package: where the function is public, for messages.
        new_of_old: the new name of each old one.

    >>> @keywords(size="length")
    ... def half(length):
    ...     return length / 2
    >>> half(length=3)
    1.5
    """

    def decorated(f: F) -> F:
        known = inspect.signature(f).parameters

        @without_our_frames
        @functools.wraps(f)
        def checked(*args: Any, **kwargs: Any) -> Any:
            if kwargs.keys() <= known.keys():
                return f(*args, **kwargs)
            return f(*args, **_with_new_names(f"{package}.{f.__name__}", kwargs, list(known), new_of_old, hint))

        return checked  # type: ignore[return-value]

    return decorated


def _with_new_names(
    name: str, arguments: Mapping[str, Any], known: list[str], new_of_old: Mapping[str, str], hint: str
) -> dict[str, Any]:
    renamed: dict[str, Any] = {}
    for key, value in arguments.items():
        new = new_of_old.get(key, key)
        if new not in known:
            raise unknown_keyword(name, key, known, hint)
        if new in renamed or (new != key and new in arguments):
            raise ArgumentError(f"{name} got {new}= and its old name {key}=.", user_line(), hint=f"Give {new}=.")
        if new != key:
            text = f"{key}= of {name} is now called {new}=; the old name works in this version only."
            warnings.warn(text, DeprecationWarning, stacklevel=_CALLER)
        renamed[new] = value
    return renamed


def unknown_keyword(name: str, key: str, known: Iterable[str], hint: str = "") -> ArgumentError:
    """The error for an argument that a public function does not have."""
    before, question_mark, _ = known_names(key, known).partition("?")
    suggestion = f"{before}?" if question_mark else ""
    hint = " ".join(filter(None, (suggestion, hint))) or f"It takes {', '.join(known)}."
    return ArgumentError(f"{name} has no argument {key!r}.", user_line(), hint=hint)


def renamed_class(old: str, new: str) -> None:
    """Warns that a public class has a new name. The ``__getattr__`` of a package calls it."""
    text = f"gshard.{old} is now called gshard.{new}; the old name works in this version only."
    warnings.warn(text, DeprecationWarning, stacklevel=3)
