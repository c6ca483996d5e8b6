"""Defines the errors that gshard raises. All messages have one layout."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, Self

LISTED = 6  # entries of a list in a message or a printed text


class GShardError(Exception):
    """Base class of all errors that gshard raises.

    Args:
        what: one sentence that names the problem.
        where: the user's file and line, or None if there is none.
        got: the given values (shapes, mesh, arguments).
        hint: a sentence that tells the user what to do instead.
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
        """An error that is also an instance of another error's type, so that ``except TypeError`` catches it.

        Args:
            error: the error whose type the new error has, too.
            what, where, got, hint: as in the constructor.

        >>> isinstance(TraceError.like(ValueError("no"), "it cannot be."), ValueError)
        True
        """
        combined_type: Any = _also_of_type(cls, type(error))  # type: ignore[arg-type]
        combined: Self = combined_type.__new__(combined_type)
        GShardError.__init__(combined, what, where, got, hint)
        return combined


class MeshError(GShardError):
    """The mesh is invalid (no devices, two axes of one name, ...)."""


class ShardingError(GShardError):
    """A mark or a sharding does not fit its array or the mesh."""


class TraceError(GShardError):
    """The function cannot be turned into a program."""


class PlanError(GShardError):
    """A plan violates a condition that the user has set (``strict=True``)."""


class RuleError(GShardError):
    """A rule contradicts its equation: a mistake in a rule, not in the user's program."""


class ArgumentError(GShardError, TypeError):
    """An argument of a call, or a specification that names arguments, is invalid."""


class ShardingWarning(UserWarning):
    """A function moves more data than its marks, its layout or its arguments suggest; one for each such function."""


def warn_once(name: str, told: set[str], what: str, found: Sequence[str], hint: str) -> None:
    """Warns of what a function does otherwise than its user may expect, unless ``told`` has a warning of this kind."""
    if not found or what in told:
        return
    told.add(what)
    silence = "To silence this: warnings.filterwarnings('ignore', category=gshard.ShardingWarning)."
    text = "\n  ".join([f"{name} {what}", *listed(found), hint, silence])
    warnings.warn(text, ShardingWarning, stacklevel=2)


def _also_of_type(gshard_type: Any, other_type: Any) -> Any:
    """A class that derives from both error types and has the name of the first."""
    if issubclass(gshard_type, other_type):
        return gshard_type
    attributes = {"__module__": gshard_type.__module__, "__doc__": gshard_type.__doc__}
    return type(gshard_type.__name__, (gshard_type, other_type), attributes)


def known_names(name: str, known: Iterable[str], what: str = "The mesh has") -> str:
    """The hint for an unknown name: the most similar known name, if there is one, and all known names.

    >>> known_names("dat", ("data", "model"))
    "Did you mean 'data'? The mesh has 'data', 'model'."
    """
    names = list(known)
    similar = difflib.get_close_matches(name, names, n=1) if len(names) > 1 else []
    question = f"Did you mean {similar[0]!r}? " if similar else ""
    return f"{question}{what} {', '.join(listed([repr(name) for name in names], 20))}."


def counted(n: int, one: str, several: str = "") -> str:
    """A number of things as text.

    >>> counted(1, "dimension"), counted(2, "dimension"), counted(2, "entry", "entries")
    ('1 dimension', '2 dimensions', '2 entries')
    """
    return f"{n} {one if n == 1 else several or f'{one}s'}"


def listed(entries: Sequence[str], most: int = LISTED) -> list[str]:
    """At most so many entries of a list in a text, and the number of the others.

    >>> listed(["a", "b", "c", "d"], 2)
    ['a', 'b', 'and 2 more']
    """
    return [*entries[:most], *([f"and {len(entries) - most} more"] if len(entries) > most else [])]
