"""Tracebacks: frames of gshard are left out of tracebacks, as JAX leaves out its own, and by the same switch.

``jax.config.jax_traceback_filtering`` (``JAX_TRACEBACK_FILTERING``) says how: ``off`` keeps all frames. A public
function is a boundary (``without_our_frames``): below it, JAX's filter removes the frames of JAX and of gshard from an
error and from its causes. The error itself, its causes and the user's frames stay.
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

# JAX's filter leaves out frames of these: the folder of gshard, and files of the standard library through which gshard
# calls itself (``cached_property``, ``contextmanager``).
for _path in (os.path.dirname(os.path.dirname(os.path.abspath(__file__))), functools.__file__, contextlib.__file__):
    _traceback_util.register_exclusion(_path)


def without_our_frames(f: F) -> F:
    """The function as a boundary: errors that leave it show no frames of gshard and JAX, unless JAX shows its own."""

    def filtered(*args: Any, **kwargs: Any) -> Any:
        try:
            return f(*args, **kwargs)
        except Exception as error:
            _filter_causes(error)
            raise

    made = _traceback_util.api_boundary(functools.wraps(f)(filtered))
    return made  # type: ignore[return-value]


def without_our_frames_in_methods(kind: C) -> C:
    """A class whose public methods are boundaries; a decorator."""
    for name, member in list(vars(kind).items()):
        if not name.startswith("_") and inspect.isfunction(member):
            setattr(kind, name, without_our_frames(member))
    return kind


def _filter_causes(error: BaseException) -> None:
    if _traceback_util._filtering_mode() not in ("quiet_remove_frames", "remove_frames"):
        return
    for cause in _causes(error):
        if cause.__traceback__ is not None:
            cause.with_traceback(_traceback_util.filter_traceback(cause.__traceback__))


def _causes(error: BaseException) -> Iterator[BaseException]:
    """What an error came of, as Python prints it; each once."""
    seen = {id(error)}
    following = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or (None if following.__suppress_context__ else following.__context__)
