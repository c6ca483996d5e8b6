"""New kinds: logs what tells a call that needs a program of its own from the last one.

    step is planned again: x is float32[17,8], and was float32[16,8]

These records are warnings while ``jax_log_compiles`` is on, as those of phases (``core.phases``), and INFO otherwise.
A function that is planned again and again, as for shapes that change with each call, logs one warning in any case.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from gshard.api.signature import Leaf, Signature
from gshard.core.jax_adapter import user_line
from gshard.core.jax_adapter_dispatch import logs_compilations

_log = logging.getLogger("gshard")
_SHOWN = 4  # arguments
_MANY = 16  # kinds of arguments of one function: more than a program has on purpose


def log_new_kind(name: str, names: Callable[[], Sequence[str]], now: Signature, last: Signature, kinds: int) -> None:
    """Logs why a function is planned again."""
    if kinds == _MANY:
        _log.warning(
            "%s is planned and compiled for %d different kinds of arguments, at %s: %s. Pad arrays to a few sizes, and "
            "pass numbers that change as arrays, not as static arguments.",
            name, kinds, user_line(), _difference(names(), now, last),
        )  # fmt: skip
        return
    level = logging.WARNING if logs_compilations() else logging.INFO
    if _log.isEnabledFor(level):
        _log.log(level, "%s is planned again: %s", name, _difference(names(), now, last))


def _difference(names: Sequence[str], now: Signature, last: Signature) -> str:
    if now == last:
        return "its mesh is another one than before"
    if now.tree != last.tree:
        return "its arguments have another structure than before"
    if now.statics != last.statics:
        return "a static argument has another value than before"
    pairs = zip(names, now.leaves, last.leaves, strict=True)
    told = [f"{which} is {_text(one, two)}, and was {_text(two, one)}" for which, one, two in pairs if one != two]
    if not told:
        return "a setting of JAX or a rule has changed"
    more = f"; and {len(told) - _SHOWN} more arguments" if len(told) > _SHOWN else ""
    return "; ".join(told[:_SHOWN]) + more


def _text(leaf: Leaf, other: Leaf) -> str:
    if leaf.aval != other.aval:
        return str(leaf.aval.str_short()) + (" (weak type)" if getattr(leaf.aval, "weak_type", False) else "")
    return "not placed" if leaf.sharding is None else f"on {leaf.sharding}"
