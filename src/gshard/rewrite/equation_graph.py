"""Provides the graph of a block: producers and readers of values, equal equations, and dead code."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from gshard.comm.steps import KINDS
from gshard.core.jax_adapter import as_if_at, bind, closed
from gshard.core.program import Block, Constant, Context, Equation, Value
from gshard.language.region import with_edges
from gshard.language.traits import traits_of

# Computes the keys for common-subexpression elimination, and determines which equations are pure.

# Primitives of per-device programs have no rule, but are pure.
_ON_DEVICES = (*KINDS, "axis_index")


def is_pure(e: Equation) -> bool:
    """Whether an equation may run again or not at all: it always gives the same results and has no effects."""
    if not traits_of(e.name).pure or (e.rule is not None and not e.rule.known and e.name not in _ON_DEVICES):
        return False
    return all(is_pure(inner) for block in e.blocks for inner in block.equations)


def common_key(primitive: Any, params: dict[str, Any], inputs: Sequence[Value | Constant], context: Context) -> Any:
    """A key that is equal for equations that compute the same; None for equations that must not be merged."""
    if not traits_of(primitive.name).shared or not any(isinstance(x, Value) for x in inputs):
        return None
    operands = tuple(x if isinstance(x, Value) else literal_key(x) for x in inputs)
    key = primitive, tuple(params.items()), operands, context
    try:
        hash(key)
    except TypeError:  # a parameter without a hash
        return None
    return key


def literal_key(x: Constant) -> Any:
    """A constant as a part of a key: a scalar by its bits, an array by identity."""
    is_scalar = isinstance(x.value, (np.ndarray, np.generic, bool, int, float, complex)) and not x.shape
    return (str(x.dtype), np.asarray(x.value).tobytes()) if is_scalar else id(x.value)


# Eliminates dead code after rewrites.


def without_dead_code(equations: Iterable[Equation], outputs: Iterable[Any]) -> list[Equation]:
    """The equations of a block without those whose results are dead and that are pure. Marks of the user stay."""
    kept: list[Equation] = []
    read: set[Any] = set(outputs)
    for e in reversed([*equations]):
        if not read.isdisjoint(e.outputs) or e.mark is not None or not is_pure(e):
            kept.append(e)
            read.update(e.inputs)
    return kept[::-1]


def with_others(block: Block, others: Callable[[Equation], Sequence[Equation] | None], *, clean: bool = False) -> Block:
    """The block with other equations in place of some, also in bodies; the same object if nothing changes.

    Args:
        others: returns what replaces an equation; None for an equation that stays, and whose bodies are read.
        clean: whether dead code goes from blocks that change.
    """
    equations: list[Equation] = []
    for e in block.equations:
        new = others(e)
        if new is None:
            bodies = tuple(with_others(body, others, clean=clean) for body in e.blocks)
            new = (e if bodies == e.blocks else with_edges(e, blocks=bodies),)
        equations += new
    if tuple(equations) == block.equations:
        return block
    equations = without_dead_code(equations, block.outputs) if clean else equations
    return Block(block.inputs, tuple(equations), block.outputs)


Array = Value | Constant
Others = Mapping[Equation, Sequence[Equation]]
"""The replacements of some equations of a block."""


class Writer(Protocol):
    """Adds values and equations to a program (``tracing.builder``)."""

    context: Context
    """The context of new equations."""

    def fresh(self, shape: tuple[int, ...], dtype: Any, weak: bool = False) -> Value:
        """A new value."""

    def equation(self, primitive: Any, params: dict[str, Any], inputs: Any, outputs: Any, source: Any) -> Equation:
        """An equation with its rule, and the source information with the user's line."""

    def made_of(self, jaxpr: Any, consts: Any, arrays: Any) -> tuple[list[Equation], list[Array]]:
        """The equations of a jaxpr on some values, and its results."""


def operands_first(values: Iterable[Any], operands: Callable[[Any], Iterable[Any]]) -> list[Any]:
    """The values and all that they are computed from, each after its operands. Does not recur: programs are long."""
    order: dict[Any, None] = {}
    pending = [*values][::-1]
    while pending:
        missing = [y for y in operands(pending[-1]) if y not in order] if pending[-1] not in order else []
        if missing:
            pending += missing[::-1]
        else:
            order[pending.pop()] = None
    return list(order)


class Neighbours:
    """The equations that compute and that read each value of a block, or of a segment of one."""

    def __init__(self, equations: Sequence[Equation], outputs: Sequence[Array]):
        self.equations = tuple(equations)  # the equations in order
        self.outputs = dict.fromkeys(outputs)  # the values that are read outside of these equations, as keys in order

    @functools.cached_property
    def _producers(self) -> dict[Array, Equation]:
        return {v: e for e in self.equations for v in e.outputs}

    @functools.cached_property
    def _readers(self) -> dict[Array, list[Equation]]:
        readers: dict[Array, list[Equation]] = {}
        for e in self.equations:
            for x in e.inputs:
                readers.setdefault(x, []).append(e)
        return readers

    def producer(self, x: Array, *names: str) -> Equation | None:
        """The equation that produces an array, if it is not a mark and has one of these names (any without names)."""
        e = self._producers.get(x)
        return e if e is not None and e.mark is None and (not names or e.name in names) else None

    def readers(self, x: Array) -> Sequence[Equation]:
        """The equations that read an array, one entry for each operand."""
        return self._readers.get(x, ())

    def is_read_once(self, x: Array) -> bool:
        """Whether exactly one operand of one equation is this array, and nothing outside reads it."""
        return len(self.readers(x)) == 1 and x not in self.outputs


class Graph(Neighbours):
    """The equations of a block, or of a segment of one, that rewrites replace."""

    def __init__(self, equations: Sequence[Equation], outputs: Sequence[Array], writer: Writer):
        super().__init__(equations, outputs)
        self.writer = writer  # creates new equations

    def add(
        self, out: list[Equation], at: Equation, primitive: Any, params: dict[str, Any], inputs: Sequence[Array],
        shape: tuple[int, ...], dtype: Any, result: Value | None = None,
    ) -> Value:  # fmt: skip
        """Appends one equation with one result, and returns the result."""
        value = self.writer.fresh(shape, dtype) if result is None else result
        out.append(self.writer.equation(primitive, params, tuple(inputs), (value,), at.source_info))
        return value

    def changed(self, e: Equation, inputs: Sequence[Array], **params: Any) -> Equation:
        """An equation with other operands and some other parameters."""
        return self.writer.equation(e.primitive, {**e.params, **params}, tuple(inputs), e.outputs, e.source_info)

    def write(
        self, function: Callable[..., Any], inputs: Sequence[Array], outputs: Sequence[Value], at: Equation
    ) -> list[Equation]:
        """The equations of a function; see `written`."""
        return written(self.writer, function, inputs, outputs, at)

    def replaced(self, others: Others) -> list[Equation]:
        """The equations after a rewrite, without dead code."""
        return without_dead_code([q for e in self.equations for q in others.get(e, (e,))], self.outputs)


def written(
    writer: Writer, function: Callable[..., Any], inputs: Sequence[Array], outputs: Sequence[Value], at: Equation
) -> list[Equation]:
    """The equations of a function, traced by JAX."""
    arrays = [x for x in inputs if isinstance(x, Value)]

    def of_arrays(*tracers: Any) -> Any:
        remaining = iter(tracers)
        return function(*(next(remaining) if isinstance(x, Value) else x.value for x in inputs))

    def traced(f: Callable[..., Any], types: Sequence[Value], operands: Sequence[Array]) -> Any:
        def with_source(*tracers: Any) -> Any:
            with as_if_at(at.source_info):  # JAX begins a trace without named scopes
                return f(*tracers)

        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak) for x in types]
        with as_if_at(at.source_info):
            jaxpr, consts = closed(jax.make_jaxpr(with_source)(*shapes))
        return writer.made_of(jaxpr, consts, operands)

    writer.context = at.context
    equations, results = traced(of_arrays, arrays, arrays)
    new_values = {v for q in equations for v in q.outputs}
    renaming: dict[Any, Any] = {v: dataclasses.replace(v, made=True) for v in new_values}
    renamed: set[Any] = set()
    for x, v in zip(results, outputs, strict=True):
        if x in new_values and x not in renamed:
            renamed.add(x)
            renaming[x] = v
            continue
        # After CSE two results may be one value, and a result may be an operand. A copy gives each its own value.
        copies, (copy,) = traced(jax.numpy.copy, [dataclasses.replace(v, shape=x.shape, dtype=x.dtype)], [x])
        equations = [*equations, *copies]
        renaming[copy] = v
    return [substituted(q, renaming, file=at.file) for q in equations]


def again(e: Equation, operands: Sequence[Any], **params: Any) -> Any:
    """The result of an equation on other operands, with its source line, inside a function that ``written`` traces."""
    with as_if_at(e.source_info, alone=True):
        (result,) = bind(e.primitive, {**e.params, **params}, operands)
    return result


def substituted(e: Equation, others: Mapping[Any, Any], **changes: Any) -> Equation:
    """An equation with other values in place of some; the same object if nothing changes."""
    inputs, outputs = (tuple(others.get(x, x) for x in values) for values in (e.inputs, e.outputs))
    is_same = (inputs, outputs) == (e.inputs, e.outputs) and not changes
    return e if is_same else with_edges(e, inputs=inputs, outputs=outputs, **changes)
