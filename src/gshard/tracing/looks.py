"""Takes ``jax.debug.inspect_array_sharding`` and ``visualize_array_sharding`` out of a function.

Before planning, each look becomes an identity (``language.look_primitive``), and later equations read its result. The
builder of the program notes the value and makes no equation. So the program is the one without looks, and a value that
only a look reads is not computed. The sharding of such a value comes from a second program, the *watched* one, in which
each look is an equation that reads its operand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var

from gshard.core.jax_adapter import closed, user_line
from gshard.core.look import Look
from gshard.core.program import Constant, Value
from gshard.language.look_primitive import look_at_p
from gshard.tracing.partly_manual import has_automatic_axes

_LOOK = "inspect_sharding"


@dataclasses.dataclass(frozen=True)
class Numbered:
    """The callback of a look, and which of the function's looks it is."""

    number: int
    callback: Callable[[Any], Any]


class Looks:
    """The looks of a jaxpr, and the jaxpr without them.

    Attributes:
        plain: the jaxpr, each look an identity; without those inside of ``shard_map``.
        watched: the jaxpr with them, each callback a ``Numbered``; without those inside of ``shard_map``.
    """

    def __init__(self, whole: Any):
        self._looks: list[Look] = []
        self._values: dict[int, list[Value | Constant]] = {}
        self._bodies: dict[tuple[Any, bool], tuple[Any, Any]] = {}
        self.plain, self.watched = self._parted(whole, False)

    def __bool__(self) -> bool:
        return bool(self._looks)

    def note(self, number: int, value: Value | Constant) -> None:
        """Notes a value that a look is at."""
        self._values.setdefault(number, []).append(value)

    def found(self) -> tuple[Look, ...]:
        """The looks in order, with the values that were noted."""
        return tuple(
            dataclasses.replace(look, values=(*look.values, *self._values.get(i, ())))
            for i, look in enumerate(self._looks)
        )

    def _parted(self, jaxpr: Any, manual: bool) -> tuple[Any, Any]:
        """A (closed) jaxpr with identities for looks, and one with numbered looks; itself where it has none."""
        body, _ = closed(jaxpr)
        if (body, manual) not in self._bodies:
            self._bodies[body, manual] = self._parted_body(body, manual)
        plain, watched = self._bodies[body, manual]
        if plain is body:
            return jaxpr, jaxpr
        if body is jaxpr:
            return plain, watched
        return jaxpr.replace(jaxpr=plain), jaxpr.replace(jaxpr=watched)

    def _parted_body(self, body: Any, manual: bool) -> tuple[Any, Any]:
        plain, watched = [], []
        seen: dict[Any, Any] = {}  # for each variable that a look is at, the result of its identity

        def read(v: Any) -> Any:
            return v if isinstance(v, Literal) else seen.get(v, v)

        for e in body.eqns:
            if e.primitive.name == _LOOK:
                made = self._look(e, manual)
                watched += [] if manual else [made]
                (operand,) = e.invars
                if not manual and not isinstance(operand, Literal):
                    result, number = Var(operand.aval), {"number": made.params["callback"].number}
                    same = made.replace(primitive=look_at_p, params=number, effects=type(made.effects)())
                    plain.append(same.replace(invars=[read(operand)], outvars=[result]))
                    seen[operand] = result
                continue
            parts = {k: self._parameter(v, manual or _is_manual(e)) for k, v in e.params.items()}
            inputs = list(map(read, e.invars)) if seen else e.invars
            if all(a is e.params[k] for k, (a, _) in parts.items()):
                plain.append(e if not seen else e.replace(invars=inputs))
                watched.append(e)
                continue
            params = {k: a for k, (a, _) in parts.items()}
            effects = _effects_of(e.effects, _bodies_in(params))
            plain.append(e.replace(invars=inputs, params=params, effects=effects))
            watched.append(e.replace(params={k: b for k, (_, b) in parts.items()}))
        if all(a is b for a, b in zip(plain, body.eqns, strict=False)) and len(plain) == len(body.eqns):
            return body, body
        return (
            body.replace(eqns=plain, outvars=list(map(read, body.outvars)), effects=_effects_of(body.effects, plain)),
            body.replace(eqns=watched),
        )

    def _look(self, e: Any, manual: bool) -> Any:
        (operand,) = e.invars
        number, callback = len(self._looks), e.params["callback"]
        constant = (Constant(operand.val),) if isinstance(operand, Literal) else ()
        look = Look(callback, tuple(operand.aval.shape), user_line(e.source_info), manual, constant)
        self._looks.append(look)
        return e.replace(params={**e.params, "callback": Numbered(number, callback)})

    def _parameter(self, value: Any, manual: bool) -> tuple[Any, Any]:
        if isinstance(value, (Jaxpr, ClosedJaxpr)):
            return self._parted(value, manual)
        if not isinstance(value, (tuple, list)):
            return value, value
        made = [self._parameter(v, manual) for v in value]
        if all(a is v for (a, _), v in zip(made, value, strict=True)):
            return value, value
        plain, watched = zip(*made, strict=True)
        if hasattr(value, "_fields"):
            return type(value)(*plain), type(value)(*watched)
        return type(value)(plain), type(value)(watched)


def _is_manual(e: Any) -> bool:
    """Whether an array inside is one device's part: in a shard_map over all axes, and in whatever else holds a mesh."""
    return "mesh" in e.params and not (e.primitive.name == "shard_map" and has_automatic_axes(e.params))


def _bodies_in(params: Mapping[str, Any]) -> list[Any]:
    values = [x for v in params.values() for x in (v if isinstance(v, (tuple, list)) else (v,))]
    return [closed(v)[0] for v in values if isinstance(v, (Jaxpr, ClosedJaxpr))]


def _effects_of(effects: Any, inside: list[Any]) -> Any:
    """The effects of what held a look: without the look's own, unless something else inside has it."""
    return type(effects)(x for x in effects if not _is_debugging(x) or any(x in made.effects for made in inside))


def _is_debugging(effect: Any) -> bool:
    return type(effect).__name__ == "DebugEffect"


def number_of(name: str, params: Mapping[str, Any]) -> int | None:
    """Which of the function's looks an equation is; None for one that is no look."""
    return params["callback"].number if name == _LOOK else None
