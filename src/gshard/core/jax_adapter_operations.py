"""Watches and changes the operations that a function performs while JAX traces it.

``operations_handled`` passes each operation of the user's own code to a function, which may change its results. The
operations by which JAX differentiates, transposes or lowers others are performed as always. A constraint that is added
here is therefore the constraint that the user would write at this line: JAX differentiates it and batches it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import operator
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any

import jax
from jax._src import core as _core
from jax._src import source_info_util as _source_info_util
from jax._src.interpreters import ad as _ad
from jax.sharding import NamedSharding, PartitionSpec

from gshard.core.jax_adapter import with_subclasses
from gshard.core.library_files import is_of_library

_PATCHING = threading.RLock()  # one thread at a time replaces the method of JAX
# JAX keeps what it traced of a function for each value of this context, and so traces it again under a new value.
_attempt = jax.make_user_context(None)
_INTERPRETERS = os.path.dirname(_ad.__file__) + os.sep  # the files that trace, differentiate and batch functions

_DEEP = 8  # calls of the user's around an operation that are noted


@dataclasses.dataclass(frozen=True, slots=True)
class Expression:
    """The place of an expression of the user's in a source file; columns count bytes from 0."""

    file: str  # the path of the file
    line: int  # line, column: its begin
    column: int
    end_line: int  # end_line, end_column: its end; 0 where Python does not record it
    end_column: int
    function: str  # the name of the function that contains it


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """One operation that the user's code performs."""

    primitive: str  # its name
    operands: tuple[Any, ...]  # arrays or tracers
    # the spec, if it is a ``with_sharding_constraint`` of a ``NamedSharding``; else None
    constraint: PartitionSpec | None
    expression: Expression | None  # what performs it; None if no frame of the user's is known
    around: tuple[Expression, ...]  # the expressions in whose evaluation this one is evaluated, innermost first
    execution: Any  # the Python frame that the expression called. It differs between two executions of one expression.
    # whether JAX performs it while it traces, differentiates or batches a function of its own for the expression: the
    # operations in ``jax.nn.gelu``, which is jitted, for example
    is_nested: bool


# Takes an operation and what performs it; returns its results, or others of the same types.
Handler = Callable[[Operation, Callable[[], Sequence[Any]]], Sequence[Any]]


@contextlib.contextmanager
def operations_handled(handler: Handler) -> Iterator[None]:
    """A context in which each operation of the user's code, in this thread, goes through a function.

    Functions are traced again in this context, also those that JAX has traced before, so that none is missed.
    """
    thread, is_inside, expressions = threading.get_ident(), False, _Expressions()

    def handled(before: Callable[..., Any], primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> Any:
        nonlocal is_inside
        if is_inside or threading.get_ident() != thread or _is_derived():
            return before(primitive, *operands, **params)
        # A primitive with a method of its own calls a function, whose operations are the user's or nested.
        calls = before is not methods[_core.Primitive]
        found, execution, is_nested = expressions.of(inspect.currentframe())
        spec = _spec_of(primitive, params)
        given = Operation(
            primitive.name, tuple(operands), spec, next(iter(found), None), found[1:], execution, is_nested
        )

        performed: list[tuple[Any, Sequence[Any]]] = []

        def perform() -> Sequence[Any]:
            nonlocal is_inside
            is_inside = not calls
            made = before(primitive, *operands, **params)
            is_inside = True
            performed.append((made, tuple(made) if primitive.multiple_results else (made,)))
            return performed[-1][1]

        is_inside = True
        try:
            results = list(handler(given, perform))
        finally:
            is_inside = False
        for made, values in performed:
            if len(values) == len(results) and all(map(operator.is_, values, results)):
                return made
            if not isinstance(made, list | tuple) and primitive.multiple_results:
                raise NotImplementedError(f"the results of {primitive} cannot be changed")
        return results if primitive.multiple_results else results[0]

    with _PATCHING:
        methods = {cls: vars(cls)["bind"] for cls in with_subclasses(_core.Primitive) if "bind" in vars(cls)}
        for cls, before in methods.items():
            cls.bind = _through(handled, before)
        try:
            with _attempt(object()):
                yield
        finally:
            for cls, before in methods.items():
                cls.bind = before


def _through(handled: Callable[..., Any], before: Callable[..., Any]) -> Callable[..., Any]:
    return lambda primitive, *operands, **params: handled(before, primitive, operands, params)


def _spec_of(primitive: Any, params: Mapping[str, Any]) -> PartitionSpec | None:
    sharding = params.get("sharding") if primitive.name == "sharding_constraint" else None
    return sharding.spec if isinstance(sharding, NamedSharding) else None


def _is_derived() -> bool:
    """Whether JAX performs the operation for another one, whose source line it has set: it transposes, for example."""
    return _source_info_util._source_info_context.context.traceback is not None


class _Expressions:
    """Finds the user's expression that performs an operation; each file and each instruction is looked at once."""

    def __init__(self) -> None:
        self._is_users: dict[str, bool] = {}
        self._at: dict[tuple[CodeType, int], Expression] = {}

    def of(self, frame: FrameType | None) -> tuple[tuple[Expression, ...], Any, bool]:
        """The user's expressions, the frame that the innermost one called, and whether JAX traces inside of it."""
        called: Any = object()  # without a frame in between, each operation is an execution of its own
        found: list[Expression] = []
        is_nested = False
        while frame is not None and len(found) < _DEEP:
            file = frame.f_code.co_filename
            if file not in self._is_users:
                self._is_users[file] = _source_info_util.is_user_filename(file) and not is_of_library(file)
            if self._is_users[file]:
                found.append(self._read(frame.f_code, frame.f_lasti))
            elif not found:
                is_nested |= file.startswith(_INTERPRETERS)
                called = frame
            frame = frame.f_back
        return tuple(found), called, is_nested

    def _read(self, code: CodeType, instruction: int) -> Expression:
        if (code, instruction) not in self._at:
            positions = next(itertools.islice(code.co_positions(), instruction // 2, None))
            line, end_line, column, end_column = (part or 0 for part in positions)
            self._at[code, instruction] = Expression(
                code.co_filename, line or code.co_firstlineno, column, end_line, end_column, code.co_name
            )
        return self._at[code, instruction]
