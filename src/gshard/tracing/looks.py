"""Removes ``jax.debug.inspect_array_sharding`` and ``visualize_array_sharding`` from a function.

Before planning, each inspection (*look*) becomes an identity (``language.mark_primitive``), whose result later
equations read. The builder of the program records the value and creates no equation. So looks do not change the
program, and a value that only a look reads is not computed. The sharding of such a value comes from a second program,
the *watched* program, in which each look is an equation that reads its operand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var

from gshard.core.jax_adapter import closed, user_line
from gshard.core.look import Look
from gshard.core.program import Constant, Value
from gshard.language.mark_primitive import look_at_p
from gshard.tracing.partly_manual import has_automatic_axes

_LOOK = "inspect_sharding"


@dataclasses.dataclass(frozen=True)
class Numbered:
    """The callback of a look, with the number of the look in the function."""

    number: int
    callback: Callable[[Any], Any]


class Looks:
    """The looks of a jaxpr, and the jaxpr without them.

    Attributes:
        plain: the jaxpr with an identity for each look, without looks inside of ``shard_map``.
        watched: the jaxpr with looks whose callbacks are ``Numbered``, without looks inside of ``shard_map``.
    """

    def __init__(self, whole: Any):
        self._looks: list[Look] = []
        self._values: dict[int, list[Value | Constant]] = {}
        self._bodies: dict[tuple[Any, bool], tuple[Any, Any]] = {}
        self.plain, self.watched = self._parted(whole, False)

    def __bool__(self) -> bool:
        return bool(self._looks)

    def note(self, number: int, value: Value | Constant) -> None:
        """Records a value that a look inspects."""
        self._values.setdefault(number, []).append(value)

    def found(self) -> tuple[Look, ...]:
        """The looks in order, with their recorded values."""
        return tuple(
            dataclasses.replace(look, values=(*look.values, *self._values.get(i, ())))
            for i, look in enumerate(self._looks)
        )

    def _parted(self, jaxpr: Any, manual: bool) -> tuple[Any, Any]:
        """The plain and the watched version of a (closed) jaxpr; the jaxpr itself if it has no looks."""
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
        plain: list[Any] = []
        watched: list[Any] = []
        identity_of: dict[Any, Any] = {}  # for each inspected variable the result of its identity

        def read(v: Any) -> Any:
            return v if isinstance(v, Literal) else identity_of.get(v, v)

        for e in body.eqns:
            if e.primitive.name == _LOOK:
                look = self._look(e, manual)
                watched += [] if manual else [look]
                (operand,) = e.invars
                if not manual and not isinstance(operand, Literal):
                    result = Var(operand.aval)
                    params = {"number": look.params["callback"].number}
                    identity = look.replace(primitive=look_at_p, params=params, effects=type(look.effects)())
                    plain.append(identity.replace(invars=[read(operand)], outvars=[result]))
                    identity_of[operand] = result
                continue
            versions = {k: self._parameter(v, manual or _is_manual(e)) for k, v in e.params.items()}
            inputs = list(map(read, e.invars)) if identity_of else e.invars
            if all(plain_version is e.params[k] for k, (plain_version, _) in versions.items()):
                plain.append(e if not identity_of else e.replace(invars=inputs))
                watched.append(e)
                continue
            params = {k: plain_version for k, (plain_version, _) in versions.items()}
            effects = _effects_of(e.effects, _bodies_in(params))
            plain.append(e.replace(invars=inputs, params=params, effects=effects))
            watched.append(e.replace(params={k: watched_version for k, (_, watched_version) in versions.items()}))
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
        versions = [self._parameter(v, manual) for v in value]
        if all(a is v for (a, _), v in zip(versions, value, strict=True)):
            return value, value
        plain, watched = zip(*versions, strict=True)
        if hasattr(value, "_fields"):
            return type(value)(*plain), type(value)(*watched)
        return type(value)(plain), type(value)(watched)


def _is_manual(e: Any) -> bool:
    """Whether arrays in the bodies of an equation are one device's parts: the equation has a mesh without auto axes."""
    return "mesh" in e.params and not (e.primitive.name == "shard_map" and has_automatic_axes(e.params))


def _bodies_in(params: Mapping[str, Any]) -> list[Any]:
    values = [x for v in params.values() for x in (v if isinstance(v, (tuple, list)) else (v,))]
    return [closed(v)[0] for v in values if isinstance(v, (Jaxpr, ClosedJaxpr))]


def _effects_of(effects: Any, inside: list[Any]) -> Any:
    """The effects without the effect of looks, unless another equation or body inside has it."""
    return type(effects)(x for x in effects if not _is_debugging(x) or any(x in part.effects for part in inside))


def _is_debugging(effect: Any) -> bool:
    return type(effect).__name__ == "DebugEffect"


def number_of(name: str, params: Mapping[str, Any]) -> int | None:
    """The number of the look that an equation is; None for other equations."""
    return params["callback"].number if name == _LOOK else None
