"""Finds the equations of a ``lax.associative_scan``, and replaces them by one equation (``rules.prefixes``).

A scan begins with slices of even and of odd positions, and the equations up to the next slices combine two elements. If
the block contains all equations of a scan with this combination, they are one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from gshard.core.jax_adapter import jaxpr_without_dead_code
from gshard.core.program import Constant, Equation, Value
from gshard.language.traits import traits_of
from gshard.rewrite.driver import over
from gshard.rewrite.equation_graph import Array, Graph, Others
from gshard.rules.prefixes import Combination, associative_scan_p
from gshard.rules.shape import one_array

Scan = tuple[Combination, list[Value], int, dict[int, Value]]
"""The combination, the arrays, their dimension, and the value of each needed result by number."""

_LEAST = 8  # smallest number of elements: a shorter scan has no two levels to compare


@over("slice")
def match_associative_scan(graph: Graph) -> Others:
    """Replaces the equations of a scan by one ``associative_scan``."""
    begins = (i for i, e in enumerate(graph.equations) if _every_second(e) == 0)
    for begin in begins:
        scan = _scan_from(graph, begin)
        if scan is None:
            continue
        combination, arrays, axis, results = scan
        outputs = [results.get(i) or graph.writer.fresh(x.shape, x.dtype) for i, x in enumerate(arrays)]
        params = {"combination": combination, "axis": axis}
        first = graph.equations[begin]
        new = graph.writer.equation(associative_scan_p, params, tuple(arrays), tuple(outputs), first.source_info)
        values = set(results.values())
        others: dict[Equation, list[Equation]] = {e: [] for e in graph.equations[begin:] if values & {*e.outputs}}
        others[first] = [new, *others.get(first, [first])]
        # If a derivative reads the levels in between, they are computed anyway, and the rewrite is useless.
        if _levels(graph.replaced(others)) < _levels(graph.equations):
            return others
    return {}


def _levels(equations: Iterable[Equation]) -> int:
    return sum(_every_second(e) is not None for e in equations)


def _every_second(e: Equation) -> int | None:
    """The first position of a slice of every second element; None for other equations."""
    if e.name != "slice":
        return None
    cuts = zip(one_array(e)[0], e.inputs[0].shape, strict=True)
    moved = [(cut, n) for cut, n in cuts if (cut.start, cut.count) != (0, n)]
    if len(moved) != 1:
        return None
    ((cut, n),) = moved
    return cut.start if (cut.step, cut.count) == (2, n // 2) and cut.start < 2 else None


def _scan_from(graph: Graph, begin: int) -> Scan | None:
    """The scan that begins with an equation, if there is one."""
    equations = graph.equations
    cuts = list(itertools.takewhile(lambda e: _every_second(e) is not None, equations[begin:]))
    first = list(itertools.takewhile(lambda e: _every_second(e) == 0, cuts))
    count = len(first)
    second = cuts[count : 2 * count]
    arrays = [e.inputs[0] for e in first]
    axis, shape = first[0].params["strides"].index(2), arrays[0].shape
    if len(second) < count or [e.inputs[0] for e in second] != arrays or shape[axis] < _LEAST:
        return None
    if any(_every_second(e) != 1 or e.params["strides"].index(2) != axis for e in second):
        return None
    if any(e.inputs[0].shape != shape or not isinstance(e.inputs[0], Value) for e in first):
        return None
    body = list(itertools.takewhile(lambda e: _every_second(e) is None, equations[begin + 2 * count :]))
    following = equations[begin + 2 * count + len(body) :][:count]
    results = tuple(e.inputs[0] for e in following)
    combination = Combination(tuple(body), _results(first), _results(second), results)  # type: ignore[arg-type]
    if not _is_elementwise(combination):
        return None
    return _matched(graph, combination, [x for x in arrays if isinstance(x, Value)], axis)


def _results(equations: Sequence[Equation]) -> tuple[Value, ...]:
    return tuple(e.outputs[0] for e in equations)


def _is_elementwise(c: Combination) -> bool:
    """Whether a combination works on arrays of any shape, and returns arrays of the same types."""
    known = {*c.left, *c.right}
    shape = c.left[0].shape
    for e in c.equations:
        numbers = all(isinstance(x, Constant) and not x.shape for x in e.inputs if x not in known)
        same = all(x.shape in ((), shape) for x in (*e.inputs, *e.outputs))
        made = traits_of(e.name).computes or (e.name == "broadcast_in_dim" and not e.inputs[0].shape)
        if e.mark is not None or not (numbers and same and made):
            return False
        known.update(e.outputs)
    alike = ((r.shape, r.dtype) == (x.shape, x.dtype) for r, x in zip(c.results, c.left, strict=False))
    return len(c.results) == len(c.left) and known.issuperset(c.results) and all(alike)


def _matched(graph: Graph, combination: Combination, arrays: list[Value], axis: int) -> Scan | None:
    """The scan with a combination, if the block contains all of its equations."""
    equation_of = {key: e for e in graph.equations if (key := _key(e, e.inputs)) is not None}
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    for needed in _subsets(len(arrays)):

        def scan(*xs: Any, needed: Sequence[int] = needed) -> list[Any]:
            prefixes = lax.associative_scan(combination, list(xs), axis=axis)
            return [prefixes[i] for i in needed]

        whole = jax.make_jaxpr(scan)(*shapes)
        expected, results = graph.writer.made_of(jaxpr_without_dead_code(whole.jaxpr), whole.consts, arrays)
        real: dict[Any, Any] = {x: x for x in arrays}
        for e in expected:
            if all(0 in x.shape for x in e.outputs):  # empty arrays of the last level may be computed differently
                continue
            match = equation_of.get(_key(e, [real.get(x, x) for x in e.inputs]))
            if match is None:
                break
            real.update(zip(e.outputs, match.outputs, strict=True))
        else:
            return combination, arrays, axis, {i: real[x] for i, x in zip(needed, results, strict=True)}
    return None


def _subsets(count: int) -> Iterator[tuple[int, ...]]:
    """All nonempty subsets of result numbers, larger subsets first."""
    for size in range(count, 0, -1):
        yield from itertools.combinations(range(count), size)


def _key(e: Equation, inputs: Sequence[Array]) -> Any:
    """A key that is equal for equations that compute the same, ignoring empty operands."""
    operands = tuple(x if isinstance(x, Value) else _literal_key(x) for x in inputs if 0 not in x.shape)
    key = e.primitive, tuple(e.params.items()), operands
    try:
        hash(key)
    except TypeError:  # a parameter that cannot be compared
        return None
    return key


def _literal_key(x: Constant) -> Any:
    """A constant as a part of a key: a scalar by its text (which distinguishes -0.0), an array by its bits."""
    value = np.asarray(x.value)
    return (value.shape, repr(value.item()) if not value.shape else (str(value.dtype), value.tobytes()))
