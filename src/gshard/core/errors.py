"""Errors: one family, one layout.

Every message a user can see says, in this order: what is wrong, where in their file, what was
given, and a hint.

    ShardingError: dimension 0 of f32[12,512] is split over axis 'expert' twice.
      at train.py:41 (loss)
      mesh: data=2 expert=4
      Name each mesh axis once.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, Self


class GShardError(Exception):
    """Base of every error that gshard raises on purpose.

    Args:
        what: one sentence that names the problem.
        where: the user's file and line, or None when there is none.
        got: what was given (shapes, mesh, values).
        hint: what to do instead.
    """

    def __init__(self, what: str, where: str | None = None, got: str | None = None, hint: str | None = None):
        lines = [what]
        if where:
            lines.append(f"  at {where}")
        if got:
            lines.append(f"  {got}")
        if hint:
            lines.append(f"  {hint}")
        Exception.__init__(self, "\n".join(lines))
        self.what, self.where, self.got, self.hint = what, where, got, hint

    @classmethod
    def like(
        cls, error: Exception, what: str, where: str | None = None, got: str | None = None, hint: str | None = None
    ) -> Self:
        """The same error, which is also of another error's type: ``except TypeError`` catches it.

        >>> isinstance(TraceError.like(ValueError("no"), "it cannot be."), ValueError)
        True
        """
        kind: Any = _also_of_type(cls, type(error))  # type: ignore[arg-type]
        made: Self = kind.__new__(kind)
        GShardError.__init__(made, what, where, got, hint)
        return made


class MeshError(GShardError):
    """The mesh itself makes no sense (no devices, an axis named twice, ...)."""


class ShardingError(GShardError):
    """A mark or a sharding does not fit its array or the mesh."""


class TraceError(GShardError):
    """The function cannot be turned into a program."""


class PlanError(GShardError):
    """A plan breaks a promise that the user asked for (``strict=True``)."""


class RuleError(GShardError):
    """A rule contradicts its equation: a mistake in a rule, not in the user's program."""


class ArgumentError(GShardError, TypeError):
    """An argument of a call, or what names arguments, is not what it must be."""


def _also_of_type(ours: Any, theirs: Any) -> Any:
    """A class of errors that is both; prints as ours does."""
    if issubclass(ours, theirs):
        return ours
    return type(ours.__name__, (ours, theirs), {"__module__": ours.__module__, "__doc__": ours.__doc__})


def known_names(name: str, known: Iterable[str], what: str = "The mesh has") -> str:
    """The hint for a name that is not known: the one that was meant, if it can be told, and all that there are.

    >>> known_names("dat", ("data", "model"))
    "Did you mean 'data'? The mesh has 'data', 'model'."
    """
    names = list(known)
    meant = difflib.get_close_matches(name, names, n=1) if len(names) > 1 else []
    return f"{f'Did you mean {meant[0]!r}? ' if meant else ''}{what} {', '.join(map(repr, names))}."
