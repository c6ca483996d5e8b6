"""Traced expressions: the user's expressions in a traced program, and sharding constraints on their values.

A constraint that you write also holds for the cotangent of the value. The traced program contains the derivative, so
``with_constraints`` also constrains the cotangent that enters the transposed equations of the same expression.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
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
    user_expressions,
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
    values: frozenset[Any]  # the variables

    @property
    def type(self) -> str:
        """The type of its value: ``float32[32,128]``."""
        return f"{self.dtype} arrays" if self.shape is None else f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True, slots=True)
class Constraint:
    """A sharding constraint on the value of an expression."""

    expression: TracedExpression
    spec: PartitionSpec | None  # None removes the constraint that the expression is

    @property
    def text(self) -> str:
        """What to write, and where: ``after train.py:9: x = jax.lax.with_sharding_constraint(x, P("data"))``."""
        place, file = self.expression.place, self.expression.place.file.rpartition("/")[2]
        if self.spec is None:
            return f"{file}:{place.line}: remove the constraint {text_of_spec(self.expression.spec or ())}"
        new, written = text_of_spec(self.spec), "jax.lax.with_sharding_constraint"
        name, text = _source_of(place)
        if name:
            return f"after {file}:{max(place.line, place.end_line)}: {name} = {written}({name}, {new})"
        if text:
            return f"{file}:{place.line}: {written}({text}, {new}) instead of {text}"
        return f"{file}:{place.line}: {written}(..., {new}) around what makes this value"


class TracedProgram:
    """A traced program, and its expressions whose values can be constrained.

    One line of a helper, such as ``return x @ w``, may make several values. Then the calls of the helper are the
    expressions, or the calls around these. Of expressions with the same values the innermost one counts.
    """

    def __init__(self, jaxpr: Any):
        self.jaxpr = jaxpr
        self.bodies = {id(b.body): b for b in _bodies(jaxpr, False, False, frozenset(), _common(jaxpr))}
        counts = collections.Counter[Expression]()  # of equations, as few as possible for the same values
        for body in self.bodies.values():
            counts.update({place: sum(map(len, runs)) for (place, is_back), runs in body.runs.items() if not is_back})
        every = [e for place in counts if (e := self._expression(place)) is not None]
        inner = {e.values: e for e in sorted(reversed(every), key=lambda e: -counts[e.place])}
        self.expressions = tuple(e for e in every if inner[e.values] is e)

    def _expression(self, place: Expression) -> TracedExpression | None:
        bodies = [body for body in self.bodies.values() if (place, False) in body.runs]
        own = [(body, i) for body in bodies for run in body.runs[place, False] for i in run]
        specs = {constraint_of(body.body.eqns[i]) for body, i in own}
        spec = specs.pop() if len(specs) == 1 else None
        if spec is not None:
            values = [v for body, i in own for v in body.body.eqns[i].outvars]
        else:
            if None in [body.evaluations[place] for body in bodies]:
                return None
            values = [v for body in bodies for v in body.values(place)]
        makers = {v: body.is_mapped[body.maker[v]] for body in bodies for v in values if v in body.maker}
        types, is_mapped = {_type_of(v) for v in values}, any(makers.values())
        type_of = next(iter(types), None)
        if type_of is None or None in types or (spec is None and (len(types) > 1 or is_mapped)):
            return None
        shape = None if len(types) > 1 or is_mapped else type_of[0]
        return TracedExpression(place, shape, type_of[1], spec, frozenset(values))

    def values_at(self, file: str, line: int) -> set[Any]:
        """The variables that the equations of a line make or read, and those that a call around these reads."""
        found = set[Any]()
        for body in self.bodies.values():
            for i in body.at_line.get((file, line), ()):
                found.update(body.body.eqns[i].outvars, body.inputs[i], body.outer)
        return found

    def with_constraints(self, constraints: Sequence[Constraint], mesh: Mesh) -> Any:
        """The jaxpr as if the user had written constraints."""
        return _Constraining(self, constraints, mesh).jaxpr(self.jaxpr)

    def cotangents(self, expression: TracedExpression) -> tuple[Expression, ...]:
        """The expressions whose transposed equations read the cotangent of the value of an expression.

        An addition has no transposed equations: its cotangent is that of a value which it alone reads.
        """
        place, bodies = expression.place, self.bodies.values()
        if any((place, True) in body.runs for body in bodies):
            return (place,)
        added = frozenset[Expression]().union(*(body.added(place) for body in bodies if (place, False) in body.runs))
        return tuple(
            q for q in added if all(body.readers_of(q) <= {place, q} for body in bodies if (q, False) in body.runs)
        )


def runs_of(chains: Sequence[tuple[Expression, ...]]) -> dict[Expression, list[list[int]]]:
    """The equations of each expression, of the calls around it too: those of one evaluation follow each other."""
    found: dict[Expression, list[list[int]]] = {}
    before: tuple[Expression, ...] = ()
    for i, chain in enumerate(chains):
        for place in dict.fromkeys(chain):
            runs = found.setdefault(place, [])
            runs[-1].append(i) if place in before else runs.append([i])
        before = chain or before
    return found


class _Body:
    """One body of the program: its equations by expression, those of the backward half of a gradient apart."""

    def __init__(self, body: Any, is_back: bool, is_mapped: bool, outer: frozenset[Any], common: int):
        self.body, self.is_inside_back, self.outer = body, is_back, outer
        self.is_back = [is_backward(e.source_info, is_back) for e in body.eqns]
        self.is_mapped = [is_mapped or is_of_vmap(e.source_info) for e in body.eqns]
        self.chains = [_chain(e, common) for e in body.eqns]
        self.places = [next(iter(chain), None) for chain in self.chains]
        self.runs: dict[tuple[Expression, bool], list[list[int]]] = {}  # of an expression, forward and backward
        for side in (False, True):
            halves = ((c if back == side else ()) for c, back in zip(self.chains, self.is_back, strict=True))
            self.runs |= {(place, side): runs for place, runs in runs_of(list(halves)).items()}
        self.maker = {v: i for i, e in enumerate(body.eqns) for v in e.outvars}
        self.inputs = [[v for v in e.invars if isinstance(v, Var)] for e in body.eqns]
        self.readers: dict[Any, list[int]] = collections.defaultdict(list)
        self.at_line: dict[tuple[str, int], set[int]] = collections.defaultdict(set)
        for i, chain in enumerate(self.chains):
            for place in chain:
                for line in range(place.line, max(place.line, place.end_line) + 1):
                    self.at_line[place.file, line].add(i)
            for v in self.inputs[i]:
                self.readers[v].append(i)
        forward = {place: runs for (place, is_back), runs in self.runs.items() if not is_back}
        # The values of an expression, each with the equations that make it; None if they are not known.
        self.evaluations = {place: self._evaluations(place, runs) for place, runs in forward.items()}

    def _evaluations(self, place: Expression, runs: Sequence[Sequence[int]]) -> list[tuple[Any, frozenset[int]]] | None:
        """They are known if the equations of each evaluation have one variable that others read."""
        found = []
        for run in runs:
            parts, is_inner = self._repeated(run), all(self.places[i] == place for i in run)
            # Who reads it besides: not these equations and their derivative.
            own = {*run, *(i for again in self.runs.get((place, True), ()) for i in again)}
            for part in parts:
                made = dict.fromkeys(v for i in part for v in self.body.eqns[i].outvars)
                read = [v for v in made if not own.issuperset(self.readers[v])]
                results = [v for v in self.body.outvars if isinstance(v, Var) and v in made]
                left = read or (results[:1] if is_inner else results)  # what a derivative reads is behind the results
                if is_inner and len(parts) > 1 == len(made):  # x = x @ w in a Python loop
                    left = list(made)
                if len(left) > 1 or (len(parts) > 1 and not left):
                    return None
                found += [(v, frozenset(part)) for v in left]
        return found

    def _repeated(self, run: Sequence[int]) -> list[Sequence[int]]:
        """Splits equations into evaluations, if the same equations follow each other several times."""
        eqns = [(self.body.eqns[i], self.chains[i]) for i in run]
        alike = [(e.primitive, *map(_type_of, e.outvars), chain) for e, chain in eqns]
        sizes = (n for n in range(1, len(run) // 2 + 1) if len(run) % n == 0 and alike[:n] == alike[n : 2 * n])
        size = next((n for n in sizes if alike == alike[:n] * (len(run) // n)), len(run))
        return [run[at : at + size] for at in range(0, len(run), size)]

    def values(self, place: Expression) -> list[Any]:
        """The variables that are the values of an expression."""
        return [v for v, _ in self.evaluations.get(place) or ()]

    def is_chain(self, place: Expression) -> bool:
        """Whether an evaluation of an expression reads the value of another one."""
        return any(
            i not in part and not self.is_back[i] and place in self.chains[i]
            for v, part in self.evaluations.get(place) or ()
            for i in self.readers[v]
        )

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
        for run in self.runs.get((place, True), ()):
            found, inner = dict[Any, None](), {*run}
            for i in run:
                for v in () if is_accumulation(self.body.eqns[i]) else self.inputs[i]:
                    maker = self.maker.get(v)
                    is_back = self.is_inside_back if maker is None else self.is_back[maker]
                    if is_back and (maker not in inner or is_chain) and _type_of(v) == type_of:
                        found[v] = None
                        break
            # The derivative of x + f(x) also adds it to another cotangent.
            yield from ((i, v) for i in run for v in dict.fromkeys(self.inputs[i]) if v in found)


def _chain(e: Any, common: int) -> tuple[Expression, ...]:
    """The expressions of an equation, the innermost first, without those that all equations have."""
    chain = user_expressions(e.source_info)
    return chain[: max(1, len(chain) - common)]


def _common(jaxpr: Any) -> int:
    """How many calls all equations of a program have around them."""
    chains = [chain[:0:-1] for e in closed(jaxpr)[0].eqns if (chain := user_expressions(e.source_info))]
    return sum(1 for _ in itertools.takewhile(lambda calls: len({*calls}) == 1, zip(*chains, strict=False)))


def _bodies(jaxpr: Any, is_back: bool, is_mapped: bool, outer: frozenset[Any], common: int) -> Iterator[_Body]:
    """The bodies in which constraints can be written, from outside to inside."""
    body, _ = closed(jaxpr)
    yield (found := _Body(body, is_back, is_mapped, outer, common))
    for i, e in enumerate(body.eqns):
        for inner in bodies_as_written(e):
            yield from _bodies(inner, found.is_back[i], found.is_mapped[i], outer.union(found.inputs[i]), common)


class _Constraining(EachJaxpr):
    def __init__(self, program: TracedProgram, constraints: Sequence[Constraint], mesh: Mesh):
        super().__init__()
        self._program, self._mesh = program, mesh
        self._removed = {c.expression.place for c in constraints if c.spec is None}
        self._added = [c for c in constraints if c.spec is not None]
        self._cotangents = {c: program.cotangents(c.expression) for c in self._added}

    def body(self, body: Any) -> Any:
        """The body with constraints."""
        if (read := self._program.bodies.get(id(body))) is None:
            return body
        everywhere, inside = self._wanted(read)
        # What the derivative of an expression reads is its value without the constraint.
        places = [c.expression.place for c in self._added]
        own = {v: place for place in places if not read.is_chain(place) for v in read.values(place)}
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
            e = self.equation(old)
            inputs = [v if isinstance(v, Var) and own.get(v) in read.chains[i] else now(v) for v in e.invars]
            if constraint_of(e) is not None and not self._removed.isdisjoint(read.chains[i]):
                instead[e.outvars[0]] = inputs[0]
                continue
            for v in read.inputs[i]:
                if (i, v) in inside:
                    if (key := (v, inside[i, v][0])) not in once:
                        once[key] = constrain(v, inside[i, v][1], old)
                    inputs = [once[key] if u is v else new for u, new in zip(e.invars, inputs, strict=True)]
            is_same = all(map(operator.is_, inputs, e.invars))
            eqns.append(e if is_same else e.replace(invars=inputs))
            for v in e.outvars:
                if v in everywhere:
                    instead[v] = constrain(v, everywhere[v], old)
        if len(eqns) == len(body.eqns) and all(map(operator.is_, eqns, body.eqns)):
            return body
        return body.replace(eqns=eqns, outvars=list(map(now, body.outvars)))

    def _wanted(
        self, read: _Body
    ) -> tuple[dict[Any, PartitionSpec], dict[tuple[int, Any], tuple[Expression, PartitionSpec]]]:
        """The variables to constrain: for all that read them, and for one equation, with the expression."""
        everywhere: dict[Any, PartitionSpec] = {}
        inside: dict[tuple[int, Any], tuple[Expression, PartitionSpec]] = {}
        for c in self._added:
            assert c.expression.shape is not None, "it is in no jax.vmap"
            assert c.spec is not None, "it is added"
            everywhere |= dict.fromkeys(read.values(c.expression.place), c.spec)
            for place in self._cotangents[c]:
                found = read.entering(place, (c.expression.shape, c.expression.dtype))
                if place == c.expression.place:
                    inside |= dict.fromkeys(found, (place, c.spec))
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
