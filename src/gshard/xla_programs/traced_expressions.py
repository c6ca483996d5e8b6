"""Traced expressions: the user's expressions whose values a sharding constraint can be written on, and the constraints.

A function is traced once to list its expressions (``expressions_of``), and again with constraints on the values of some
(``constrained``). The constraint is applied where the expression is evaluated, before JAX differentiates or batches
anything, so what is compiled is what XLA would compile if the user wrote the constraint there.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from gshard.core.jax_adapter_operations import Expression, Operation, operations_handled


class TracedOtherwise(ValueError):
    """The function, traced again, does not perform the operations that it performed before."""


@dataclasses.dataclass(slots=True)
class Outcome:
    """What became of constraints."""

    # whether the function performed the same operations, and all constraints are on their values; to be read at the end
    is_as_before: bool = False


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TracedExpression:
    """An expression of the user's, and the values that it has while the function is traced."""

    place: Expression  # where it is written
    # of its value, as the user sees it; None for a constraint on arrays of several shapes
    shape: tuple[int, ...] | None
    dtype: str  # the name of its dtype
    primitive: str  # the operation that makes the value
    operations: int  # how many operations each evaluation performs; the last one makes the value
    evaluations: int  # how often it is evaluated
    spec: PartitionSpec | None  # what a constraint says that the user wrote here; None for another expression
    # the expressions whose values it reads, or that a call around it reads, such as a loop
    reads: frozenset[Expression]


@dataclasses.dataclass(frozen=True, slots=True)
class Constraint:
    """A sharding constraint on the value of an expression."""

    expression: TracedExpression  # which
    # the sharding; None removes the constraint that the expression is. On such an expression a spec replaces the one
    # that it has.
    spec: PartitionSpec | None


@dataclasses.dataclass(frozen=True)
class _Performed:
    operation: Operation
    results: Sequence[Any]


def expressions_of(trace: Callable[[], object]) -> tuple[tuple[TracedExpression, ...], int]:
    """The expressions of a function whose value a sharding constraint can be written on."""
    performed: list[_Performed] = []

    def note(operation: Operation, perform: Callable[[], Sequence[Any]]) -> Sequence[Any]:
        results = perform()
        performed.append(_Performed(operation, results))
        return results

    with operations_handled(note):
        trace()
    made_by = {id(x): p.operation.expression for p in performed for x in p.results}
    executions: dict[Expression, dict[int, list[_Performed]]] = {}
    for p in performed:
        if p.operation.expression is not None:
            same = executions.setdefault(p.operation.expression, {})
            same.setdefault(id(p.operation.execution), []).append(p)  # ``performed`` keeps the frames
    reads: dict[Expression, set[Expression]] = {}
    around: dict[Expression, set[Expression]] = {}
    for p in performed:
        if (place := p.operation.expression) is not None:
            operands = {made_by.get(id(x)) for x in p.operation.operands} - {None, place}
            reads.setdefault(place, set()).update(e for e in operands if e is not None)
            around.setdefault(place, set()).update(p.operation.around)
    every = {place: own.union(*(reads.get(e, ()) for e in around[place])) for place, own in reads.items()}
    read = [_read(place, list(runs.values()), frozenset(every[place])) for place, runs in executions.items()]
    found = [expression for expression in read if expression is not None]
    return tuple(found), len(read) - len(found)


def _read(
    place: Expression, runs: Sequence[Sequence[_Performed]], reads: frozenset[Expression]
) -> TracedExpression | None:
    seen = [[p for p in run if not p.operation.is_nested] for run in runs]
    # The last operation makes the value, unless JAX computes it from the results of nested ones.
    if not all(run and run[-1] is own[-1] for run, own in zip(seen, runs, strict=True)):
        return None
    last = [run[-1].operation for run in seen]
    specs = {operation.constraint for operation in last}
    taken = [p for run in seen for p in (run if last[0].constraint is not None else run[-1:])]
    types = {_type_of(x) for p in taken for x in p.results}
    is_same = len({(len(run), run[-1].operation.primitive) for run in seen}) == len(specs) == 1
    first = next(iter(types))
    if not is_same or first is None or None in types:
        return None
    if len(types) > 1 and last[0].constraint is None:
        return None
    return TracedExpression(
        place, first[0] if len(types) == 1 else None, first[1], last[0].primitive, len(seen[0]), len(runs),
        last[0].constraint, reads,
    )  # fmt: skip


def _type_of(x: Any) -> tuple[tuple[int, ...], str] | None:
    """Shape and dtype of an array; None for scalars, keys and what is no array."""
    shape, dtype = getattr(x, "shape", ()), getattr(x, "dtype", None)
    if not shape or dtype is None or jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return None
    return tuple(shape), str(dtype)


@contextlib.contextmanager
def constrained(constraints: Sequence[Constraint], mesh: jax.sharding.Mesh) -> Iterator[Outcome]:
    """A context in which a function is traced as if the user had written constraints."""
    at = {c.expression.place: c for c in constraints}
    counts: dict[tuple[Expression, Any], int] = {}  # keeps the frames, so that each is another one
    done = set[Expression]()

    def apply(operation: Operation, perform: Callable[[], Sequence[Any]]) -> Sequence[Any]:
        place = operation.expression
        if place is None or place not in at or operation.is_nested:
            return perform()
        expression, spec = at[place].expression, at[place].spec
        run = (place, operation.execution)
        counts[run] = counts.get(run, 0) + 1
        if counts[run] > expression.operations:
            raise TracedOtherwise(f"{place.file}:{place.line} performs more than {expression.operations} operations")
        if counts[run] < expression.operations and operation.constraint is None:
            return perform()
        if operation.primitive != expression.primitive:
            raise TracedOtherwise(f"{place.file}:{place.line}: {operation.primitive} and not {expression.primitive}")
        done.add(place)
        values = perform() if operation.constraint is None else operation.operands
        if spec is None:
            return values
        sharding = NamedSharding(mesh, spec)
        return [jax.lax.with_sharding_constraint(x, sharding) for x in values]

    outcome = Outcome()
    with operations_handled(apply):
        yield outcome
    is_complete = all(n == at[place].expression.operations for (place, _), n in counts.items())
    outcome.is_as_before = done == set(at) and is_complete
