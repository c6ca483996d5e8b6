"""Removes frames of gshard from tracebacks, with JAX's filter and JAX's setting.

Each public function is a boundary (``without_our_frames``): below it, JAX's filter removes the frames of JAX and gshard
from an error and its causes, unless ``jax_traceback_filtering`` is ``off``.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
from jax._src import compiler as _compiler
from jax._src import dispatch as _dispatch
from jax._src import traceback_util as _traceback_util

from gshard.core.errors import GShardError
from gshard.core.jax_adapter import with_subclasses

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


# Errors of JAX: carries errors of gshard through XLA, and finds the operation that made a NaN.


_BEGIN, _END = "<gshard error: ", " :end of gshard error>"


@contextlib.contextmanager
def carried_through_xla() -> Iterator[None]:
    """Converts a ``GShardError`` that is raised inside to an error whose text ``carried_error`` can read."""
    try:
        yield
    except GShardError as error:
        fields = [type(error).__name__, error.what, error.where, error.got, error.hint]
        raise RuntimeError(f"{error}\n{_BEGIN}{json.dumps(fields)}{_END}") from error


def carried_error(error: BaseException) -> GShardError | None:
    """The ``GShardError`` whose fields the text of an error contains; None if it contains none.

    >>> try:
    ...     with carried_through_xla():
    ...         raise GShardError("it sends too much.", "train.py:3", hint="Mark it.")
    ... except RuntimeError as seen:
    ...     print(carried_error(seen))
    it sends too much.
      at train.py:3
      Mark it.
    """
    _, begin, rest = str(error).partition(_BEGIN)
    text, end, _ = rest.partition(_END)
    if not begin or not end:
        return None
    name, *fields = json.loads(text)
    error_type: Any = next((t for t in with_subclasses(GShardError) if t.__name__ == name), GShardError)
    original: GShardError = error_type.__new__(error_type)
    GShardError.__init__(original, *fields)
    return original


_compiler.register_xla_runtime_error_handler(carried_error)


# Finds the operation that made a NaN or an infinity, while ``jax.debug_nans`` or ``jax.debug_infs`` is on.

_Found = _dispatch.InternalFloatingPointError


def nan_found(error: BaseException) -> bool:
    """Whether an error comes from ``jax.debug_nans`` or ``jax.debug_infs``."""
    return isinstance(error, _Found)


def without_jit(run: Callable[[], Any], name: str) -> Any:
    """The results of a program that runs operation by operation, after a NaN was found in those of the compiled one."""
    with jax.disable_jit():
        results = run()
    try:
        _dispatch.check_special(name, [x for x in jax.tree.leaves(results) if hasattr(x, "dtype")])
    except _Found as found:
        raise invalid(found, name) from None
    return results


def invalid(error: BaseException, name: str) -> FloatingPointError:
    """The error for a NaN in the results of a function, if it cannot be told which operation made it."""
    kind = error.args[-1] if error.args else "nan"
    return FloatingPointError(
        f"invalid value ({kind}) encountered in the results of {name}. It is not known which operation made it: look "
        "for operations of NumPy, and for values that come in with the arguments."
    )
