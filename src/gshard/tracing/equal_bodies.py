"""Compares the bodies of two calls, and describes where they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.extend.linear_util import WrappedFun

from gshard.core.jax_adapter import called_jaxpr, closed, user_line
from gshard.language.batch import same


def first_difference(one: Any, other: Any, *, constants: bool = True) -> str:
    """Where two (closed) jaxprs differ; empty if they compute the same, up to the names of variables.

    Functions in the parameters of calls do not count: they are rules for derivatives of what the body computes.

    >>> import jax, jax.numpy as jnp
    >>> two, three = (jax.make_jaxpr(jnp.sin)(jnp.zeros(n)) for n in (2, 3))
    >>> first_difference(two, two), first_difference(two, three)
    ('', 'one has the operands f32[2], the other f32[3]')
    """
    (x, consts_x), (y, consts_y) = closed(one), closed(other)
    inputs = (*x.constvars, *x.invars), (*y.constvars, *y.invars)
    if _types(inputs[0]) != _types(inputs[1]):
        return f"one has the operands {_types(inputs[0])}, the other {_types(inputs[1])}"
    if constants and not all(map(_equal, consts_x, consts_y)):
        return "their constants differ"
    matching = dict(zip(*inputs, strict=True))
    for e, f in zip(x.eqns, y.eqns, strict=False):
        if difference := _of_equations(e, f, matching):
            return difference
        matching.update(zip(e.outvars, f.outvars, strict=True))
    if len(x.eqns) != len(y.eqns):
        shorter, longer = sorted((x.eqns, y.eqns), key=len)
        return f"only one has {_text(longer[len(shorter)])}"
    if _types(x.outvars) != _types(y.outvars):
        return f"one has the results {_types(x.outvars)}, the other {_types(y.outvars)}"
    return "" if all(same_operand(v, w, matching) for v, w in zip(x.outvars, y.outvars, strict=True)) else (
        "their results are in another order"
    )  # fmt: skip


def _of_equations(e: Any, f: Any, matching: dict[Any, Any]) -> str:
    """Where two equations differ; empty if they do not."""
    if e.primitive is not f.primitive or _types(e.outvars) != _types(f.outvars) or len(e.invars) != len(f.invars):
        return f"one has {_text(e)}, the other {_text(f)}"
    for v, w in zip(e.invars, f.invars, strict=True):
        if not same_operand(v, w, matching):
            return f"{_text(e)} reads {_operand(v)} in one, and {_operand(w)} in the other"
    is_call = called_jaxpr(e) is not None
    for name in sorted(e.params.keys() | f.params.keys()):
        value, other = e.params.get(name), f.params.get(name)
        if is_call and _is_function(value) and _is_function(other):
            continue
        bodies = _jaxprs(value), _jaxprs(other)
        if len(bodies[0]) != len(bodies[1]) or not (bodies[0] or _equal(value, other)):
            return f"{_text(e)} has another {name} in one than in the other"
        for difference in map(first_difference, *bodies):
            if difference:
                return difference
    return ""


def _is_function(value: Any) -> bool:
    return callable(value) or isinstance(value, WrappedFun)


def _jaxprs(value: Any) -> Sequence[Any]:
    """The jaxprs of a parameter: it is one, or a list of them (the branches of a cond)."""
    several = value if isinstance(value, tuple | list) else (value,)
    return several if several and all(isinstance(v, Jaxpr | ClosedJaxpr) for v in several) else ()


def same_operand(v: Any, w: Any, matching: Mapping[Any, Any]) -> bool:
    """Whether two operands are the same."""
    if isinstance(v, Literal) and isinstance(w, Literal):
        return _types([v]) == _types([w]) and _equal(v.val, w.val)
    return not isinstance(v, Literal) and matching.get(v, v) is w


def _equal(x: Any, y: Any) -> bool:
    """Whether two parameters or constants are equal. Those that cannot be compared are not."""
    if x is y or same(x, y):
        return True
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        if (np.shape(x), x.dtype) != (np.shape(y), getattr(y, "dtype", None)):
            return False
        return not _is_extended(x) and np.asarray(x).tobytes() == np.asarray(y).tobytes()
    if isinstance(x, float) and isinstance(y, float):
        return np.float64(x).tobytes() == np.float64(y).tobytes()
    try:
        return type(x) is type(y) and bool(x == y)
    except Exception:  # a parameter of a user's primitive may raise anything
        return False


def _is_extended(x: Any) -> bool:
    return bool(jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended))


def _types(variables: Sequence[Any]) -> str:
    """The dtypes and shapes, as text."""
    return ", ".join(v.aval.str_short(short_dtypes=True) for v in variables)


def _operand(v: Any) -> str:
    return str(v.val) if isinstance(v, Literal) else "another value"


def _text(e: Any) -> str:
    line = user_line(e.source_info)
    return f"{e.primitive.name}{f' at {line}' if line else ''}"
