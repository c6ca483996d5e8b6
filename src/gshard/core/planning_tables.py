"""Memoises pure functions while a program is planned, priced, searched or explained.

Planning calls a few functions very often with the same arguments, such as the steps between two shardings.
``tabulated`` keeps their results in tables. The tables exist from the beginning to the end of the outermost call of a
function that is decorated by ``with_tables``. So a plan does not depend on earlier plans in the process or on plans of
other threads, and the memory is freed after the plan.

    >>> @tabulated(8)
    ... def square(x):
    ...     print("computed")
    ...     return x * x
    >>> @with_tables
    ... def twice(x):
    ...     return square(x) + square(x)
    >>> twice(3), twice(3)
    computed
    computed
    (18, 18)
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar, cast

_P = ParamSpec("_P")
_R = TypeVar("_R")

_MemoisedOf = dict[Callable[..., Any], Callable[..., Any]]  # the memoised function of each function
_current: contextvars.ContextVar[_MemoisedOf | None] = contextvars.ContextVar("gshard_tables", default=None)


@contextlib.contextmanager
def tables() -> Iterator[None]:
    """Keeps results of ``tabulated`` functions until the end of this block, or of an enclosing one."""
    if _current.get() is not None:
        yield
        return
    token = _current.set({})
    try:
        yield
    finally:
        _current.reset(token)


def with_tables(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """A decorator: each call of the function keeps the results of ``tabulated`` functions until its end."""

    @functools.wraps(function)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with tables():
            return function(*args, **kwargs)

    return called


def tabulated(size: int) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """A decorator that memoises a pure function of hashable arguments while there are tables."""

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def called(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            memoised_of = _current.get()
            if memoised_of is None:
                return function(*args, **kwargs)
            memoised = memoised_of.get(called)
            if memoised is None:
                memoised = memoised_of.setdefault(called, functools.lru_cache(maxsize=size)(function))
            return cast(_R, memoised(*args, **kwargs))

        return called

    return decorate
