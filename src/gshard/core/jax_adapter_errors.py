"""Carries errors of gshard through XLA, so that errors raised during XLA's partitioning reach the user unchanged.

XLA calls Python for the per-device program of an operator (``api.at_partitioning``). It converts an exception of this
call to the text of a ``JaxRuntimeError``. gshard writes the fields of a ``GShardError`` into this text. When a
compilation fails, JAX calls a handler, which reads the fields and creates the ``GShardError`` again.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from jax._src import compiler as _compiler

from gshard.core.errors import GShardError
from gshard.core.jax_adapter import with_subclasses

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
