"""The change of one place in a wrong program after which it is right: a collective, a number, an operator, an operand.

The program runs again with each change, exactly, until its results are those of the plain program. The line of this
change is the line of the fault, and the change is the cause. What people often get wrong is tried first. Equations
whose operands are as before do not run again.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from jax.extend import core

from gshard.core import jax_adapter
from gshard.exact.interpreter import Axes, Interpreter
from gshard.exact.numbers import Value
from gshard.exact.operations import OPERATORS, Operation, Undecided, is_float, moved

_MOST_EQUATIONS = 20_000  # that run in search of a repair; one of many elements counts as several
_ELEMENTS = 10_000  # of an equation that counts as one
_SUMS, _LARGEST = frozenset("psum psum2 psum_invariant".split()), frozenset("reduce_max argmax max".split())
_ADDS = frozenset("dot_general reduce_sum conv_general_dilated cumsum scatter-add reduce_max".split())
_FUNCTIONS = frozenset("sqrt rsqrt exp log tanh logistic square sin cos erf".split())
_LEAVE_OUT = frozenset("rev select_n scatter dynamic_update_slice cumsum random_fold_in all_to_all".split())
_TWINS = {**dict(p.split() for p in ("lt le", "gt ge", "argmax argmin", "reduce_max reduce_min", "max min", "add sub"))}
_TWINS |= {b: a for a, b in _TWINS.items()}
_OF_INTEGERS = {"+": np.add, "-": np.subtract, "*": np.multiply, "//": np.floor_divide, "%": np.remainder}
_WORDS = {"psum": "sum", "pmean": "mean", "pmax": "maximum", "pmin": "minimum"}

Apply = Any  # a function of a run, an equation and operands, which gives results; of a body and its results


@dataclasses.dataclass(frozen=True)
class Repair:
    """A change after which a wrong result is right."""

    line: str  # the user's line
    cause: str
    is_complete: bool  # whether all results are right then


@dataclasses.dataclass(frozen=True)
class _Change:
    rank: tuple[float, ...]  # lower ones are tried first
    key: str  # equal for the same change of other equations
    cause: str
    apply: Apply


@dataclasses.dataclass(frozen=True)
class _Run:
    """What a run of the wrong program computed."""

    results: dict[Any, Sequence[Value]]  # by equation and operands
    moves: dict[Any, tuple[Any, Value]]
    literals: dict[int, Value]
    inside: dict[int, set[int]]  # the equations whose bodies have an equation, or are a body


@dataclasses.dataclass
class Changed(Interpreter):
    """Runs a program in which some equations, or the results of a body, are changed."""

    before: _Run | None = None
    targets: frozenset[int] = frozenset()
    apply: Apply | None = None
    values: dict[Any, Value] = dataclasses.field(default_factory=dict)  # of variables
    cost: float = 0

    def __post_init__(self) -> None:
        before = self.before
        assert before is not None
        self._is_first = self.apply is None
        self._again = set().union(*(before.inside.get(t, set()) for t in self.targets))

    def _equation(self, eqn: Any, operands: Sequence[Value]) -> Sequence[Value]:
        assert self.before is not None
        key = (id(eqn), *map(id, operands))
        results = None if id(eqn) in self._again else self.before.results.get(key)
        if id(eqn) in self.targets and self.apply is not None:
            results = self.apply(self, eqn, operands)
        if results is None or id(eqn) in self.targets:
            results = super()._equation(eqn, operands) if results is None else results
            self.cost += 1 + sum(math.prod(x.shape) for x in results) / _ELEMENTS
            if self._is_first:
                self.before.results[key] = results
        self.values.update(zip(eqn.outvars, results, strict=True))
        return results

    def run(self, jaxpr: Any, operands: Sequence[Value]) -> list[Value]:
        """The results of a jaxpr."""
        body = jax_adapter.closed(jaxpr)[0]
        self.values.update(zip(reversed(body.invars), reversed(operands), strict=False))
        results = super().run(jaxpr, operands)
        is_target = id(body) in self.targets and self.apply is not None
        return list(self.apply(self, body, results)) if is_target and self.apply is not None else results

    def moved(self, f: Callable[..., Any], *arrays: Value) -> Value:
        """Moves elements between equations."""
        assert self.before is not None
        inner = getattr(f, "func", f)
        held = [*(inner.__defaults__ or ()), *(c.cell_contents for c in inner.__closure__ or ())]
        plain = [x if isinstance(x, int | str | tuple | list | None) else id(x) for x in held]
        key = (inner.__code__, str(getattr(f, "keywords", "")), str(plain), *map(id, arrays))
        known = self.before.moves.get(key)
        found = known[1] if known is not None else super().moved(f, *arrays)
        if self._is_first:
            self.before.moves[key] = (arrays, held), found
        return found

    def _literal(self, v: Any) -> Value:
        assert self.before is not None
        return self.before.literals.setdefault(id(v), super()._literal(v))

    def as_it_is(self, eqn: Any, operands: Sequence[Value]) -> Value:
        """The result of an equation that is not changed."""
        return self._results(eqn, operands)[0]

    def renamed(self, eqn: Any, name: str, operands: Sequence[Value]) -> list[Value]:
        """The results of another operator."""
        found = OPERATORS[name](dataclasses.replace(self._operation(eqn), name=name), *operands)
        return found if isinstance(found, list) else [found]

    def elementwise(self, name: str, *operands: Value) -> Value:
        """The result of an operator on arrays of equally many dimensions."""
        return OPERATORS[name](Operation(name, {}, (), (), (), (), self.domain, self.lanes), *operands)

    def times(self, x: Value, factor: float) -> Value:
        """A multiple of an array."""
        number = np.full((self.lanes, *(1,) * (x.ndim - 1)), factor)
        return self.elementwise("mul", x, self.domain.constant(number, np.float64))

    def collective(self, name: str, x: Value, like: Any, **params: Any) -> Value:
        """The result of a collective."""
        eqn = SimpleNamespace(primitive=SimpleNamespace(name=name), params=params, outvars=like.outvars)
        return self._results(eqn, [x])[0]

    def over(self, how: str, x: Value, axes: Sequence[str], like: Any) -> Value:
        """A sum, a mean, a maximum or a minimum over axes."""
        found = self.collective("psum" if how == "pmean" else how, x, like, axes=tuple(axes), axis_index_groups=None)
        return self.times(found, 1 / _size(self.axes, axes)) if how == "pmean" else found

    def index(self, axis: str) -> np.ndarray:
        """The position of each lane along an axis."""
        like = SimpleNamespace(outvars=())
        return np.asarray(self.collective("axis_index", None, like, axis_name=axis))


def _size(axes: Axes, names: Sequence[str]) -> int:
    return math.prod(n for a, n in axes if a in names)


def _is_int(x: Value) -> bool:
    return isinstance(x, np.ndarray) and x.dtype.kind in "iu"


def _fits(x: Value, y: Value) -> bool:
    return type(x) is type(y) and x.shape[1:] == y.shape[1:] and (not isinstance(x, np.ndarray) or x.dtype == y.dtype)


def _result(f: Apply, i: int = 0) -> Apply:
    """Changes a result of an equation."""
    return lambda run, e, xs: [f(run, e, x) if j == i else x for j, x in enumerate(run._results(e, xs))]


def _operand(i: int, f: Apply) -> Apply:
    """Changes an operand of an equation."""
    return lambda run, e, xs: run._results(e, [f(run, e, x) if j == i else x for j, x in enumerate(xs)])


class _Place:
    """An equation, and how it can be changed."""

    def __init__(self, number: int, eqn: Any, axes: Axes, operands: Sequence[Value], results: Sequence[Value]) -> None:
        self.number, self.eqn, self.axes, self.operands, self.results = number, eqn, axes, operands, results
        self.name, self.params = eqn.primitive.name, eqn.params
        self.result = results[0] if len(results) == 1 else None
        names = [a for a, n in axes if n > 1]
        self.subsets = [c for k in range(1, len(names) + 1) for c in itertools.combinations(names, k)]

    def changes(self, around: _Around) -> Iterator[_Change]:
        """The changes of this equation alone."""
        yield from self._collectives()
        yield from self._numbers(around)
        for i, x in enumerate(self.results):
            if is_float(x) or _is_int(x):
                yield from self._insertions(around, i, x)
        if self.result is not None and (is_float(self.result) or isinstance(self.result, np.ndarray)):
            yield from self._places()
            yield from self._scales()
            yield from self._factors(around)
            yield from self._operands(around)

    def _collectives(self) -> Iterator[_Change]:
        named = self.params.get("axes", self.params.get("axis_name", ()))
        named = tuple(named) if isinstance(named, (tuple, list)) else (named,)
        n, there, rank = _size(self.axes, named), _and(named), (1, -self.number)

        def change(cause: str, f: Apply) -> _Change:
            return _Change(rank, cause, cause, lambda run, e, xs: [f(run, e, x) for x in xs])

        now = "psum" if self.name in _SUMS else self.name
        scaled = lambda k: lambda run, e, x: run.times(run.as_it_is(e, [x]), k)  # noqa: E731
        if now in ("psum", "reduce_scatter") and is_float(self.results[0]):
            yield change(f"{n} times too large: a sum instead of a mean over {there}", scaled(1 / n))
            yield change(f"{n} times too small: a mean instead of a sum over {there}", scaled(n))
        if now in _WORDS:
            yield change(
                f"summed twice over {there}" if now == "psum" else f"'{now}' is not needed", lambda run, e, x: x
            )
            for how, over in itertools.product(("psum", "pmean", "pmax"), self.subsets):
                if (how, set(over)) != (now, set(named)):
                    text = f"a {_WORDS[now]} over {there} instead of a {_WORDS[how]} over {_and(over)}"
                    yield change(text, lambda run, e, x, how=how, over=over: run.over(how, x, over, e))
        elif now == "ppermute":
            for text, perm in _permutations(n, self.params["perm"]).items():
                params = {**self.params, "perm": perm}
                yield change(f"'ppermute' over {there} should be {text}",
                    lambda run, e, x, params=params: run.collective("ppermute", x, e, **params))  # fmt: skip
        elif named and now in ("reduce_scatter", "all_gather", "all_gather_invariant", "all_to_all", "axis_index"):
            for a, m in self.axes:
                if a not in named and m == n:
                    key = "axes" if "axes" in self.params else "axis_name"
                    params = {**self.params, key: a if isinstance(self.params[key], str) else (a,)}
                    cause = f"'{now}' over {there} instead of {a}"
                    yield _Change(
                        rank,
                        cause,
                        cause,
                        lambda run, e, xs, params=params: [
                            run.collective(e.primitive.name, xs[0] if xs else None, e, **params)
                        ],
                    )

    def _numbers(self, around: _Around) -> Iterator[_Change]:
        for i, v in enumerate(self.eqn.invars):
            if not isinstance(v, core.Literal) or np.ndim(v.val) or np.asarray(v.val).dtype.kind in "bc":
                continue
            old, whole = np.asarray(v.val).item(), np.asarray(v.val).dtype.kind in "iu"
            sizes = {n for _, n in self.axes if n > 1}
            others = (
                [old // 2, 0] if whole else [old / 2, *(old * k for n in sizes for k in (n, 1 / n)), *around.floats]
            )
            for new in dict.fromkeys([old + 1, old - 1, old * 2, *others]):
                if new != old and math.isfinite(new):
                    constant = lambda run, e, x, i=i, new=new: run.constant(np.asarray(new, e.invars[i].aval.dtype))  # noqa: E731
                    yield _Change((2, new not in around.floats, self.number), f"{i} {old} {new}",
                        f"{old:g} in '{self.name}' should be {new:g}", _operand(i, constant))  # fmt: skip
        if self.name in _TWINS:
            twin = _TWINS[self.name]
            swapped = lambda run, e, xs: run.renamed(e, twin, xs)  # noqa: E731
            yield _Change((2, 1, self.number), twin, f"'{self.name}' should be '{twin}'", swapped)
        if _is_int(self.result) and len(self.operands) == 2:
            for sign, f in _OF_INTEGERS.items():
                computed = lambda run, e, xs, f=f: [np.asarray(f(*xs)).astype(xs[0].dtype)]  # noqa: E731
                yield _Change((2, 2, self.number), sign, f"the integer should be computed with '{sign}'", computed)
        for a, n in self.axes:
            if isinstance(self.result, np.ndarray) and self.result.ndim == 1 and self.result.dtype == bool:
                for k in range(n):
                    yield _Change((2, 0, self.number), f"{a} {k}",
                        f"the condition should hold at position {k} of {a} only",
                        lambda run, e, xs, a=a, k=k: [run.index(a) == k])  # fmt: skip
            if self.name in ("argmax", "argmin"):
                for k in sorted(set(self.operands[0].shape[1:])):
                    yield _Change(
                        (2, 3, self.number),
                        f"+ {k} {a}",
                        f"the position along {a} is not added",
                        _result(lambda run, e, x, a=a, k=k: (x + k * _column(run.index(a), x)).astype(x.dtype)),
                    )

    def _places(self) -> Iterator[_Change]:
        rank = (3, self.number)
        r: Any = self.result
        first: Any = self.operands[0] if self.operands else None
        for i, x in enumerate(self.operands):
            if self.name in _LEAVE_OUT and _fits(x, r):
                yield _Change(rank, f"{i}", f"'{self.name}' is not needed", lambda run, e, xs, i=i: [xs[i]])
        if self.name == "reshape":
            longer = max(first.shape[1:], r.shape[1:], key=len)
            for order in _orders(longer):
                yield _Change(rank, str(order), "'reshape' has dimensions in another order",
                    lambda run, e, xs, order=order: [_reordered(xs[0], run.as_it_is(e, xs).shape, order)])  # fmt: skip
        if self.name in ("slice", "dynamic_slice"):
            for d, (n, m) in enumerate(zip(first.shape[1:], r.shape[1:], strict=True)):
                for over in self.subsets:
                    if n == m * _size(self.axes, over) and is_float(r):
                        params = {"axis_name": over, "scatter_dimension": d, "tiled": True, "axis_index_groups": None}
                        yield _Change(
                            rank,
                            f"{d} {over}",
                            f"a part is taken that is not summed over {_and(over)}",
                            lambda run, e, xs, params=params: [run.collective("reduce_scatter", xs[0], e, **params)],
                        )
                    if self.name == "dynamic_slice" and len(over) == 1:
                        start = lambda run, e, x, a=over[0], m=m: (m * run.index(a)).astype(x.dtype)  # noqa: E731
                        yield _Change((3, 1, self.number), f"{d} {over} start",
                            f"not the part of this device along {over[0]}", _operand(1 + d, start))  # fmt: skip
                if self.name == "slice" and not self.params.get("strides"):
                    old = self.params["start_indices"][d]
                    for at in sorted(range(n - m + 1), key=lambda s: abs(s - old)):
                        if at != old:
                            yield _Change(rank, f"{d} {at - old}",
                                f"the slice should begin at {at} instead of {old}",
                                lambda run, e, xs, d=d, by=at - old: [_shifted(e.params, xs[0], d, by)])  # fmt: skip

    def _insertions(self, around: _Around, i: int, x: Value) -> Iterator[_Change]:
        rank = (4, self.name not in _ADDS, self.number)
        kinds = ("psum", "pmean") if is_float(x) else ("psum", "pmax")
        for how, over in itertools.product(("pmax",) if self.name in _LARGEST else kinds, self.subsets):
            word = {"psum": "not summed", "pmean": "not averaged", "pmax": "no maximum is taken"}[how]
            yield _Change(rank, f"+{how} {over} {i}", f"{word} over {_and(over)}",
                _result(lambda run, e, x, how=how, over=over: run.over(how, x, over, e), i))  # fmt: skip
        for c in around.collectives if self.axes else ():
            yield _Change(rank, f"+{c.primitive} {c.params} {i}", f"'{c.primitive.name}' is missing",
                _result(lambda run, e, x, c=c: run.collective(c.primitive.name, x, e, **c.params), i))  # fmt: skip
        for f in around.functions if is_float(x) else ():
            yield _Change((6, -1, self.number), f"+{f} {i}", f"'{f}' is missing",
                _result(lambda run, e, x, f=f: run.elementwise(f, x), i))  # fmt: skip

    def _scales(self) -> Iterator[_Change]:
        for over in self.subsets if is_float(self.result) else ():
            n = _size(self.axes, over)
            for k, word in ((1 / n, "large: summed twice"), (n, "small: divided twice")):
                cause = f"{n} times too {word} over {_and(over)}"
                scaled = lambda run, e, x, k=k: run.times(x, k)  # noqa: E731
                if self.name in ("add", "sub"):
                    for i, x in enumerate(self.operands):
                        if is_float(x):
                            yield _Change((5, 0, -self.number), f"{i} times {k}", cause, _operand(i, scaled))
                yield _Change((5, 1, -self.number), f"times {k}", cause, _result(scaled))

    def _operands(self, around: _Around) -> Iterator[_Change]:
        """Other variables instead of an operand."""
        scope = around.scope(self.eqn) if self.name not in _LARGEST else ()
        for i, x in enumerate(self.operands):
            for v in scope:
                if v is not self.eqn.invars[i] and _fits(x, around.values[v]):
                    yield _Change((6, self.number), f"{i} {v}", f"'{self.name}' reads another value",
                        _operand(i, lambda run, e, x, v=v: run.values[v]))  # fmt: skip

    def _factors(self, around: _Around) -> Iterator[_Change]:
        """Factors that are missing: of a carry that is added to, and of what a body returns."""
        body = around.body(self.eqn)
        if body is None or not is_float(self.result) or not self.axes:
            return
        places: list[tuple[int | None, Any]] = [(None, self.result)] if self.eqn.outvars[0] in body.outvars else []
        if self.name in ("add", "sub"):
            places += [(i, x) for i, x in enumerate(self.operands) if self.eqn.invars[i] in body.invars]
        for v, (i, x) in itertools.product(around.scope(self.eqn), places):
            y = around.values[v]
            for at in range(x.ndim - y.ndim + 1 if is_float(x) and is_float(y) and y.ndim > 1 else 0):
                if y.shape[1:] == x.shape[1 + at :][: y.ndim - 1]:
                    times = lambda run, e, x, v=v, at=at: run.elementwise("mul", x, _aligned(run.values[v], x, at))  # noqa: E731
                    yield _Change((3, 2, -self.number), f"{i} {v} {at}", "a factor is missing",
                        _result(times) if i is None else _operand(i, times))  # fmt: skip


def _and(names: Sequence[Any]) -> str:
    return " and ".join(map(str, names))


def _orders(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The orders of dimensions, but of those of size 1."""
    if len(shape) > 4:
        return []
    all_of_them = itertools.permutations(range(len(shape)))
    return list({tuple(d for d in o if shape[d] > 1): o for o in all_of_them}.values())[1:]


def _column(index: np.ndarray, like: Value) -> np.ndarray:
    return index.reshape(-1, *(1,) * (like.ndim - 1))


def _aligned(y: Value, x: Value, at: int) -> Value:
    return moved(lambda v: v.reshape(len(v), *(1,) * at, *v.shape[1:], *(1,) * (x.ndim - at - v.ndim)), y)


def _permutations(n: int, perm: Any) -> dict[str, list[tuple[int, int]]]:
    now = sorted((int(a), int(b)) for a, b in perm)
    found = {"the inverse": sorted((b, a) for a, b in now), "left out": [(i, i) for i in range(n)]}
    found |= {f"a ring by {k}": [(i, (i + k) % n) for i in range(n)] for k in range(1, n)}
    found["a shift by 1 without a ring"] = [(i, i + 1) for i in range(n - 1)]
    found["a shift by -1 without a ring"] = [(i + 1, i) for i in range(n - 1)]
    return {text: p for text, p in found.items() if p != now}


def _reordered(x: Value, shape: tuple[int, ...], order: tuple[int, ...]) -> Value:
    """x reshaped, but with the longer of both shapes in another order."""

    def move(v: np.ndarray) -> np.ndarray:
        if len(shape) < v.ndim:
            return v.transpose(0, *(1 + d for d in order)).reshape(len(v), *shape[1:])
        return v.reshape(len(v), *(shape[1 + d] for d in order)).transpose(0, *(1 + np.argsort(order)))

    return moved(move, x)


def _shifted(params: dict[str, Any], x: Value, d: int, by: int) -> Value:
    limits = zip(params["start_indices"], params["limit_indices"], strict=True)
    where = tuple(slice(a + by * (i == d), b + by * (i == d)) for i, (a, b) in enumerate(limits))
    return moved(lambda v: v[(slice(None), *where)], x)


class _Around:
    """The wrong program, as a whole."""

    def __init__(self, jaxpr: Any, plain: Any) -> None:
        self.bodies = list(_bodies(jaxpr))
        self.values: dict[Any, Value] = {}
        self.places: dict[int, _Place] = {}
        self.collectives: list[Any] = []
        in_plain = [e for _, body in _bodies(plain) for e in body.eqns]
        self.functions = sorted({e.primitive.name for e in in_plain} & _FUNCTIONS)
        literals: list[Any] = [
            v for e in in_plain for v in e.invars if isinstance(v, core.Literal) and np.asarray(v.val).dtype.kind == "f"
        ]
        self.floats = list(dict.fromkeys(float(v.val) for v in literals if not np.ndim(v.val)))
        self._body = {id(e): body for _, body in self.bodies for e in body.eqns}
        self.holder = {id(body): e for e, body in self.bodies}

    def saw(self, eqn: Any, axes: Axes, operands: Sequence[Value], results: Sequence[Value]) -> None:
        """Keeps an equation."""
        place = _Place(len(self.places), eqn, axes, tuple(operands), tuple(results))
        if self.places.setdefault(id(eqn), place) is place and place.name in ("ppermute", "all_to_all"):
            self.collectives.append(eqn)

    def derived(self, new: Value, old: Value) -> None:
        """Moves between equations are no places of faults."""

    def body(self, eqn: Any) -> Any:
        """The jaxpr of an equation; None if it is not known."""
        return self._body.get(id(eqn))

    def inside(self) -> dict[int, set[int]]:
        """For each equation and body the equations that hold it."""
        found: dict[int, set[int]] = {}
        for eqn, body in self.bodies:  # outer ones come first
            held = found.get(id(eqn), set()) | ({id(eqn)} if eqn is not None else set())
            for x in (body, *body.eqns):
                found.setdefault(id(x), set()).update(held)
        return found

    def line(self, eqn: Any) -> str:
        """The user's line of an equation, of the call that it is in, or of an operand; empty if none is known."""
        at = eqn
        while at is not None:
            if line := jax_adapter.user_line(at.source_info):
                return line
            at = self.holder.get(id(self.body(at)))
        body = self.body(eqn)
        made = [e for e in body.eqns if set(e.outvars) & {v for v in eqn.invars if not isinstance(v, core.Literal)}]
        return self.line(made[-1]) if made else ""

    def scope(self, eqn: Any) -> list[Any]:
        """The variables that an equation could read, the last ones first."""
        body = self.body(eqn)
        if body is None:
            return []
        before = itertools.takewhile(lambda e: e is not eqn, body.eqns)
        return [v for v in [*body.invars, *(v for e in before for v in e.outvars)] if v in self.values][::-1]

    def of_bodies(self) -> Iterator[tuple[Any, Any, _Change]]:
        """Changes of what the bodies of loops and of shard_map return."""
        for eqn, body in self.bodies:
            if eqn is None or eqn.primitive.name not in ("scan", "while", "shard_map"):
                continue
            variables = [v for v in [*body.invars, *(v for e in body.eqns for v in e.outvars)] if v in self.values][
                ::-1
            ]
            for i, old in enumerate(body.outvars):
                x = None if isinstance(old, core.Literal) else self.values.get(old)
                for c in self.collectives if x is not None else ():
                    moved_on = lambda run, b, rs, i=i, c=c: [  # noqa: E731
                        run.collective(c.primitive.name, r, c, **c.params) if j == i else r for j, r in enumerate(rs)
                    ]
                    yield (
                        eqn,
                        body,
                        _Change(
                            (4, 0.5), f"{i} {c.primitive} {c.params}", f"'{c.primitive.name}' is missing", moved_on
                        ),
                    )
                for v in variables if x is not None else ():
                    if v is old or not _fits(x, self.values[v]):
                        continue
                    other = lambda run, b, rs, i=i, v=v: [run.values[v] if j == i else r for j, r in enumerate(rs)]  # noqa: E731
                    yield eqn, body, _Change((6, math.inf), f"{i} {v}", "another value should be returned", other)
                    if is_float(x) and v in body.invars:
                        added = lambda run, b, rs, i=i, v=v: [  # noqa: E731
                            run.elementwise("add", r, run.values[v]) if j == i else r for j, r in enumerate(rs)
                        ]
                        yield eqn, body, _Change((4.5, 0), f"{i} + {v}", "the carry is not added to", added)
            for i, v in enumerate(eqn.invars if eqn.primitive.name == "scan" else ()):
                if v in self.values if not isinstance(v, core.Literal) else False:
                    yield (
                        eqn,
                        eqn,
                        _Change(
                            (4.5, 1),
                            f"zero {i}",
                            "the loop does not begin with zeros",
                            _operand(i, lambda run, e, x: run.times(x, 0.0)),
                        ),
                    )


def repair(execute: Callable[[Any], set[int]], jaxpr: Any, plain: Any, **fields: Any) -> Repair | None:
    """The first change after which a wrong result is right.

    Args:
        execute: runs the wrong program in an interpreter, always with the same operands, and gives the numbers of the
            results that are wrong.
        jaxpr, plain: the wrong program, and the plain one.
        fields: those of the interpreter.
    """
    around = _Around(jaxpr, plain)
    before = _Run({}, {}, {}, around.inside())
    first = Changed(**fields, observe=around, before=before)
    wrong = execute(first)
    around.values = first.values
    groups: dict[tuple[str, str], list[tuple[_Change, Any, Any]]] = {}
    for place in around.places.values():
        where = f"{around.line(place.eqn)} {place.name}"
        for change in place.changes(around):
            groups.setdefault((where, change.key), []).append((change, place.eqn, place.eqn))
    for eqn, target, change in around.of_bodies():
        groups.setdefault((str(id(target)), change.key), []).append((change, eqn, target))
    tries = list(groups.values())
    tries += [[m] for members in groups.values() if len(members) > 1 for m in members]
    best, rank, cost = None, 0.0, 0.0
    for members in sorted(tries, key=lambda m: m[0][0].rank):
        change, eqn, _ = members[0]
        if best is not None and change.rank[0] > rank:
            break
        targets = frozenset(id(m[2]) for m in members)
        run = Changed(**fields, before=before, targets=targets, apply=change.apply)
        try:
            with np.errstate(all="ignore"):
                still = execute(run)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, Undecided):  # it does not fit
            continue
        finally:
            cost += run.cost + 0.1
        if not still or (best is None and still < wrong and min(wrong) not in still):
            best, rank = Repair(around.line(eqn), change.cause, not still), change.rank[0]
        if not still or cost > _MOST_EQUATIONS:
            break
    return best


def _bodies(jaxpr: Any, eqn: Any = None) -> Iterator[tuple[Any, Any]]:
    body = jax_adapter.closed(jaxpr)[0]
    yield eqn, body
    for e in body.eqns:
        for inner in jax_adapter.sub_jaxprs(e.params):
            yield from _bodies(inner, e)
