"""Ledger: each parameter of each JAX primitive, and what gshard does with it.

    KEPT        it is in the program that every device runs, or decides how that is made
    IRRELEVANT  without it the program computes, places and sends the same; the row says why
    REPORTED    it is not kept: ``gshard.explain(...).dropped`` lists it with its line, and ``strict=True`` refuses it
    OPTIONS     it holds options of an inner ``gshard.jit``: those that the outer one does not have are REPORTED
    REFUSED     without it arrays would lie elsewhere, or something else be sent: it is an error

A primitive that is bound on every device with the parameters of its equation keeps them all (``ledger_rows.BOUND``).
One that is opened, or runs on shards in its own way, has a row for each of them. A parameter without a row is reported:
it comes from a JAX release that has not been reviewed yet. Values without meaning (None, False, unspecified shardings)
are not reported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from gshard.core.dropped import Dropped
from gshard.core.errors import TraceError
from gshard.core.jax_adapter import user_line
from gshard.core.jax_adapter_context import AbstractToken, is_unspecified, settings_of
from gshard.core.planning_tables import tabulated
from gshard.language.ledger_rows import BOUND, EFFECTS, KEPT, LOST, OPTIONS, REFUSED, REPORTED, SETTINGS

# Where an operation says how its result is sharded: a mark (``tracing.demanded``).
RESULT_SHARDINGS = frozenset(("sharding", "out_sharding"))

_UNREAD = "This version of gshard does not read it."
_SHOWN = 80  # characters of a value


def says_something(value: Any) -> bool:
    """Whether a parameter's value is other than what it is where the user has written nothing.

    >>> says_something((None, False)), says_something(0), says_something("fast")
    (False, True, True)
    """
    if isinstance(value, (tuple, list)):
        return any(map(says_something, value))
    if isinstance(value, Mapping):
        return bool(value)
    return value is not None and value is not False and not is_unspecified(value)


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """What gshard does with a parameter.

    Attributes:
        way: KEPT, IRRELEVANT, REPORTED, OPTIONS or REFUSED.
        why: the reason, or what gshard does instead.
        hint: what to write instead, if it is refused.
        loses: whether a value of it is lost.
    """

    way: str
    why: str = ""
    hint: str = ""
    loses: Callable[[Any], bool] = says_something


def rows_of_text(text: str, row: Row) -> Iterator[tuple[str, dict[str, Row]]]:
    """The rows of a text ``primitives: parameters``; lines that are indented belong to the one before."""
    for line in filter(None, text.replace("\n ", " ").splitlines()):
        names, _, parameters = line.partition(":")
        for name in names.split():
            yield name, dict.fromkeys(parameters.split(), row)


def _ledger() -> dict[str, dict[str, Row]]:
    made: dict[str, dict[str, Row]] = {}
    for name, rows in rows_of_text(BOUND, Row(KEPT)):
        made.setdefault(name, {}).update(rows)
    for names, parameters, way, why, *hint in LOST:
        for name in names.split():
            row = Row(way, why, "".join(hint))
            made.setdefault(name, {}).update(dict.fromkeys(parameters.split(), row))
    return made


LEDGER: Mapping[str, Mapping[str, Row]] = _ledger()
_ANY = "*"  # whatever else a primitive takes


def row_of(primitive: str, parameter: str) -> Row | None:
    """The row of a parameter; None if it is not classified.

    >>> row_of("jit", "inline").way, row_of("composite", "name").way, row_of("jit", "new_in_jax_9")
    ('IRRELEVANT', 'REPORTED', None)
    """
    rows = LEDGER.get(primitive, {})
    return rows.get(parameter, rows.get(_ANY))


def unclassified(primitive: str, parameters: Iterable[str]) -> tuple[str, ...]:
    """Those of a primitive's parameters for which there is no row.

    >>> unclassified("scan", ("length", "reverse", "speed"))
    ('speed',)
    """
    return tuple(p for p in parameters if row_of(primitive, p) is None)


def dropped(eqn: Any, source: Any) -> Iterator[Dropped]:
    """What an equation says and gshard does not keep.

    Args:
        eqn: an equation of a jaxpr.
        source: the ``source_info`` of the user's line of it.

    Raises:
        TraceError: without it arrays would lie elsewhere, or something else would be sent.
    """
    name, params = eqn.primitive.name, eqn.params
    for parameter, row in _may_be_lost(name, tuple(params)):
        value = params[parameter]
        if not row.loses(value):
            continue
        if row.way == OPTIONS:
            for option, given in value.options.items():
                shown = getattr(given, "name", None) or _text(given)
                yield Dropped(f"{option} of an inner gshard.jit", shown, user_line(source), row.why, (option, given))
            continue
        if row.way == REFUSED:
            what = f"{parameter} of '{name}' cannot be kept: {row.why}"
            raise TraceError(what, user_line(source), f"it is {_text(value)}", row.hint)
        yield Dropped(f"{parameter} of {name}", _text(value), user_line(source), row.why)
    for setting in settings_of(eqn.ctx):
        way, why = SETTINGS.get(setting.name, (REPORTED, _UNREAD))
        if way == REPORTED:
            yield Dropped(f"{setting.name} around {name}", _text(setting.value), user_line(source), why)
    for effect in eqn.effects:
        if type(effect).__name__ not in EFFECTS and name in LEDGER:
            yield Dropped(f"an effect of {name}", _text(effect), user_line(source), _UNREAD)


def check_arrays(eqn: Any, source: Any) -> None:
    """Checks that an equation makes arrays.

    Raises:
        TraceError: it makes a token, or a value of a type of the user's own (``jax.experimental.hijax``).
    """
    other = next((v.aval for v in eqn.outvars if not hasattr(v.aval, "shape")), None)
    if isinstance(other, AbstractToken):
        hint = "Leave tokens out: jax.debug.callback(..., ordered=True) keeps callbacks in their order."
        raise TraceError(f"{eqn.primitive.name} makes a token, which is no array.", user_line(source), hint=hint)
    if other is not None:
        what = f"{eqn.primitive.name} makes a value of the type {other}, which is no array."
        raise TraceError(what, user_line(source), hint="Pass the arrays that it is made of.")


@tabulated(4096)
def _may_be_lost(name: str, parameters: tuple[str, ...]) -> tuple[tuple[str, Row], ...]:
    """The parameters of a primitive that may be lost. What is not JAX's is bound, or opened, with all of them."""
    if name not in LEDGER:
        return ()
    rows = ((p, row_of(name, p) or Row(REPORTED, _UNREAD)) for p in parameters)
    return tuple((p, row) for p, row in rows if row.way in (REPORTED, REFUSED, OPTIONS))


def _text(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
