"""The change of one place in a wrong program after which it is right: a parameter, an operator, a number, a value.

The program runs again with each change, exactly, until its results are those of the plain program. The line of this
change is the line of the fault, and the change is the cause. What people often get wrong is tried first. Equations
whose operands are as before do not run again.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal, Var

from gshard.core import jax_adapter
from gshard.exact.interpreter import Axes, Interpreter
from gshard.exact.numbers import Value
from gshard.exact.operations import OPERATORS, Operation, Undecided, is_float, moved

_MOST_EQUATIONS = 20_000  # that run in search of a repair; one of many elements counts as several
_ELEMENTS = 10_000  # of an equation that counts as one

_PARAMETER, _NUMBER, _PLACE, _MISSING, _UNUSED, _SCALE, _VALUE = range(7)  # what is changed, in this order
_WORDS = {"psum": "sum", "pmean": "mean", "pmax": "maximum", "pmin": "minimum"}
_FAMILIES = [x.split() for x in ("lt le", "gt ge", "argmax argmin", "reduce_max reduce_min", "max min", "add sub")]
_OF_INTEGERS = "add sub mul div rem".split()  # instead of whatever computes an integer of two
_FUNCTIONS = frozenset("sqrt rsqrt exp log tanh logistic square sin cos erf".split())
_ADDS = frozenset("dot_general reduce_sum conv_general_dilated cumsum scatter-add reduce_max".split())
_BEGIN, _END = "begin", "end"  # the equations of what a body is given, and of what it returns


@dataclasses.dataclass(frozen=True)
class _Change:
    """Other parameters of an equation, another primitive, or a function of one of its operands or results."""

    cause: str
    rank: tuple[float, ...] = dataclasses.field(repr=False)  # lower ones are tried first
    how: Callable[..., Value] | None = None  # of a run, the value, its equation, and what is given
    given: tuple[Any, ...] = ()
    at: int | None = None  # of the operand or result; None for all of them
    where: str = "result"  # or "operand"; "instead": an operand is the result
    name: str = ""
    params: tuple[tuple[str, Any], ...] = ()

    def applied(self, run: Changed, eqn: Any, operands: Sequence[Value]) -> Sequence[Value]:
        """The results of the changed equation."""

        def mapped(xs: Sequence[Value]) -> list[Value]:
            f = self.how or (lambda run, x, eqn: x)
            return [f(run, x, eqn, *self.given) if self.at in (None, i) else x for i, x in enumerate(xs)]

        if self.where != "result":
            operands = mapped(operands)
        if self.where == "instead":
            return operands if self.at is None else [operands[self.at]]
        other = _equation(self.name or eqn.primitive.name, {**eqn.params, **dict(self.params)}, eqn.invars, eqn.outvars)
        results = run._results(other if self.name or self.params else eqn, operands)
        return mapped(results) if self.where == "result" else results


def _equation(name: str, params: dict[str, Any], invars: Sequence[Any], outvars: Sequence[Any]) -> Any:
    return SimpleNamespace(
        primitive=SimpleNamespace(name=name), params=params, invars=invars, outvars=outvars, source_info=None
    )


@dataclasses.dataclass
class Changed(Interpreter):
    """Runs a program in which some equations are changed."""

    program: Any = None  # a ``_Program``
    change: _Change | None = None  # None: the first run, whose results are kept
    targets: frozenset[int] = frozenset()  # the equations that are changed
    values: dict[Any, Value] = dataclasses.field(default_factory=dict)  # of variables
    cost: float = 0

    def __post_init__(self) -> None:
        numbers = self.program.numbers
        self._numbers = numbers if self.change is None else collections.ChainMap({}, numbers)
        self._again = set().union(*(self.program.around[t] for t in self.targets))

    def run(self, jaxpr: Any, operands: Sequence[Value]) -> list[Value]:
        """The results of a jaxpr."""
        ends = self.program.ends.get(id(jax_adapter.closed(jaxpr)[0]))
        if ends is None:  # it is made while the program runs
            return super().run(jaxpr, operands)
        return list(self._equation(ends[1], super().run(jaxpr, self._equation(ends[0], operands))))

    def _equation(self, eqn: Any, operands: Sequence[Value]) -> Sequence[Value]:
        for x in operands:
            if id(x) not in self._numbers:
                self._numbers[id(x)] = x, _hash(x)
        key = (id(eqn), *(self._numbers[id(x)][1] for x in operands))
        results = None if id(eqn) in self._again else self.program.kept.get(key, (None, None))[1]
        if self.change is not None and id(eqn) in self.targets:
            results = self.change.applied(self, eqn, operands)
        elif results is None:
            results = super()._equation(eqn, operands)
            self.cost += 1 + sum(math.prod(x.shape) for x in results) / _ELEMENTS
            if self.change is None and id(eqn) in self.program.home:
                self.program.kept[key] = eqn, results
                place = _Place(self.program, eqn, self.axes, operands, results)
                self.program.places.setdefault(id(eqn), place)
        if eqn.primitive.name != _END:
            self.values.update(zip(eqn.outvars, results, strict=True))
        return results

    def _results(self, eqn: Any, operands: Sequence[Value]) -> Sequence[Value]:
        return operands if eqn.primitive.name in (_BEGIN, _END) else super()._results(eqn, operands)

    def _literal(self, v: Any) -> Value:
        key = id(v), self.lanes
        if key not in self.program.literals:
            self.program.literals[key] = v, super()._literal(v)
        return self.program.literals[key][1]


# --- what a value becomes: functions of a run, the value, and the equation that has it


def _other(run: Changed, x: Value, eqn: Any, new: Any) -> Value:
    """The value of a variable, or a number."""
    return run.values[new] if isinstance(new, Var) else run.constant(np.asarray(new))


def _elementwise(run: Changed, x: Value, eqn: Any, name: str, other: Any = None, at: int = 0) -> Value:
    """The result of an operator, with a number or with a variable, whose dimensions begin at ``at``."""
    shape = lambda v: (len(v), *(1,) * at, *v.shape[1:], *(1,) * (x.ndim - at - v.ndim))  # noqa: E731
    others = [] if other is None else [moved(lambda v: v.reshape(shape(v)), _other(run, x, eqn, other))]
    return OPERATORS[name](Operation(name, {}, (), (), (), (), run.domain, run.lanes), x, *others)


def _collective(run: Changed, x: Value, eqn: Any, name: str, params: dict[str, Any]) -> Value:
    result = SimpleNamespace(aval=SimpleNamespace(dtype=getattr(x, "dtype", np.float32)))
    return run._results(_equation(name, params, eqn.invars, [result]), [x])[0]


def _over(run: Changed, x: Value, eqn: Any, how: str, axes: tuple[str, ...]) -> Value:
    params = {"axes": axes, "axis_index_groups": None}
    found = _collective(run, x, eqn, "psum" if how == "pmean" else how, params)
    return _elementwise(run, found, eqn, "mul", 1 / _size(run.axes, axes)) if how == "pmean" else found


def _position(run: Changed, x: Value, eqn: Any, axis: str, factor: int = 1) -> Value:
    index = _collective(run, x, eqn, "axis_index", {"axis_name": axis, "axis_index_groups": None})
    return np.asarray(factor * index, x.dtype)


def _is_at(run: Changed, x: Value, eqn: Any, axis: str, k: int) -> Value:
    return np.asarray(_position(run, x.astype(np.int32), eqn, axis) == k)


def _folded(run: Changed, x: Value, eqn: Any, fold: Any, axis: str | None) -> Value:
    one = np.ones(run.lanes, np.uint32)
    return run._results(fold, [x, one if axis is None else _position(run, one, eqn, axis)])[0]


def _reordered(run: Changed, x: Value, eqn: Any, order: tuple[int, ...]) -> Value:
    """x reshaped, but with the longer of both shapes in another order."""
    shape = run._results(eqn, [x])[0].shape

    def move(v: np.ndarray) -> np.ndarray:
        if len(shape) < v.ndim:
            return v.transpose(0, *(1 + d for d in order)).reshape(len(v), *shape[1:])
        return v.reshape(len(v), *(shape[1 + d] for d in order)).transpose(0, *(1 + np.argsort(order)))

    return moved(move, x)


# --- what is tried


class _Place:
    """An equation, and how it can be changed."""

    def __init__(self, program: _Program, eqn: Any, axes: Axes, operands: Any, results: Any) -> None:
        self.program, self.eqn, self.axes, self.operands, self.results = program, eqn, axes, operands, results
        self.number = len(program.places)
        self.name, self.params = eqn.primitive.name, eqn.params
        self.result = results[0] if len(results) == 1 else None
        self.subsets = [c for k in range(1, len(axes) + 1) for c in itertools.combinations([a for a, _ in axes], k)]

    def changes(self) -> Iterator[_Change]:
        """The changes of this equation alone."""
        yield from self._keys()
        holder = self.program.home[id(self.eqn)][1]
        is_of_call = holder is not None and jax_adapter.called_jaxpr(holder) is not None
        if self.name == _BEGIN or (self.name == _END and is_of_call):
            return
        for found in (self._collectives(), self._numbers(), self._missing(), self._variables()):
            yield from found
        if self.result is not None and self.name != _END:
            for found in (self._operators(), self._places(), self._scales()):
                yield from found

    def _collectives(self) -> Iterator[_Change]:
        named = self.params.get("axes", self.params.get("axis_name", ()))
        named = tuple(named) if isinstance(named, (tuple, list)) else (named,)
        n, there, rank = _size(self.axes, named), _and(named), (_PARAMETER, 0, -self.number)
        now = "psum" if self.name in ("psum2", "psum_invariant") else self.name
        if now in ("psum", "reduce_scatter") and is_float(self.results[0]):
            yield _Change(
                f"{n} times too large: a sum instead of a mean over {there}", rank, _elementwise, ("mul", 1 / n)
            )
            yield _Change(f"{n} times too small: a mean instead of a sum over {there}", rank, _elementwise, ("mul", n))
        if now in _WORDS:
            cause = f"summed twice over {there}" if now == "psum" else f"'{now}' is not needed"
            yield _Change(cause, rank, where="instead")
            for how, over in itertools.product(_WORDS, self.subsets):
                if (how, set(over)) != (now, set(named)):
                    cause = f"a {_WORDS[now]} over {there} instead of a {_WORDS[how]} over {_and(over)}"
                    yield _Change(cause, rank, _over, (how, over), where="instead")
        elif "axis_name" in self.params:
            for text, perm in _permutations(n, self.params["perm"]).items() if self.name == "ppermute" else ():
                yield _Change(f"'ppermute' over {there} should be {text}", rank, params=(("perm", perm),))
            for a in (a for a, m in self.axes if a not in named and m == n):
                other = a if isinstance(self.params["axis_name"], str) else (a,)
                yield _Change(f"'{now}' over {there} instead of {a}", rank, params=(("axis_name", other),))

    def _numbers(self) -> Iterator[_Change]:
        floats, factors = self.program.floats, [k for _, n in self.axes for k in (n, 1 / n)]
        for i, v in enumerate(self.eqn.invars):
            array = np.asarray(v.val if isinstance(v, Literal) else False)
            if array.ndim or array.dtype.kind in "bc":
                continue
            old = array.item()
            others = [old // 2, 0] if array.dtype.kind in "iu" else [old / 2, *(old * k for k in factors), *floats]
            for new in dict.fromkeys([old + 1, old - 1, old * 2, *others]):
                if new != old and math.isfinite(new):
                    cause = f"{old:g} in '{self.name}' should be {new:g}"
                    number = np.asarray(new).astype(array.dtype)
                    yield _Change(cause, (_NUMBER, new not in floats, self.number), _other, (number,), i, "operand")

    def _operators(self) -> Iterator[_Change]:
        twins = [n for family in _FAMILIES if self.name in family for n in family if n != self.name]
        if _is_int(self.result) and len(self.operands) == 2:
            twins += [n for n in _OF_INTEGERS if n not in (self.name, *twins)]
        for k, twin in enumerate(twins):
            cause = f"'{self.params.get('name', self.name)}' should be '{twin}'"
            yield _Change(cause, (_NUMBER, 1 + k, self.number), name=twin)
        for a, n in self.axes:
            is_condition = isinstance(self.result, np.ndarray) and self.result.ndim == 1 and self.result.dtype == bool
            for k in range(n if is_condition else 0):
                cause = f"the condition should hold at position {k} of {a} only"
                yield _Change(cause, (_NUMBER, 0, self.number), _is_at, (a, k))

    def _places(self) -> Iterator[_Change]:
        rank, r = (_PLACE, 0, self.number), self.result
        assert r is not None
        for i, x in enumerate(self.operands):
            if _fits(x, r):
                yield _Change(f"'{self.name}' is not needed", (_VALUE, -1, self.number), at=i, where="instead")
        shape = self.operands[0].shape[1:] if self.operands else ()
        if self.name == "reshape":
            for order in _orders(max(shape, r.shape[1:], key=len)):
                yield _Change("'reshape' has dimensions in another order", rank, _reordered, (order,), 0, "instead")
        for d, (n, m) in enumerate(zip(shape, r.shape[1:])) if self.name in ("slice", "dynamic_slice") else ():
            for over in self.subsets:
                if n == m * _size(self.axes, over) and is_float(r):
                    params = {"axis_name": over, "scatter_dimension": d, "tiled": True, "axis_index_groups": None}
                    cause = f"a part is taken that is not summed over {_and(over)}"
                    yield _Change(cause, rank, _collective, ("reduce_scatter", params), 0, "instead")
            for a, _ in self.axes if self.name == "dynamic_slice" else ():
                cause = f"not the part of this device along {a}"
                yield _Change(cause, (_PLACE, 1, self.number), _position, (a, m), 1 + d, "operand")
            if self.name == "slice" and not self.params.get("strides"):
                params = self.program.sizes.params(self.eqn)
                starts = params["start_indices"]
                for at in sorted(set(range(n - m + 1)) - {starts[d]}, key=lambda at: abs(at - starts[d])):
                    new = (*starts[:d], at, *starts[d + 1 :])
                    limits = tuple(a + b for a, b in zip(new, r.shape[1:], strict=True))
                    yield _Change(f"the slice should begin at {at} instead of {starts[d]}", rank,
                        params=(("start_indices", new), ("limit_indices", limits)))  # fmt: skip

    def _missing(self) -> Iterator[_Change]:
        for i, x in enumerate(self.results):
            if is_float(x) or _is_int(x):
                rank = (_MISSING, self.name not in _ADDS, self.number)
                kinds = ["pmax"] if "max" in self.name else ["psum", "pmean" if is_float(x) else "pmax"]
                for how, over in itertools.product(kinds, self.subsets):
                    cause = f"not summed over {_and(over)}" if how == "psum" else f"no {_WORDS[how]} over {_and(over)}"
                    yield _Change(cause, rank, _over, (how, over), i)
                for name, params in self.program.exchanges if self.axes else ():
                    yield _Change(f"'{name}' is missing", rank, _collective, (name, params), i)
                for f in self.program.functions if is_float(x) else ():
                    yield _Change(f"'{f}' is missing", (_VALUE, -1, self.number), _elementwise, (f,), i)
        for i in (i for i, x in enumerate(self.operands) if self.name == "scan" and is_float(x)):
            cause = "the loop does not begin with zeros"
            yield _Change(cause, (_MISSING, 2, self.number), _elementwise, ("mul", 0.0), i, "operand")

    def _keys(self) -> Iterator[_Change]:
        keys = [i for i, v in enumerate(self.eqn.invars) if jax.dtypes.issubdtype(v.aval.dtype, jax.dtypes.prng_key)]
        for i, axis, fold in itertools.product(keys, (*(a for a, _ in self.axes), None), self.program.folds[:1]):
            cause = f"{'1' if axis is None else f'the position along {axis}'} is not folded into the key"
            yield _Change(cause, (_MISSING, 0, self.number), _folded, (fold, axis), i, "operand")

    def _scales(self) -> Iterator[_Change]:
        for over in self.subsets if is_float(self.result) else ():
            n = _size(self.axes, over)
            for k, word in ((1 / n, "large: summed twice"), (n, "small: divided twice")):
                cause = f"{n} times too {word} over {_and(over)}"
                for i, x in enumerate(self.operands) if self.name in ("add", "sub") else ():
                    if is_float(x):
                        yield _Change(cause, (_SCALE, 0, -self.number), _elementwise, ("mul", k), i, "operand")
                yield _Change(cause, (_SCALE, 1, -self.number), _elementwise, ("mul", k))

    def _variables(self) -> Iterator[_Change]:
        """Other variables instead of operands; variables that nothing reads; factors of what a loop carries."""
        body, is_end = self.program.home[id(self.eqn)][0], self.name == _END
        for (i, x), v in itertools.product(enumerate(self.operands), self.program.scope(self.eqn)):
            old, y, is_unused = self.eqn.invars[i], self.program.values[v], v not in self.program.read
            unused = (_UNUSED, is_end, self.number)
            if v is not old and _fits(x, y):
                cause = "another value should be returned" if is_end else f"'{self.name}' reads another value"
                rank = unused if is_unused else (_VALUE, is_end, self.number)
                yield _Change(cause, rank, _other, (v,), i, "operand")
            is_carry = old in body.invars if self.name in ("add", "sub") else is_end
            is_like = is_float(x) or type(x) is type(y)
            for at in range(x.ndim - y.ndim + 1) if is_like and (is_unused or is_carry) else ():
                if y.shape[1:] == x.shape[1 + at :][: y.ndim - 1] and (y.ndim > 1 or at == 0):
                    rank = unused if is_unused else (_PLACE, 2, -self.number)
                    yield _Change("a factor is missing", rank, _elementwise, ("mul", v, at), i, "operand")
                    if is_unused and type(x) is type(y):
                        yield _Change("a term is missing", rank, _elementwise, ("add", v, at), i, "operand")


def _size(axes: Axes, names: Sequence[str]) -> int:
    return math.prod(n for a, n in axes if a in names)


def _is_int(x: Value) -> bool:
    return isinstance(x, np.ndarray) and x.dtype.kind in "iu"


def _fits(x: Value, y: Value) -> bool:
    return type(x) is type(y) and x.shape[1:] == y.shape[1:] and (not isinstance(x, np.ndarray) or x.dtype == y.dtype)


def _and(names: Sequence[Any]) -> str:
    return " and ".join(map(str, names))


def _orders(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The orders of dimensions, but of those of size 1."""
    if len(shape) > 4:
        return []
    all_of_them = itertools.permutations(range(len(shape)))
    return list({tuple(d for d in o if shape[d] > 1): o for o in all_of_them}.values())[1:]


def _permutations(n: int, perm: Any) -> dict[str, list[tuple[int, int]]]:
    now = sorted((int(a), int(b)) for a, b in perm)
    found = {"the inverse": sorted((b, a) for a, b in now)}
    found |= {f"a ring by {k}": [(i, (i + k) % n) for i in range(n)] for k in range(n)}
    found |= {f"a shift by {k} without a ring": [(i, i + k) for i in range(n) if 0 <= i + k < n] for k in (1, -1)}
    return {text: p for text, p in found.items() if p != now}


class _Program:
    """The wrong program, as a whole, and what its first run computed."""

    def __init__(self, jaxpr: Any, plain: Any, sizes: Any) -> None:
        self.sizes = sizes
        self.ends: dict[int, tuple[Any, Any]] = {}  # of a body
        self.home: dict[int, tuple[Any, Any]] = {}  # of an equation: the body, and the equation that has it
        self.around: dict[int, set[int]] = {}  # of an equation: those in whose bodies it is
        self.places: dict[int, _Place] = {}
        self.values: dict[Any, Value] = {}
        self.kept: dict[Any, Any] = {}  # of an equation and the numbers of its operands: its results
        self.literals: dict[Any, Any] = {}  # by number of lanes
        self.numbers: dict[int, tuple[Value, int]] = {}  # of values
        for outer, body, given in _bodies(jaxpr):
            ends = _equation(_BEGIN, {}, given, given), _equation(_END, {}, body.outvars, body.outvars)
            first, last = self.ends.setdefault(id(body), ends)
            for e in (first, *body.eqns, last):
                self.home.setdefault(id(e), (body, outer[-1] if outer else None))
                self.around.setdefault(id(e), set()).update(map(id, outer))
        live, in_plain = (list(_bodies(j)) for j in (jax_adapter.jaxpr_without_dead_code(jaxpr), plain))
        self.read = {v for _, body, _ in live for v in _read_in(body) if not isinstance(v, Literal)}
        eqns = [e for _, body, _ in (*live, *in_plain) for e in body.eqns]
        self.folds = [e for e in eqns if e.primitive.name == "random_fold_in"]
        self.exchanges = [(e.primitive.name, e.params) for e in eqns if e.primitive.name in ("ppermute", "all_to_all")]
        self.functions = sorted({e.primitive.name for _, body, _ in in_plain for e in body.eqns} & _FUNCTIONS)
        literals = [np.asarray(v.val) for _, body, _ in in_plain for v in _read_in(body) if isinstance(v, Literal)]
        self.floats = list(dict.fromkeys(float(x) for x in literals if x.dtype.kind == "f" and not x.ndim))

    def line(self, eqn: Any, at: int | None) -> str:
        """The user's line of an equation (of what reads operand ``at`` of a body), or of the call that it is in."""
        body, holder = self.home[id(eqn)]
        if eqn.primitive.name == _BEGIN:
            return next((self.line(e, None) for e in body.eqns if any(v is eqn.outvars[at] for v in e.invars)), "")
        own = "" if eqn.source_info is None else jax_adapter.user_line(eqn.source_info)
        return own or ("" if holder is None else self.line(holder, None))

    def scope(self, eqn: Any) -> list[Any]:
        """The variables that an equation could read, the last ones first."""
        body = self.home[id(eqn)][0]
        before = itertools.takewhile(lambda e: e is not eqn, body.eqns)
        return [v for v in [*body.invars, *(v for e in before for v in e.outvars)] if v in self.values][::-1]


def _bodies(jaxpr: Any, outer: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any, list[Any]]]:
    """The bodies of a program, each with the equations around it, outer ones first, and what it is given."""
    body, consts = jax_adapter.closed(jaxpr)
    yield outer, body, [*(() if consts else body.constvars), *body.invars]
    for e in body.eqns:
        for inner in jax_adapter.sub_jaxprs(e.params):
            yield from _bodies(inner, (*outer, e))


def _read_in(body: Any) -> list[Any]:
    return [*body.outvars, *(v for e in body.eqns for v in e.invars)]


def _hash(x: Any) -> int:
    if isinstance(x, np.ndarray):
        return hash((x.shape, x.dtype.str, x.tobytes()))
    if dataclasses.is_dataclass(x):
        return hash(tuple(_hash(getattr(x, field.name)) for field in dataclasses.fields(x)))
    return hash(tuple(map(_hash, x)) if isinstance(x, tuple) else x)


def repair(execute: Callable[[Any, Any], set[int]], jaxpr: Any, plain: Any, **fields: Any) -> tuple[str, str] | None:
    """The user's line and the cause of the first change after which a wrong result is right.

    Args:
        execute: runs a jaxpr in an interpreter, always with the same operands, and gives the wrong results, by number.
        jaxpr, plain: the wrong program, and the plain one.
        fields: those of the interpreter.
    """
    program = _Program(jaxpr, plain, fields["sizes"])
    first = Changed(**fields, program=program)
    wrong = execute(first, jaxpr)
    program.values = first.values
    groups: dict[tuple[str, str, str], list[tuple[_Change, Any]]] = {}
    for place in program.places.values():
        for change in place.changes():
            what = str(dataclasses.replace(change, rank=()))
            groups.setdefault((program.line(place.eqn, change.at), place.name, what), []).append((change, place.eqn))
    tries = list(groups.values())
    tries += [[m] for members in groups.values() if len(members) > 1 for m in members]
    best, rank, cost = None, 0.0, 0.0
    for members in sorted(tries, key=lambda m: m[0][0].rank):
        change, eqn = members[0]
        if best is not None and change.rank[0] > rank:
            break
        run = Changed(**fields, program=program, change=change, targets=frozenset(id(e) for _, e in members))
        try:
            with np.errstate(all="ignore"):
                still = execute(run, jaxpr)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, Undecided):  # it does not fit
            continue
        finally:
            cost += run.cost + 0.1
        if not still or (best is None and still < wrong and min(wrong) not in still):
            best, rank = (program.line(eqn, change.at), change.cause), change.rank[0]
        if not still or cost > _MOST_EQUATIONS:
            break
    return best


def line_of_result(jaxpr: Any, i: int) -> str:
    """The user's line of the equation that makes a result of a jaxpr."""
    body = jax_adapter.closed(jaxpr)[0]
    for eqn in body.eqns:
        for n, v in enumerate(eqn.outvars):
            if v is body.outvars[i]:
                inner = [b for b in jax_adapter.sub_jaxprs(eqn.params) if len(jax_adapter.closed(b)[0].outvars) > n]
                return (line_of_result(inner[-1], n) if inner else "") or jax_adapter.user_line(eqn.source_info)
    return ""
