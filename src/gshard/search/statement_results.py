"""Finds the values that are results of a statement in the user's source, so that a mark after it marks exactly these.

A statement such as ``x = x + mlp(norm(x))`` computes many values, once for each time that it runs: in a loop over
layers, in each call of a function. Its results are the values that other code reads after the statement has ended. What
gradients read does not count, since derivatives keep intermediate values of a statement.

    h = jnp.tanh(x @ w)        # computes a product and a tanh; the tanh is its result
"""

from __future__ import annotations

import ast
from collections.abc import Collection

from gshard.core.jax_adapter import is_transposed, user_place, user_places
from gshard.core.library_files import is_of_library
from gshard.core.program import Equation, Program, Value


class StatementResults:
    """The values of a program by the lines that compute them, and what reads them."""

    def __init__(self, program: Program):
        self._producers: dict[Value, Equation] = {}
        self._readers: dict[Value, list[Equation]] = {}
        self._returned: set[Value] = set()
        self._at: dict[tuple[str, int], list[Equation]] = {}
        for block in (program.block, *(body for e in program.block.walk() for body in e.blocks)):
            self._returned.update(v for v in block.outputs if isinstance(v, Value))
            for equation in block.equations:
                if is_transposed(equation.source_info):
                    continue
                self._producers.update(dict.fromkeys(equation.outputs, equation))
                for v in equation.inputs:
                    if isinstance(v, Value):
                        self._readers.setdefault(v, []).append(equation)
                if (place := user_place(equation.source_info)) is not None:
                    self._at.setdefault(place, []).append(equation)

    def place(self, v: Value) -> tuple[str, int] | None:
        """File and line of the user's that compute a value; None for arguments, and for values of gradients."""
        producer = self._producers.get(v)
        place = None if producer is None else user_place(producer.source_info)
        return None if place is None or is_of_library(place[0]) else place

    def are_results(self, values: Collection[Value], path: str, statement: ast.stmt) -> bool:
        """Whether these values are all results of a statement, in all its runs."""
        lines = range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
        computed = [v for n in lines for e in self._at.get((path, n), ()) for v in e.outputs]
        return set(values) == {v for v in computed if self._is_read_outside(v, path, lines)}

    def _is_read_outside(self, v: Value, path: str, lines: range) -> bool:
        return v in self._returned or any(
            not any(file == path and line in lines for file, line in user_places(reader.source_info))
            for reader in self._readers.get(v, ())
        )
