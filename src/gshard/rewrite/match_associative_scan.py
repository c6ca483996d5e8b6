"""Scanned: what ``lax.associative_scan`` makes is found in a block, and becomes one equation (``rules.prefixes``).

It begins with every second element of some arrays, and those beside them. What combines the two is read off the
equations between these slices and the next. Then JAX is asked what it makes of such a scan; if all of that is there,
equation by equation, it is one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from gshard.core.jax_adapter import jaxpr_without_dead_code
from gshard.core.program import Constant, Equation, Value
from gshard.rewrite.cse import is_repeatable
from gshard.rewrite.dce import without_unread
from gshard.rules.elementwise import COMPUTED
from gshard.rules.prefixes import Combination, associative_scan_p

Array = Value | Constant

_LEAST = 8  # elements: with fewer there are no two levels to compare


def scanned(
    equations: Sequence[Equation],
    outputs: Sequence[Array],
    fresh: Callable[[tuple[int, ...], Any], Value],
    equation: Callable[..., Equation],
    equations_of: Callable[[Any, Sequence[Any], Sequence[Array]], tuple[Sequence[Equation], Sequence[Array]]],
) -> list[Equation]:
    """The equations with scans as one equation each; what nobody reads any more is gone.

    Args:
        equations: of one block.
        outputs: the block's results.
        fresh: a new value of a shape and a dtype.
        equation: an equation of a primitive, its parameters, operands, results, and the source that it is blamed on.
        equations_of: the equations of a jaxpr with constants on some arrays, and its results.
    """
    equations = list(equations)
    at = 0
    while (begin := next((i for i in range(at, len(equations)) if _every_second(equations[i]) == 0), None)) is not None:
        at = begin + 1
        found = _scan_from(equations, begin, equations_of)
        if found is None:
            continue
        combination, arrays, axis, results = found
        made = [results.get(i) or fresh(x.shape, x.dtype) for i, x in enumerate(arrays)]
        params = {"combination": combination, "axis": axis}
        one = equation(associative_scan_p, params, tuple(arrays), tuple(made), equations[begin].source_info)
        rest = [e for e in equations[begin:] if not set(e.outputs) & set(results.values())]
        new = without_unread([*equations[:begin], one, *rest], outputs, is_repeatable)
        # What is needed of the levels in between is there anyway, as in derivatives: then nothing is gained.
        if sum(_every_second(e) is not None for e in new) < sum(_every_second(e) is not None for e in equations):
            equations, at = new, 0
    return equations


def _every_second(e: Equation) -> int | None:
    """With which element a slice of every second one begins, and None if it is none."""
    if e.name != "slice" or sorted(e.params["strides"] or ())[-1:] != [2]:
        return None
    strides, shape = e.params["strides"], e.inputs[0].shape
    axis = strides.index(2)
    others = (
        (int(a), int(b), int(s)) == (0, n, 1)
        for d, (a, b, s, n) in enumerate(
            zip(e.params["start_indices"], e.params["limit_indices"], strides, shape, strict=True)
        )
        if d != axis
    )
    begin, end = int(e.params["start_indices"][axis]), int(e.params["limit_indices"][axis])
    return begin if all(others) and end == shape[axis] - 1 + begin and begin < 2 else None


def _scan_from(
    equations: Sequence[Equation], begin: int, equations_of: Callable[..., Any]
) -> tuple[Combination, list[Value], int, dict[int, Value]] | None:
    """The scan that begins with an equation: its combination, arrays, dimension, and the results that are needed."""
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
    return _found(equations, combination, [x for x in arrays if isinstance(x, Value)], axis, equations_of)


def _results(equations: Sequence[Equation]) -> tuple[Value, ...]:
    return tuple(e.outputs[0] for e in equations)


def _is_elementwise(c: Combination) -> bool:
    """Whether arrays of any shape can be combined so, and are combined to arrays of their types."""
    known = {*c.left, *c.right}
    shape = c.left[0].shape
    for e in c.equations:
        numbers = all(isinstance(x, Constant) and not x.shape for x in e.inputs if x not in known)
        same = all(x.shape in ((), shape) for x in (*e.inputs, *e.outputs))
        made = e.name in COMPUTED or (e.name == "broadcast_in_dim" and not e.inputs[0].shape)
        if e.mark is not None or not (numbers and same and made):
            return False
        known.update(e.outputs)
    alike = ((r.shape, r.dtype) == (x.shape, x.dtype) for r, x in zip(c.results, c.left, strict=False))
    return len(c.results) == len(c.left) and known.issuperset(c.results) and all(alike)


def _found(
    equations: Sequence[Equation],
    combination: Combination,
    arrays: list[Value],
    axis: int,
    equations_of: Callable[..., Any],
) -> tuple[Combination, list[Value], int, dict[int, Value]] | None:
    """The scan, if all that JAX makes of it is there."""
    there = {key: e for e in equations if (key := _key(e, e.inputs)) is not None}
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    for needed in _subsets(len(arrays)):

        def scan(*xs: Any, needed: Sequence[int] = needed) -> list[Any]:
            made = lax.associative_scan(combination, list(xs), axis=axis)
            return [made[i] for i in needed]

        whole = jax.make_jaxpr(scan)(*shapes)
        expected, results = equations_of(jaxpr_without_dead_code(whole.jaxpr), whole.consts, arrays)
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
    """A number as it is written (with its sign, if it is zero), an array by its bits."""
    value = np.asarray(x.value)
    return (value.shape, repr(value.item()) if not value.shape else (str(value.dtype), value.tobytes()))
