"""Finds the equations of a ``lax.associative_scan``, and replaces them by one (``rules.prefixes``).

They begin with every second element of some arrays, and the elements beside them. The equations between these slices
and the next ones combine two elements. JAX traces a scan with that combination; if the block has all of its equations,
they are a scan.
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
from gshard.rules.movement import one_array
from gshard.rules.prefixes import Combination, associative_scan_p

Scan = tuple[Combination, list[Value], int, dict[int, Value]]
"""The combination, the arrays, their dimension, and for the results that are needed their values."""

_LEAST = 8  # elements: with fewer there are no two levels to compare


@over("slice")
def match_associative_scan(graph: Graph) -> Others:
    """The equations of a scan become one ``associative_scan``."""
    begins = (i for i, e in enumerate(graph.equations) if _every_second(e) == 0)
    for begin in begins:
        found = _scan_from(graph, begin)
        if found is None:
            continue
        combination, arrays, axis, results = found
        made = [results.get(i) or graph.writer.fresh(x.shape, x.dtype) for i, x in enumerate(arrays)]
        params, first = {"combination": combination, "axis": axis}, graph.equations[begin]
        scan = graph.writer.equation(associative_scan_p, params, tuple(arrays), tuple(made), first.source_info)
        own = set(results.values())
        others: dict[Equation, list[Equation]] = {e: [] for e in graph.equations[begin:] if own & {*e.outputs}}
        others[first] = [scan, *others.get(first, [first])]
        # Derivatives need the levels in between. They are computed anyway then, and nothing is gained.
        if _levels(graph.replaced(others)) < _levels(graph.equations):
            return others
    return {}


def _levels(equations: Iterable[Equation]) -> int:
    return sum(_every_second(e) is not None for e in equations)


def _every_second(e: Equation) -> int | None:
    """With which element a slice of every second one begins, and None if it is none."""
    if e.name != "slice":
        return None
    cuts = zip(one_array(e)[0], e.inputs[0].shape, strict=True)
    moved = [(cut, n) for cut, n in cuts if (cut.start, cut.count) != (0, n)]
    if len(moved) != 1:
        return None
    ((cut, n),) = moved
    return cut.start if (cut.step, cut.count) == (2, n // 2) and cut.start < 2 else None


def _scan_from(graph: Graph, begin: int) -> Scan | None:
    """The scan that begins with an equation."""
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
    return _found(graph, combination, [x for x in arrays if isinstance(x, Value)], axis)


def _results(equations: Sequence[Equation]) -> tuple[Value, ...]:
    return tuple(e.outputs[0] for e in equations)


def _is_elementwise(c: Combination) -> bool:
    """Whether arrays of any shape can be combined so, and are combined to arrays of their types."""
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


def _found(graph: Graph, combination: Combination, arrays: list[Value], axis: int) -> Scan | None:
    """The scan, if the block has all of its equations."""
    there = {key: e for e in graph.equations if (key := _key(e, e.inputs)) is not None}
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    for needed in _subsets(len(arrays)):

        def scan(*xs: Any, needed: Sequence[int] = needed) -> list[Any]:
            made = lax.associative_scan(combination, list(xs), axis=axis)
            return [made[i] for i in needed]

        whole = jax.make_jaxpr(scan)(*shapes)
        expected, results = graph.writer.made_of(jaxpr_without_dead_code(whole.jaxpr), whole.consts, arrays)
        real: dict[Any, Any] = {x: x for x in arrays}
        for e in expected:
            if all(0 in x.shape for x in e.outputs):  # at the last level; made in other ways, they are the same
                continue
            match = there.get(_key(e, [real.get(x, x) for x in e.inputs]))
            if match is None:
                break
            real.update(zip(e.outputs, match.outputs, strict=True))
        else:
            return combination, arrays, axis, {i: real[x] for i, x in zip(needed, results, strict=True)}
    return None


def _subsets(count: int) -> Iterator[tuple[int, ...]]:
    """Of the results, those that may be needed: all of them first."""
    for size in range(count, 0, -1):
        yield from itertools.combinations(range(count), size)


def _key(e: Equation, inputs: Sequence[Array]) -> Any:
    """What equal equations have in common, whatever is empty."""
    operands = tuple(x if isinstance(x, Value) else _written(x) for x in inputs if 0 not in x.shape)
    key = e.primitive, tuple(e.params.items()), operands
    try:
        hash(key)
    except TypeError:  # a parameter that cannot be compared
        return None
    return key


def _written(x: Constant) -> Any:
    """A number by its text (with its sign, if it is zero), an array by its bits."""
    value = np.asarray(x.value)
    return (value.shape, repr(value.item()) if not value.shape else (str(value.dtype), value.tobytes()))
