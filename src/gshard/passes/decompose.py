"""Decompose: equations that are otherwise a program where what they read or make is split.

A loop over a dimension that is split is an operator whose rounds are split, if they need nothing of each other
(``rewrite.shard_scan``). A transform of several dimensions is one after the other (``rewrite.fft_by_dimension``).
A product with a table that is nearly all zeros reads a halo (``rewrite.banded_product``). What is computed of arrays
that are joined with little, or cut a little, where they are split, and in the end reduced, is computed in pieces
(``rewrite.piecewise_region``).
Which they are is known once marks have been propagated; then the program is changed, and propagated again.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import jax

from gshard.core.jax_adapter import as_if_at
from gshard.core.mesh import Atoms, Mesh
from gshard.core.program import Block, Constant, Equation, Program, Value
from gshard.language.region import with_edges
from gshard.passes.trace import equations_of
from gshard.rewrite.banded_product import products
from gshard.rewrite.dce import without_dead_code
from gshard.rewrite.fft_by_dimension import is_transform, one_by_one
from gshard.rewrite.piecewise_emit import written
from gshard.rewrite.piecewise_region import closed_regions, may_begin
from gshard.rewrite.shard_scan import rule_of_rounds
from gshard.tracing.permitted import permitted

Dims = Mapping[Value, Sequence[Atoms]]


class Decompositions:
    """What of a program may be taken apart."""

    def __init__(self, program: Program):
        self.program = program
        every = list(program.block.walk())
        self.loops = [(edge, e) for e in every for edge in e.edges if edge.stacked]
        self.transforms = [e for e in every if is_transform(e)]
        self.blocks = [b for b in _blocks(program.block) if any(map(may_begin, b.equations))]
        self.products = products(program)

    def taken(self, dims: Dims, mesh: Mesh) -> Program | None:
        """The program that it is where values are split so; None if it is as it is.

        Where values are in as many parts as before, it is the very same program: its values are compared by identity.
        """
        if not (self.loops or self.transforms or self.blocks or self.products):
            return None
        block = self.program.block
        parts = tuple(tuple(map(mesh.count, dims[v])) for v in block.values())
        made = self.program.decomposed.get((block, parts), lambda: self._taken(dims, mesh))
        return None if made is None else dataclasses.replace(self.program, block=made)

    def _taken(self, dims: Dims, mesh: Mesh) -> Block | None:
        instead: dict[Equation, Sequence[Equation]] = {}
        for edge, loop in self.loops:
            inside = (v for body in loop.blocks for v in body.values())
            if dims[edge.outer][0] and not any(any(dims[v]) for v in inside) and (rule := rule_of_rounds(loop)):
                instead[loop] = (dataclasses.replace(loop, rule=rule, blocks=(), edges=()),)
        writer = _Writer(self.program)
        for e in self.transforms:
            arrays = [dims[v] for v in (*e.inputs, *e.outputs) if isinstance(v, Value)]
            parts = [{d: mesh.count(atoms) for d, atoms in enumerate(cut) if atoms} for cut in arrays]
            if (made := one_by_one(e, parts)) is not None:
                instead[e] = writer.equations(made, e)
        tables: set[Equation] = set()
        for product in self.products:
            atoms, e = dims[product.array][product.dim], product.equation
            if atoms and (made := product.in_parts(mesh.count(atoms))) is not None:
                instead[e] = writer.equations(made, dataclasses.replace(e, inputs=(product.array,)))
                tables.update(product.made)
        for block in self.blocks:
            for region in closed_regions(block, lambda v, d: mesh.count(dims[v][d])):
                if instead.keys().isdisjoint(region.equations):
                    instead |= written(region, block, writer.fresh, writer.write)
        return with_others(self.program, instead, tables).block if instead else None


@dataclasses.dataclass
class _Writer:
    """Writes equations into a program, with new values."""

    program: Program

    @functools.cached_property
    def counter(self) -> Iterator[int]:
        return itertools.count(1 + max((v.index for v in self.program.block.values()), default=0))

    def fresh(self, like: Value | Constant, shape: tuple[int, ...]) -> Value:
        """A new value like another one, of a shape."""
        weak = isinstance(like, Value) and like.weak
        return Value(shape, like.dtype, next(self.counter), weak, made=True)

    def equations(self, made: Any, e: Equation) -> tuple[Equation, ...]:
        """The equations of a closed jaxpr that stands for an equation."""
        return equations_of(made, e, self.counter)

    def write(
        self, function: Callable[..., Any], e: Equation, inputs: Sequence[Value], outputs: Sequence[Value]
    ) -> tuple[Equation, ...]:
        """The equations of a function of some values, in the place of an equation."""
        given = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak) for x in inputs]
        with as_if_at(e.source_info):
            made = jax.make_jaxpr(function)(*given)
        return self.equations(made, dataclasses.replace(e, inputs=tuple(inputs), outputs=tuple(outputs)))


def _blocks(block: Block) -> Iterator[Block]:
    yield block
    for e in block.equations:
        for inner in e.blocks:
            yield from _blocks(inner)


def with_others(
    program: Program, instead: Mapping[Equation, Sequence[Equation]], needless: Container[Equation] = ()
) -> Program:
    """The program in which other equations stand for some; of those that are needless then, what is read stays."""

    def changed(block: Block) -> Block:
        if not any(e in instead for e in block.walk()):
            return block
        equations = (q for e in block.equations for q in made(e))
        return Block(
            block.inputs, tuple(without_dead_code(equations, block.outputs, needless.__contains__)), block.outputs
        )

    def made(e: Equation) -> Sequence[Equation]:
        if e in instead:
            return instead[e]
        blocks = tuple(map(changed, e.blocks))
        return (e if blocks == e.blocks else with_edges(dataclasses.replace(e, blocks=blocks)),)

    return dataclasses.replace(program, block=permitted(changed(program.block), finite=program.finite))
