"""Finds the operation that made a NaN or an infinity, while ``jax.debug_nans`` or ``jax.debug_infs`` is on.

JAX then checks the results of every compiled program. It reports a NaN by an error that has no public name, and expects
the caller to run the function operation by operation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax._src import dispatch as _dispatch

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
