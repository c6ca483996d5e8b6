"""Traced expressions: the user's expressions in a traced program, and sharding constraints on their values.

A constraint that you write also holds for the cotangent of the value. The traced program contains the derivative, so
``with_constraints`` also constrains the cotangent that enters the transposed equations of the same expression.
"""

from __future__ import annotations

import collections
import dataclasses
import linecache
import operator
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import Var
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gshard.core.jax_adapter import (
    Expression,
    bodies_as_written,
    closed,
    constraint_of,
    is_accumulation,
    is_backward,
    is_of_vmap,
    user_expression,
)
from gshard.core.jax_adapter_retracing import EachJaxpr
from gshard.core.mark import text_of_spec

_ASSIGNED = re.compile(r"\s*(\w+)(?:\s*:[^=]*)?\s+=\s+")  # in front of the value of a variable, not of a keyword
_AUGMENTED = re.compile(r"\s*(\w+)\s*(?:[-+*/@%&|^]|\*\*|//|<<|>>)=")

Type = tuple[tuple[int, ...], str]  # shape and dtype


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TracedExpression:
    """An expression of the user's, and the values that it has in the traced program."""

    place: Expression  # where it is written
    shape: tuple[int, ...] | None  # of its value; None for a constraint on arrays of several shapes, or in jax.vmap
    dtype: str
    spec: PartitionSpec | None  # what a constraint says that the user wrote here; None for another expression
    # the expressions whose values it reads, or that a call around it reads, such as a loop
    reads: frozenset[Expression]

    @property
    def type(self) -> str:
        """The type of its value: ``float32[32,128]``."""
        return f"{self.dtype} arrays" if self.shape is None else f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True, slots=True)
class Constraint:
    """A sharding constraint on the value of an expression."""

    expression: TracedExpression
    # None removes the constraint that the expression is. On such an expression a spec replaces the one that it has.
    spec: PartitionSpec | None

    @property
    def text(self) -> str:
        """What to write, and where: ``after train.py:9: x = jax.lax.with_sharding_constraint(x, P("data"))``."""
        place, file = self.expression.place, self.expression.place.file.rpartition("/")[2]
        new, written = "" if self.spec is None else text_of_spec(self.spec), "jax.lax.with_sharding_constraint"
        if self.expression.spec is not None:
            now = text_of_spec(self.expression.spec)
            change = f"remove the constraint {now}" if self.spec is None else f"{new} instead of {now}"
            return f"{file}:{place.line}: {change}"
        name, text = _source_of(place)
        if name:
            return f"after {file}:{max(place.line, place.end_line)}: {name} = {written}({name}, {new})"
        if text:
            return f"{file}:{place.line}: {written}({text}, {new}) instead of {text}"
        return f"{file}:{place.line}: {written}(..., {new}) around what makes this value"


class TracedProgram:
    """A traced program, its expressions whose values can be constrained, and how many have no one array as value."""

    def __init__(self, jaxpr: Any):
        self.jaxpr = jaxpr
        self.bodies = {id(b.body): b for b in _bodies(jaxpr, False, False, frozenset())}
        places = dict.fromkeys(place for body in self.bodies.values() for place, back in body.at if not back)
        read = [self._expression(place) for place in places]
        self.expressions = tuple(e for e in read if e is not None)
        self.left_out = len(read) - len(self.expressions)

    def _expression(self, place: Expression) -> TracedExpression | None:
        bodies = [body for body in self.bodies.values() if (place, False) in body.at]
        own = [(body, i) for body in bodies for i in body.at[place, False]]
        specs = {constraint_of(body.body.eqns[i]) for body, i in own}
        types = {_type_of(v) for body in bodies for v in body.values(place)}
        spec, type_of = specs.pop() if len(specs) == 1 else None, next(iter(types), None)
        is_mapped = any(body.is_mapped[i] for body, i in own)
        if type_of is None or None in types or (spec is None and (len(types) > 1 or is_mapped)):
            return None
        shape = None if len(types) > 1 or is_mapped else type_of[0]
        reads = frozenset[Expression]().union(*(body.places_read(i) for body, i in own))
        return TracedExpression(place, shape, type_of[1], spec, reads - {place})

    def with_constraints(self, constraints: Sequence[Constraint], mesh: Mesh) -> Any:
        """The jaxpr as if the user had written constraints."""
        return _Constraining(self, constraints, mesh).jaxpr(self.jaxpr)

    def cotangents(self, expression: TracedExpression) -> tuple[Expression, ...]:
        """The expressions whose transposed equations read the cotangent of the value of an expression.

        An addition has no transposed equations: its cotangent is that of a value which it alone reads.
        """
        place, bodies = expression.place, self.bodies.values()
        if any((place, True) in body.at for body in bodies):
            return (place,)
        added = frozenset[Expression]().union(*(body.added(place) for body in bodies if (place, False) in body.at))
        return tuple(
            q for q in added if all(body.readers_of(q) <= {place, q} for body in bodies if (q, False) in body.at)
        )


class _Body:
    """One body of the program: its equations by expression, those of the backward half of a gradient apart."""

    def __init__(self, body: Any, is_back: bool, is_mapped: bool, outer: frozenset[Expression]):
        self.body, self.is_inside_back, self.outer = body, is_back, outer
        self.is_back = [is_backward(e.source_info, is_back) for e in body.eqns]
        self.is_mapped = [is_mapped or is_of_vmap(e.source_info) for e in body.eqns]
        self.places = [user_expression(e.source_info) for e in body.eqns]
        self.at: dict[tuple[Expression, bool], list[int]] = {}  # equations of an expression, forward and backward
        self.maker = {v: i for i, e in enumerate(body.eqns) for v in e.outvars}
        self.inputs = [[v for v in e.invars if isinstance(v, Var)] for e in body.eqns]
        self.readers: dict[Any, list[int]] = collections.defaultdict(list)
        for i, place in enumerate(self.places):
            if place is not None:
                self.at.setdefault((place, self.is_back[i]), []).append(i)
            for v in self.inputs[i]:
                self.readers[v].append(i)

    def places_read(self, i: int) -> frozenset[Expression]:
        """The expressions whose values an equation reads, or a call around it."""
        made = {self.places[self.maker[v]] for v in self.inputs[i] if v in self.maker}
        return frozenset(place for place in made if place is not None) | self.outer

    def are_alike(self, place: Expression) -> bool:
        """Whether each equation of an expression makes a value of it, as x = x @ w in a Python loop."""
        own = [self.body.eqns[i] for i in self.at.get((place, False), ())]
        return len({(e.primitive, *map(_type_of, e.outvars)) for e in own}) == 1 == max(len(e.outvars) for e in own)

    def is_chain(self, place: Expression) -> bool:
        """Whether an expression may read its own value."""
        return len(self.at.get((place, False), ())) > 1 and self.are_alike(place)

    def values(self, place: Expression) -> list[Any]:
        """The variables that are the values of an expression, without what only its derivative reads."""
        made = [v for i in self.at.get((place, False), ()) for v in self.body.eqns[i].outvars]
        if not made or self.are_alike(place):
            return made
        read = [v for v in made if any(self.places[i] != place for i in self.readers[v])]
        results = [v for v in self.body.outvars if v in made]  # what a derivative reads is behind the results
        kinds = [self.body.eqns[self.maker[v]].primitive for v in results]
        return read or [v for v, kind in zip(results, kinds, strict=True) if kind is kinds[0]]

    def readers_of(self, place: Expression) -> set[Expression | None]:
        """The expressions that read the values of an expression in the forward half."""
        return {self.places[i] for v in self.values(place) for i in self.readers[v] if not self.is_back[i]}

    def added(self, place: Expression) -> set[Expression]:
        """The expressions whose values the equations that make a value read, of the same type."""
        pairs = [(v, u) for v in self.values(place) for u in self.inputs[self.maker[v]]]
        found = {self.places[self.maker[u]] for v, u in pairs if u in self.maker and _type_of(u) == _type_of(v)}
        return {q for q in found if q is not None and q != place}

    def entering(self, place: Expression, type_of: Type) -> Iterator[tuple[int, Any]]:
        """The cotangents that enter the transposed equations of an expression, with these equations."""
        is_chain = self.is_chain(place)
        for i in self.at.get((place, True), ()):
            for v in () if is_accumulation(self.body.eqns[i]) else self.inputs[i]:
                maker = self.maker.get(v)
                is_own = maker is not None and self.places[maker] == place and not is_chain
                is_back = self.is_inside_back if maker is None else self.is_back[maker]
                if is_back and not is_own and _type_of(v) == type_of:
                    yield i, v
                    break


def _bodies(jaxpr: Any, is_back: bool, is_mapped: bool, outer: frozenset[Expression]) -> Iterator[_Body]:
    """The bodies in which constraints can be written, from outside to inside."""
    body, _ = closed(jaxpr)
    yield (found := _Body(body, is_back, is_mapped, outer))
    for i, e in enumerate(body.eqns):
        for inner in bodies_as_written(e):
            yield from _bodies(inner, found.is_back[i], found.is_mapped[i], found.places_read(i))


class _Constraining(EachJaxpr):
    def __init__(self, program: TracedProgram, constraints: Sequence[Constraint], mesh: Mesh):
        super().__init__()
        self._program, self._mesh = program, mesh
        self._written = {c.expression.place: c.spec for c in constraints if c.expression.spec is not None}
        self._added = [c for c in constraints if c.expression.spec is None]
        self._places = {c.expression.place for c in self._added}
        self._cotangents = {c: program.cotangents(c.expression) for c in self._added}

    def body(self, body: Any) -> Any:
        """The body with constraints."""
        if (read := self._program.bodies.get(id(body))) is None:
            return body
        everywhere, inside = self._wanted(read)
        # What the derivative of an expression reads is its value without the constraint.
        own = {v: p for p in self._places for v in read.values(p) if not read.is_chain(p)}
        eqns: list[Any] = []
        instead: dict[Any, Any] = {}  # the constrained variable
        once: dict[Any, Any] = {}  # the same for the transposed equations of one expression

        def now(v: Any) -> Any:
            return instead.get(v, v) if isinstance(v, Var) else v

        def constrain(v: Any, spec: PartitionSpec, like: Any) -> Any:
            new, made = Var(v.aval), self._constraint(v.aval, spec)
            eqns.append(made.replace(invars=[now(v)], outvars=[new], source_info=like.source_info, ctx=like.ctx))
            return new

        for v in body.invars:
            if v in everywhere:
                instead[v] = constrain(v, everywhere[v], body.eqns[0])
        for i, old in enumerate(body.eqns):
            e, place = self.equation(old), read.places[i]
            inputs = [v if isinstance(v, Var) and own.get(v, -1) == place else now(v) for v in e.invars]
            if place in self._written and constraint_of(e) is not None:
                spec = self._written[place]
                if spec is None:
                    instead[e.outvars[0]] = inputs[0]
                    continue
                e = e.replace(params=self._constraint(e.outvars[0].aval, spec).params)
            for v in read.inputs[i]:
                if (i, v) in inside:
                    if (place, v) not in once:
                        once[place, v] = constrain(v, inside[i, v], old)
                    inputs = [once[place, v] if u is v else new for u, new in zip(e.invars, inputs, strict=True)]
            is_same = all(map(operator.is_, inputs, e.invars))
            eqns.append(e if is_same else e.replace(invars=inputs))
            for v in e.outvars:
                if v in everywhere:
                    instead[v] = constrain(v, everywhere[v], old)
        if len(eqns) == len(body.eqns) and all(map(operator.is_, eqns, body.eqns)):
            return body
        return body.replace(eqns=eqns, outvars=list(map(now, body.outvars)))

    def _wanted(self, read: _Body) -> tuple[dict[Any, PartitionSpec], dict[tuple[int, Any], PartitionSpec]]:
        """The variables to constrain: for all that read them, and for one equation."""
        everywhere: dict[Any, PartitionSpec] = {}
        inside: dict[tuple[int, Any], PartitionSpec] = {}
        for c in self._added:
            assert c.expression.shape is not None, "it is in no jax.vmap"
            assert c.spec is not None, "only constraints are removed"
            everywhere |= dict.fromkeys(read.values(c.expression.place), c.spec)
            for place in self._cotangents[c]:
                found = read.entering(place, (c.expression.shape, c.expression.dtype))
                if place == c.expression.place:
                    inside |= dict.fromkeys(found, c.spec)
                else:
                    everywhere |= dict.fromkeys((v for _, v in found), c.spec)
        return everywhere, inside

    def _constraint(self, aval: Any, spec: PartitionSpec) -> Any:
        """The equation of a constraint."""
        sharding = NamedSharding(self._mesh, spec)
        made = jax.make_jaxpr(lambda x: jax.lax.with_sharding_constraint(x, sharding))(
            jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
        )
        return closed(made)[0].eqns[0]


def _type_of(v: Any) -> Type | None:
    """Shape and dtype of an array; None for scalars, keys and what is no array."""
    shape, dtype = getattr(v.aval, "shape", ()), getattr(v.aval, "dtype", None)
    if not shape or dtype is None or jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return None
    return tuple(shape), str(dtype)


def _source_of(place: Expression) -> tuple[str, str]:
    """The variable that an expression is assigned to, or else empty; and its text, if that is short."""
    lines = [line.encode() for line in linecache.getlines(place.file)[place.line - 1 : place.end_line]]
    if not lines:
        return "", ""
    before, after = lines[0][: place.column].decode(), lines[-1][place.end_column :].decode()
    text = lines[0][place.column : place.end_column].decode() if len(lines) == 1 else ""
    whole = before + lines[0][place.column :].decode()
    is_whole = not after.strip() or after.lstrip().startswith("#")
    if is_whole and (name := _ASSIGNED.fullmatch(before) or (before.strip() == "" and _AUGMENTED.match(whole))):
        return name[1], ""
    return "", text if len(text) <= 60 else ""
