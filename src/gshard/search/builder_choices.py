"""Reads from a builder of training steps what may be chosen.

A builder is a function of keywords that returns ``(step, *arguments)``. A keyword has the values that the user states,
else those of its annotation, else the usual ones of its name.
"""

from __future__ import annotations

import inspect
import itertools
import os
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from gshard.core.errors import ArgumentError, known_names
from gshard.core.jax_adapter import user_line
from gshard.core.paths import place_of_definition
from gshard.tracing.by_jax import name_of

MICRO_BATCHES, RECOMPUTE, GLOBAL_BATCH = "micro_batches", "recompute", "global_batch"

# Names in ``jax.checkpoint_policies``, from the one that recomputes least to the one that recomputes most.
POLICIES = ("everything_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable", "nothing_saveable")

_HINT = (
    "A builder returns (step, *arguments) for keywords such as micro_batches and recompute. Give values of others as "
    "choices={'keyword': [values]}. For a step without keywords use gshard.search."
)


def choices_of(
    builder: Callable[..., Any], global_batch: int | None, choices: Mapping[str, Sequence[Any]] | None
) -> tuple[dict[str, tuple[Any, ...]], dict[str, Any]]:
    """The values that each keyword of a builder may have, and the keywords that have one value."""
    if not callable(builder):
        raise ArgumentError(f"gshard.configure takes a builder, not a {type(builder).__name__}.", hint=_HINT)
    name, where = name_of(builder), _place(builder)
    batch = _checked_batch(global_batch)
    stated = {str(key): _checked_values(key, values) for key, values in dict(choices or {}).items()}
    parameters, annotations = _parameters(builder), _annotations(builder)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    keywords = {n: p for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    for key in stated:
        if key not in keywords and not takes_any:
            raise ArgumentError(
                f"{name} has no keyword {key!r}.", where, hint=known_names(key, list(keywords), "Its keywords are")
            )
    found: dict[str, tuple[Any, ...]] = {}
    fixed: dict[str, Any] = {}
    for key, parameter in keywords.items():
        if key in stated:
            found[key] = stated[key]
        elif key == GLOBAL_BATCH and batch is not None:
            fixed[key] = batch
        elif annotated := _annotated(annotations.get(key)):
            found[key] = annotated
        elif key == MICRO_BATCHES and batch is not None:
            found[key] = tuple(n for n in range(1, batch + 1) if batch % n == 0)
        elif key == RECOMPUTE:
            found[key] = POLICIES
        elif parameter.default is parameter.empty or key == MICRO_BATCHES:
            raise _no_values(key, name, where)
    found |= {key: values for key, values in stated.items() if key not in found}
    positional = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
    if positional:
        raise _no_values(positional[0], name, where)
    if not found:
        had = ", ".join(keywords) or "none"
        raise ArgumentError(f"{name} has no keyword to choose.", where, f"keywords: {had}", _HINT)
    if batch is not None and (wrong := [n for n in found.get(MICRO_BATCHES, ()) if not _divides(n, batch)]):
        raise ArgumentError(
            f"a global batch of {batch} is not divided evenly by {wrong[0]!r} micro-batches.",
            where,
            f"micro_batches: {', '.join(map(repr, found[MICRO_BATCHES]))}",
            "Give divisors of global_batch, or leave out choices of micro_batches to try all of them.",
        )
    return found, fixed


def combinations(choices: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """All combinations of values, those of the last keyword changing first."""
    for values in itertools.product(*choices.values()):
        yield dict(zip(choices, values, strict=True))


def text_of(keywords: Mapping[str, Any]) -> str:
    """Keywords as text.

    >>> text_of({"micro_batches": 4, "recompute": "full"})
    "micro_batches=4, recompute='full'"
    """
    return ", ".join(f"{key}={value!r}" for key, value in keywords.items())


def _no_values(key: str, name: str, where: str | None) -> ArgumentError:
    if key == MICRO_BATCHES:
        what, hint = "gshard does not have the batch to divide", "Give global_batch=, or choices={'micro_batches': []}."
        return ArgumentError(f"{name} takes micro_batches, and {what}.", where, hint=hint.replace("[]", "[1, 2, 4]"))
    if key == GLOBAL_BATCH:
        return ArgumentError(f"{name} takes global_batch, which is not given.", where, hint="Give global_batch=.")
    return ArgumentError(
        f"{name} needs {key!r}, for which there are no values.",
        where,
        hint=f"Give choices={{{key!r}: [values]}}, or a default in the builder.",
    )


def _place(builder: Callable[..., Any]) -> str | None:
    place = place_of_definition(builder)
    return None if place is None else f"{os.path.basename(place[0])}:{place[1]} ({name_of(builder)})"


def _checked_batch(batch: Any) -> int | None:
    is_number = not isinstance(batch, bool) and hasattr(batch, "__index__") and int(batch) > 0
    if batch is None or is_number:
        return None if batch is None else int(batch)
    raise ArgumentError(
        f"global_batch={batch!r} is no number of examples.", user_line(), hint="Give the examples of one step: 512."
    )


def _checked_values(key: Any, values: Any) -> tuple[Any, ...]:
    if isinstance(values, str | bytes) or not hasattr(values, "__iter__") or not (made := tuple(values)):
        raise ArgumentError(
            f"choices of {key!r} are no list of values.",
            user_line(),
            f"{key!r}: {values!r}",
            "Give one or more values.",
        )
    return made


def _divides(n: Any, batch: int) -> bool:
    return isinstance(n, int) and not isinstance(n, bool) and n > 0 and batch % n == 0


def _parameters(builder: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(builder).parameters
    except (TypeError, ValueError):
        return {}


def _annotations(builder: Callable[..., Any]) -> Mapping[str, Any]:
    try:
        return typing.get_type_hints(builder)
    except Exception:  # of any kind: annotations may be text that names nothing
        return {}


def _annotated(annotation: Any) -> tuple[Any, ...]:
    """The values of ``Literal[...]`` and of ``bool``; none of another annotation."""
    if annotation is bool:
        return False, True
    return typing.get_args(annotation) if typing.get_origin(annotation) is typing.Literal else ()
