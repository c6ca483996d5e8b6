"""Checks the keyword arguments of public functions: refuses an unknown one, and suggests a name.

``@keywords()`` on ``split``: ``split(x, 0, ovr=8)`` raises ``ArgumentError: Did you mean 'over'?``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from gshard.core.errors import ArgumentError, known_names
from gshard.core.jax_adapter import user_line
from gshard.core.jax_adapter_tracebacks import without_our_frames

F = TypeVar("F", bound=Callable[..., Any])


def keywords(hint: str = "", package: str = "gshard") -> Callable[[F], F]:
    """A decorator that refuses unknown names of arguments with the nearest name."""

    def decorated(f: F) -> F:
        known = inspect.signature(f).parameters

        @without_our_frames
        @functools.wraps(f)
        def checked(*args: Any, **kwargs: Any) -> Any:
            if unknown := kwargs.keys() - known.keys():
                raise unknown_keyword(f"{package}.{f.__name__}", min(unknown), list(known), hint)
            return f(*args, **kwargs)

        return checked  # type: ignore[return-value]

    return decorated


def unknown_keyword(name: str, key: str, known: Iterable[str], hint: str = "") -> ArgumentError:
    """The error for an argument that a public function does not have."""
    before, question_mark, _ = known_names(key, known).partition("?")
    suggestion = f"{before}?" if question_mark else ""
    hint = " ".join(filter(None, (suggestion, hint))) or f"It takes {', '.join(known)}."
    return ArgumentError(f"{name} has no argument {key!r}.", user_line(), hint=hint)
