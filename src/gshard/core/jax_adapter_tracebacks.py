"""Removes frames of gshard from tracebacks, with JAX's filter and JAX's setting.

Each public function is a boundary (``without_our_frames``): below it, JAX's filter removes the frames of JAX and gshard
from an error and its causes, unless ``jax_traceback_filtering`` is ``off``.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from jax._src import traceback_util as _traceback_util

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)

# JAX's filter removes frames in the folder of gshard, and in files of the standard library through which gshard calls
# itself (``cached_property``, ``contextmanager``).
for _path in (os.path.dirname(os.path.dirname(os.path.abspath(__file__))), functools.__file__, contextlib.__file__):
    _traceback_util.register_exclusion(_path)


def without_our_frames(f: F) -> F:
    """A decorator for boundaries: tracebacks of errors omit frames of gshard and JAX, unless JAX shows its own."""

    def filtered(*args: Any, **kwargs: Any) -> Any:
        try:
            return f(*args, **kwargs)
        except Exception as error:
            _filter_causes(error)
            raise

    boundary = _traceback_util.api_boundary(functools.wraps(f)(filtered))
    return boundary  # type: ignore[return-value]


def without_our_frames_in_methods(cls: C) -> C:
    """A class decorator that makes all public methods boundaries."""
    for name, member in list(vars(cls).items()):
        if not name.startswith("_") and inspect.isfunction(member):
            setattr(cls, name, without_our_frames(member))
    return cls


def _filter_causes(error: BaseException) -> None:
    if _traceback_util._filtering_mode() not in ("quiet_remove_frames", "remove_frames"):
        return
    for cause in _causes(error):
        if cause.__traceback__ is not None:
            cause.with_traceback(_traceback_util.filter_traceback(cause.__traceback__))


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The chain of causes of an error that Python prints, each cause once."""
    seen = {id(error)}
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
