"""Computes a closed region (``rewrite.piecewise_region``) in pieces.

y = concatenate(cls, x)                      (nothing)
s = y @ q                                    s0 = cls @ q; s1 = x @ q
m = max(s)                                   m = max(max(s0), max(s1))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from gshard.core.program import Block, Constant, Equation, Program, Value
from gshard.rewrite.driver import Split, where_split
from gshard.rewrite.equation_graph import Array, Others, Writer, written
from gshard.rewrite.piecewise_equation import Touch, brought, in_pieces, joined, moved
from gshard.rewrite.piecewise_layout import is_whole
from gshard.rewrite.piecewise_region import Moves, Region, closed_regions, may_begin


def _blocks(program: Program) -> list[Block]:
    every = [program.block, *(block for e in program.block.walk() for block in e.blocks)]
    return [block for block in every if any(map(may_begin, block.equations))]


@where_split(_blocks)
def piecewise(block: Block, split: Split) -> Iterator[Others]:
    """Replaces equations on arrays that are joined or cut along a split dimension by equations on pieces."""
    for region in closed_regions(block, split.parts):
        emitter = _Emitter(region, split.writer)
        yield {e: emitter.instead_of(e) for e in block.equations if e in region.equations}


class _Emitter:
    """Creates the equations that compute a region in pieces."""

    def __init__(self, region: Region, writer: Writer):
        self.region, self.writer = region, writer
        self.pieces: dict[Array, list[Value]] = {}

    def instead_of(self, e: Equation) -> list[Equation]:
        """The equations that replace an equation of the region."""
        out: list[Equation] = []
        for x in dict.fromkeys(e.inputs):
            if x in self.region.brought and x not in self.pieces:
                self.pieces[x] = self.new(x)
                out += self.bring(x, e)
        if any(v in self.region.kept for v in e.outputs):
            out.append(e)
        treatment = self.region.equations[e]
        out += self.moved(e, treatment) if isinstance(treatment, Moves) else self.computed(e, treatment)
        return out + [q for v in e.outputs if v in self.region.joined for q in self.join(v, e)]

    def new(self, x: Array) -> list[Value]:
        """New values for the pieces of an array."""
        dim = self.region.dims[x]
        return [self.piece(x, dim, p.size) for p in self.region.layouts[x]]

    def piece(self, x: Array, dim: int, size: int) -> Value:
        """A new value for a piece of an array, with a frame of ``size`` elements."""
        weak = isinstance(x, Value) and x.weak
        return self.writer.fresh((*x.shape[:dim], size, *x.shape[dim + 1 :]), x.dtype, weak)

    def bring(self, x: Array, e: Equation) -> Sequence[Equation]:
        """The equations that cut an array from outside of the region into pieces."""
        dim, layout = self.region.dims[x], self.region.layouts[x]
        if isinstance(x, Value):
            return written(self.writer, lambda array: brought(array, dim, layout), [x], self.pieces[x], e)
        array = x.value
        return written(self.writer, lambda: brought(jnp.asarray(array), dim, layout), [], self.pieces[x], e)

    def join(self, v: Value, e: Equation) -> Sequence[Equation]:
        """The equations that join the pieces of a result."""
        dim, layout = self.region.dims[v], self.region.layouts[v]
        return written(self.writer, lambda *parts: [joined(parts, dim, layout)], self.pieces[v], [v], e)

    def computed(self, e: Equation, t: Touch) -> list[Equation]:
        """The equations that compute an equation in pieces."""
        layout = next(self.region.layouts[x] for x, d in _touched(e, t) if d is not None)
        results: list[Value] = []
        for v, d in zip(e.outputs, t.results, strict=True):
            if d is None:
                results.append(v)
                continue
            self.pieces[v] = self.new(v)
            results += self.pieces[v]
        return self.run(in_pieces(t, layout), e, [d is not None for d in t.operands], results)

    def moved(self, e: Equation, moves: Moves) -> list[Equation]:
        """The equations that compute new pieces of an equation that moves elements. Unchanged pieces are reused."""
        new_pieces: list[tuple[Value, Any]] = []
        are_arrays = [bool(x.shape) for x in e.inputs]
        whole_arrays = [
            x for x, is_array in zip(e.inputs, are_arrays, strict=True) if is_array and x not in self.pieces
        ]
        for v, sources in zip(e.outputs, moves.sources, strict=True):
            if is_whole(tuple(s.piece for s in sources)):
                new_pieces.append((v, sources[0]))
                continue
            self.pieces[v] = []
            for s in sources:
                x = e.inputs[s.operand]
                if s.is_as_it_was and not e.params.get("added") and isinstance(x, Value):
                    self.pieces[v].append(x if x in whole_arrays else self.pieces[x][s.part or 0])
                    continue
                self.pieces[v].append(self.piece(v, moves.dim, s.piece.size))
                new_pieces.append((self.pieces[v][-1], s))
        if not new_pieces:
            return []

        def function(operands: Sequence[Any]) -> list[Any]:
            lists = [
                [x] if is_array and not isinstance(x, list) else x
                for x, is_array in zip(operands, are_arrays, strict=True)
            ]
            return [moved(e, moves.dim, s, lists) for _, s in new_pieces]

        return self.run(function, e, [x in self.pieces for x in e.inputs], [v for v, _ in new_pieces])

    def run(
        self,
        function: Callable[[Sequence[Any]], list[Any]],
        e: Equation,
        are_in_pieces: Sequence[bool],
        results: Sequence[Value],
    ) -> list[Equation]:
        """The equations of a function of the operands of an equation."""
        inputs: list[Value] = []
        for x, in_pieces_ in zip(e.inputs, are_in_pieces, strict=True):
            if in_pieces_:
                inputs += self.pieces[x]
            elif isinstance(x, Value):
                inputs.append(x)

        def flat(*arrays: Any) -> list[Any]:
            remaining = iter(arrays)
            operands: list[Any] = []
            for x, in_pieces_ in zip(e.inputs, are_in_pieces, strict=True):
                if in_pieces_:
                    operands.append([next(remaining) for _ in self.pieces[x]])
                else:
                    operands.append(x.value if isinstance(x, Constant) else next(remaining))
            flat_results: list[Any] = []
            for result in function(operands):
                flat_results += result if isinstance(result, list) else [result]
            return flat_results

        return written(self.writer, flat, inputs, results, e)


def _touched(e: Equation, t: Touch) -> list[tuple[Array, int | None]]:
    return [*zip(e.inputs, t.operands, strict=True), *zip(e.outputs, t.results, strict=True)]
