"""Lists how gshard treats each parameter of each JAX primitive, and finds parameters that it does not keep.

    KEPT        the per-device program contains the parameter or depends on it
    IRRELEVANT  the program computes, places and sends the same without it; the row states why
    REPORTED    not kept: ``gshard.explain(...).dropped`` lists it with its line, and ``strict=True`` refuses it
    OPTIONS     contains options of an inner ``gshard.jit``; options that the outer one does not have are REPORTED
    REFUSED     without it arrays would be placed or sent differently: gshard raises an error

gshard keeps all parameters of a primitive that it binds on every device with the parameters of the equation
(``ledger_rows.BOUND``). A primitive that gshard opens, or runs on shards in another way, has a row for each parameter.
A parameter without a row comes from a JAX release that has not been reviewed, so gshard reports it. gshard does not
report values without meaning (None, False, unspecified shardings).
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

# Parameters that state the sharding of a result. Tracing converts them to marks (``tracing.demanded``).
RESULT_SHARDINGS = frozenset(("sharding", "out_sharding"))

_UNREAD = "This version of gshard does not read it."
_SHOWN = 80  # shown characters of a value


def says_something(value: Any) -> bool:
    """Whether the value of a parameter differs from the value without user input.

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
    """The treatment of a parameter."""

    way: str  # KEPT, IRRELEVANT, REPORTED, OPTIONS or REFUSED
    why: str = ""  # the reason, or a sentence that states what gshard does instead
    hint: str = ""  # the way out for the user, if the parameter is refused
    loses: Callable[[Any], bool] = says_something  # returns whether a value of the parameter is lost


def rows_of_text(text: str, row: Row) -> Iterator[tuple[str, dict[str, Row]]]:
    """The rows of a text with lines ``primitives: parameters``. An indented line continues the line before."""
    for line in filter(None, text.replace("\n ", " ").splitlines()):
        names, _, parameters = line.partition(":")
        for name in names.split():
            yield name, dict.fromkeys(parameters.split(), row)


_LOSES = {"exported": lambda exported: b"manual_computation" in exported.mlir_module_serialized}


def _ledger() -> dict[str, dict[str, Row]]:
    ledger: dict[str, dict[str, Row]] = {}
    for name, rows in rows_of_text(BOUND, Row(KEPT)):
        ledger.setdefault(name, {}).update(rows)
    for names, parameters, way, why, *hint in LOST:
        for name in names.split():
            row = Row(way, why, "".join(hint), _LOSES.get(parameters, says_something))
            ledger.setdefault(name, {}).update(dict.fromkeys(parameters.split(), row))
    return ledger


LEDGER: Mapping[str, Mapping[str, Row]] = _ledger()
_ANY = "*"  # stands for all other parameters of a primitive


def row_of(primitive: str, parameter: str) -> Row | None:
    """The row of a parameter; None if it is not classified.

    >>> row_of("jit", "inline").way, row_of("composite", "name").way, row_of("jit", "new_in_jax_9")
    ('IRRELEVANT', 'REPORTED', None)
    """
    rows = LEDGER.get(primitive, {})
    return rows.get(parameter, rows.get(_ANY))


def unclassified(primitive: str, parameters: Iterable[str]) -> tuple[str, ...]:
    """The parameters of a primitive that have no row.

    >>> unclassified("scan", ("length", "reverse", "speed"))
    ('speed',)
    """
    return tuple(p for p in parameters if row_of(primitive, p) is None)


def dropped(eqn: Any, source: Any) -> Iterator[Dropped]:
    """The parameters, settings and effects of an equation that gshard does not keep."""
    name = eqn.primitive.name
    params = eqn.params
    for parameter, row in _may_be_lost(name, tuple(params)):
        value = params[parameter]
        if not row.loses(value):
            continue
        if row.way == OPTIONS:
            for option, setting in value.options.items():
                text = getattr(setting, "name", None) or _text(setting)
                yield Dropped(f"{option} of an inner gshard.jit", text, user_line(source), row.why, (option, setting))
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
    """Checks that all results of an equation are arrays."""
    if eqn.primitive.name == "inspect_sharding":
        hint = "Remove the call: gshard.explain(f, ...) shows the sharding of each array, and why it has it."
        raise TraceError("jax.debug.inspect_array_sharding cannot see the plan.", user_line(source), hint=hint)
    no_array = next((v.aval for v in eqn.outvars if not hasattr(v.aval, "shape")), None)
    if isinstance(no_array, AbstractToken):
        hint = "Leave tokens out: jax.debug.callback(..., ordered=True) keeps callbacks in their order."
        raise TraceError(f"{eqn.primitive.name} makes a token, which is no array.", user_line(source), hint=hint)
    if no_array is not None:
        what = f"{eqn.primitive.name} makes a value of the type {no_array}, which is no array."
        raise TraceError(what, user_line(source), hint="Pass the arrays that it is made of.")


@tabulated(4096)
def _may_be_lost(name: str, parameters: tuple[str, ...]) -> tuple[tuple[str, Row], ...]:
    """The parameters of a primitive that may be lost; none for primitives that are not JAX's."""
    if name not in LEDGER:
        return ()
    rows = ((p, row_of(name, p) or Row(REPORTED, _UNREAD)) for p in parameters)
    return tuple((p, row) for p, row in rows if row.way in (REPORTED, REFUSED, OPTIONS))


def _text(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
