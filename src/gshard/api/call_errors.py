"""Call errors: what is wrong with the arguments of a function that ``explain`` or ``search`` was given.

gshard.explain(f, x, msh=8)       # no option 'msh', and f has no such argument: did you mean 'mesh'?
gshard.explain(f, mesh=8)         # f needs arguments
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from gshard.core.errors import ArgumentError
from gshard.core.jax_adapter import user_line
from gshard.core.keywords import unknown_keyword
from gshard.tracing.by_jax import name_of

_OF_CALL = re.compile(r"(missing \d+ required|takes .* positional arguments? but|got an unexpected keyword)")


class clear_call_errors:
    """Inside, a ``TypeError`` because ``f`` does not take these arguments becomes an error that names them."""

    # A class, since a generator in ``contextlib`` leaves a frame in the traceback that the user sees.
    def __init__(
        self, asker: Callable[..., Any], f: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        self._call = asker, f, args, kwargs

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, TypeError) and (clear := _clear(*self._call, error)) is not error:
            raise clear from None


def _clear(
    asker: Callable[..., Any], f: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], error: TypeError
) -> TypeError:
    signature = _signature(f) if _OF_CALL.search(str(error)) else None
    if signature is None or _fits(signature, args, kwargs):
        return error
    what = f"{name_of(f)}({', '.join(signature.parameters)})"
    known = signature.parameters
    options = [p.name for p in inspect.signature(asker).parameters.values() if p.kind is p.KEYWORD_ONLY]
    wrong = next((k for k in kwargs if k not in known), None)
    if wrong is not None:
        hint = f"{what} has no such argument either."
        return unknown_keyword(f"gshard.{asker.__name__}", wrong, [*options, *known], hint)
    hint = f"Give its arguments, arrays or jax.ShapeDtypeStruct: gshard.{asker.__name__}(f, x, mesh=8)."
    if taken := [name for name in options if name in known]:
        hint += f"\n  {taken[0]}= is an option of gshard.{asker.__name__}: "
        hint += f"bind the argument of this name with functools.partial({name_of(f)}, {taken[0]}=...)."
    return ArgumentError(str(error), user_line(), f"{len(args) + len(kwargs)} given to {what}", hint)


def _signature(f: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(f)
    except (TypeError, ValueError):
        return None


def _fits(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True
