"""Carries errors of gshard through XLA: what gshard raises while XLA partitions a program reaches the user unchanged.

XLA calls Python for the per-device program of an operator (``api.at_partitioning``). It turns an exception there into
text of a ``JaxRuntimeError``. The text holds the fields of the ``GShardError``; JAX calls a handler when a compilation
fails, and the handler makes the error from these fields.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from jax._src import compiler as _compiler

from gshard.core.errors import GShardError

_BEGIN, _END = "<gshard error: ", " :end of gshard error>"


@contextlib.contextmanager
def carried_through_xla() -> Iterator[None]:
    """Gives a ``GShardError`` that is raised inside a text from which ``carried_error`` makes it again."""
    try:
        yield
    except GShardError as error:
        fields = [type(error).__name__, error.what, error.where, error.got, error.hint]
        raise RuntimeError(f"{error}\n{_BEGIN}{json.dumps(fields)}{_END}") from error


def carried_error(error: BaseException) -> GShardError | None:
    """The ``GShardError`` whose fields are in the text of an error; None if there are none.

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
    kind: Any = next((k for k in _kinds(GShardError) if k.__name__ == name), GShardError)
    made: GShardError = kind.__new__(kind)
    GShardError.__init__(made, *fields)
    return made


def _kinds(kind: type[GShardError]) -> Iterator[type[GShardError]]:
    yield kind
    for more in kind.__subclasses__():
        yield from _kinds(more)


_compiler.register_xla_runtime_error_handler(carried_error)
