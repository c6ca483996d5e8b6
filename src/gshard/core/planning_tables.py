"""Tables: memoises pure functions while one program is planned, priced, searched or explained.

Planning calls a few functions very often with the same arguments: which steps lead from a sharding to others, what an
exchange sends. ``tabulated`` keeps their results in the tables of whoever plans. They begin with the outermost call of
a function that is ``with_tables`` and are freed with it. So a plan does not depend on what was planned before it in the
process, or is planned beside it in another thread, and no memory is kept.

What is jitted plans the same program twice: the state of a training step comes back with shardings of its own. Its
``Tables`` are kept for a few plans, and die with it.

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
import threading
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar, cast

_P = ParamSpec("_P")
_R = TypeVar("_R")

_Kept = dict[Callable[..., Any], Callable[..., Any]]
_current: contextvars.ContextVar[_Kept | None] = contextvars.ContextVar("gshard_tables", default=None)


class Tables:
    """Tables that are kept for several plans, one after the other.

    Args:
        plans: after so many, the tables start again.
    """

    def __init__(self, plans: int):
        self._plans, self._left, self._kept, self._lock = plans, 0, _Kept(), threading.Lock()

    @contextlib.contextmanager
    def for_one_plan(self) -> Iterator[None]:
        """Takes these tables until its end; others, if another thread has them or there are some already."""
        if _current.get() is not None or not self._lock.acquire(blocking=False):
            with tables():
                yield
            return
        try:
            if self._left == 0:
                self._kept, self._left = {}, self._plans
            self._left -= 1
            token = _current.set(self._kept)
            try:
                yield
            finally:
                _current.reset(token)
        finally:
            self._lock.release()

    def cache_clear(self) -> None:
        """Frees what is kept. A plan that is being made keeps its own."""
        self._left, self._kept = 0, {}


@contextlib.contextmanager
def tables() -> Iterator[None]:
    """Keeps results of ``tabulated`` functions until its end, or that of the outermost one around it."""
    if _current.get() is not None:
        yield
        return
    token = _current.set({})
    try:
        yield
    finally:
        _current.reset(token)


def with_tables(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """A function whose call keeps the results of ``tabulated`` functions."""

    @functools.wraps(function)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if _current.get() is not None:
            return function(*args, **kwargs)
        token = _current.set({})
        try:
            return function(*args, **kwargs)
        finally:
            _current.reset(token)

    return called


def tabulated(size: int) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Keeps the latest results of a pure function of arguments with a hash, while there are tables; else computes.

    Args:
        size: how many results are kept.
    """

    def of(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def called(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            kept = _current.get()
            if kept is None:
                return function(*args, **kwargs)
            known = kept.get(called)
            if known is None:
                known = kept.setdefault(called, functools.lru_cache(maxsize=size)(function))
            return cast(_R, known(*args, **kwargs))

        return called

    return of
