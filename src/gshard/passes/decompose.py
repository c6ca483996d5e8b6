"""Decompose: equations that are otherwise a program where what they read or make is split.

A loop over a dimension that is split is an operator whose rounds are split, if they need nothing of each other
(``tracing.own_rounds``). A transform of several dimensions is one after the other (``tracing.transforms``). A product
with a table that is nearly all zeros reads a halo (``tracing.bands``).
Which they are is known once marks have been propagated; then the program is changed, and propagated again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping, Sequence

from gshard.core.mesh import Atoms, Mesh
from gshard.core.program import Block, Equation, Program, Value
from gshard.language.region import with_edges
from gshard.passes.trace import equations_of
from gshard.tracing.bands import products
from gshard.tracing.own_rounds import rule_of_rounds
from gshard.tracing.transforms import is_transform, one_by_one
from gshard.tracing.unread import without_unread

Dims = Mapping[Value, Sequence[Atoms]]


class Decompositions:
    """What of a program may be taken apart."""

    def __init__(self, program: Program):
        self.program = program
        every = list(program.block.walk())
        self.loops = [(edge, e) for e in every for edge in e.edges if edge.stacked]
        self.transforms = [e for e in every if is_transform(e)]
        self.products = products(program)

    def taken(self, dims: Dims, mesh: Mesh) -> Program | None:
        """The program that it is where values are split so; None if it is as it is."""
        instead: dict[Equation, tuple[Equation, ...]] = {}
        for edge, loop in self.loops:
            inside = (v for body in loop.blocks for v in body.values())
            if dims[edge.outer][0] and not any(any(dims[v]) for v in inside) and (rule := rule_of_rounds(loop)):
                instead[loop] = (dataclasses.replace(loop, rule=rule, blocks=(), edges=()),)
        new = 1 + max((v.index for v in self.program.block.values()), default=0)
        for e in self.transforms:
            arrays = [dims[v] for v in (*e.inputs, *e.outputs) if isinstance(v, Value)]
            parts = [{d: mesh.count(atoms) for d, atoms in enumerate(cut) if atoms} for cut in arrays]
            if (made := one_by_one(e, parts)) is not None:
                instead[e] = equations_of(made, e, new)
                new += len(instead[e])
        tables: set[Equation] = set()
        for product in self.products:
            atoms, e = dims[product.array][product.dim], product.equation
            if atoms and (made := product.in_parts(mesh.count(atoms))) is not None:
                alone = dataclasses.replace(e, inputs=(product.array,))
                instead[e] = equations_of(made, alone, new)
                new += len(instead[e])
                tables.update(product.made)
        return with_others(self.program, instead, tables) if instead else None


def with_others(
    program: Program, instead: Mapping[Equation, Sequence[Equation]], needless: Container[Equation] = ()
) -> Program:
    """The program in which other equations stand for some; of those that are needless then, what is read stays."""

    def changed(block: Block) -> Block:
        if not any(e in instead for e in block.walk()):
            return block
        equations = (q for e in block.equations for q in made(e))
        return Block(
            block.inputs, tuple(without_unread(equations, block.outputs, needless.__contains__)), block.outputs
        )

    def made(e: Equation) -> Sequence[Equation]:
        if e in instead:
            return instead[e]
        blocks = tuple(map(changed, e.blocks))
        return (e if blocks == e.blocks else with_edges(dataclasses.replace(e, blocks=blocks)),)

    return dataclasses.replace(program, block=changed(program.block))
