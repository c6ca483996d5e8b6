"""Graph of a block: which equation produces a value, which ones read it, and how new equations are written.

Rewrites (``rewrite.driver``) look at equations through it. None builds maps of producers and readers of its own, and
none writes the parameters of JAX's primitives by hand: ``write`` traces a function.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax

from gshard.core.context import Context
from gshard.core.jax_adapter import as_if_at, bind, closed
from gshard.core.program import Constant, Equation, Value
from gshard.language.region import with_edges
from gshard.rewrite.dce import without_dead_code

Array = Value | Constant
Others = Mapping[Equation, Sequence[Equation]]
"""For equations of a block those that replace them."""


class Writer(Protocol):
    """Adds values and equations to a program (``tracing.builder``)."""

    context: Context
    """That of new equations."""

    def fresh(self, shape: tuple[int, ...], dtype: Any, weak: bool = False) -> Value:
        """A new value."""

    def equation(self, primitive: Any, params: dict[str, Any], inputs: Any, outputs: Any, source: Any) -> Equation:
        """An equation with its rule, blamed on a line of the user's."""

    def made_of(self, jaxpr: Any, consts: Any, arrays: Any, line: Any = None) -> tuple[list[Equation], list[Array]]:
        """The equations of a jaxpr on some arrays, and its results."""


class Graph:
    """The equations of a block, or of a segment of one.

    Attributes:
        equations: in order.
        outputs: the values that are read outside of these equations, as keys in order.
    """

    def __init__(self, equations: Sequence[Equation], outputs: Sequence[Array], writer: Writer):
        self.equations, self.outputs, self.writer = tuple(equations), dict.fromkeys(outputs), writer

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
        """The equation that produces an array, if it has one of these names (any, if there are none) and no mark."""
        e = self._producers.get(x)
        return e if e is not None and e.mark is None and (not names or e.name in names) else None

    def readers(self, x: Array) -> Sequence[Equation]:
        """The equations that read an array, once for each operand that it is."""
        return self._readers.get(x, ())

    def is_read_once(self, x: Array) -> bool:
        """Whether one operand of one equation is an array, and nothing outside reads it."""
        return len(self.readers(x)) == 1 and x not in self.outputs

    def add(
        self, out: list[Equation], at: Equation, primitive: Any, params: dict[str, Any], inputs: Sequence[Array],
        shape: tuple[int, ...], dtype: Any, result: Value | None = None,
    ) -> Value:  # fmt: skip
        """Appends one equation with one result, and returns the result.

        Args:
            out: the list that is appended to.
            at: the equation whose line of the user's is kept.
            primitive, params, inputs: of the new equation.
            shape, dtype: of its result.
            result: the value that it produces; a new one if there is none.
        """
        value = self.writer.fresh(shape, dtype) if result is None else result
        out.append(self.writer.equation(primitive, params, tuple(inputs), (value,), at.source_info))
        return value

    def changed(self, e: Equation, inputs: Sequence[Array], **params: Any) -> Equation:
        """An equation with other operands, and other values for some of its parameters."""
        return self.writer.equation(e.primitive, {**e.params, **params}, tuple(inputs), e.outputs, e.source_info)

    def write(
        self, function: Callable[..., Any], inputs: Sequence[Array], outputs: Sequence[Value], at: Equation
    ) -> list[Equation]:
        """The equations of a function; see `written`."""
        return written(self.writer, function, inputs, outputs, at)

    def replaced(self, others: Others) -> list[Equation]:
        """The equations with others in the place of some, without dead code."""
        return without_dead_code([q for e in self.equations for q in others.get(e, (e,))], self.outputs)


def written(
    writer: Writer, function: Callable[..., Any], inputs: Sequence[Array], outputs: Sequence[Value], at: Equation
) -> list[Equation]:
    """The equations of a function, traced by JAX.

    Args:
        writer: adds the equations to the program.
        function: takes arrays, gives a list of arrays or one.
        inputs: its operands; constants are passed as numbers.
        outputs: the values that its results become. Each is produced by an equation of its own.
        at: the equation that is replaced: the new ones are blamed on its line.
    """
    arrays = [x for x in inputs if isinstance(x, Value)]

    def of_arrays(*given: Any) -> Any:
        rest = iter(given)
        return function(*(next(rest) if isinstance(x, Value) else x.value for x in inputs))

    def traced(f: Callable[..., Any], given: Sequence[Value], names: Sequence[Array]) -> Any:
        def placed(*arrays: Any) -> Any:
            with as_if_at(at.source_info):  # inside: JAX begins a trace without named scopes
                return f(*arrays)

        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak) for x in given]
        with as_if_at(at.source_info):
            jaxpr, consts = closed(jax.make_jaxpr(placed)(*shapes))
        return writer.made_of(jaxpr, consts, names)

    writer.context = at.context
    made, results = traced(of_arrays, arrays, arrays)
    own = {v for q in made for v in q.outputs}
    names: dict[Any, Any] = {v: dataclasses.replace(v, made=True) for v in own}
    taken: set[Any] = set()
    for x, v in zip(results, outputs, strict=True):
        if x in own and x not in taken:
            taken.add(x)
            names[x] = v
            continue
        # Two results may be one after CSE, and a result may be an operand: a copy gives each a value of its own.
        copies, (copy,) = traced(jax.numpy.copy, [dataclasses.replace(v, shape=x.shape, dtype=x.dtype)], [x])
        made, names[copy] = [*made, *copies], v
    return [_renamed(q, names, at.file) for q in made]


def again(e: Equation, operands: Sequence[Any], **params: Any) -> Any:
    """The result of an equation on other operands, inside of a function that is written; it keeps its line."""
    with as_if_at(e.source_info, alone=True):
        (result,) = bind(e.primitive, {**e.params, **params}, operands)
    return result


def _renamed(e: Equation, names: Mapping[Any, Any], file: str) -> Equation:
    inputs, outputs = (tuple(names.get(x, x) for x in arrays) for arrays in (e.inputs, e.outputs))
    new = dataclasses.replace(e, inputs=inputs, outputs=outputs, file=file)
    return with_edges(new) if e.blocks else new
