"""Rewrites equations where the arrays that they read or make are split.

- A loop over a split dimension becomes an operator whose rounds are split, if they are independent
  (``tracing.own_rounds``).
- A transform of several dimensions becomes several transforms, one after the other (``tracing.transforms``).
- A product with a banded table, which is nearly all zeros, reads a halo (``tracing.bands``).
- Arrays that are joined with little, or cut a little, along a split dimension, and are reduced along it in the end, are
  computed in pieces (``tracing.closed_regions``).

These rewrites need shardings, and shardings depend on them: ``passes.settled`` alternates them with propagation.
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
from gshard.core.sharding import Sharding
from gshard.language.region import with_edges
from gshard.passes.trace import equations_of
from gshard.tracing.bands import products
from gshard.tracing.closed_regions import closed_regions, may_begin
from gshard.tracing.own_rounds import rule_of_rounds
from gshard.tracing.permitted import permitted
from gshard.tracing.transforms import is_transform, one_by_one
from gshard.tracing.unread import without_unread
from gshard.tracing.written_in_pieces import written

Dims = Mapping[Value, Sequence[Atoms]]


def rewritten_where_split(program: Program, mesh: Mesh, *known: Mapping[Value, Sharding]) -> Program:
    """A program in which equations are rewritten where values are split; the very same one if none is.

    Args:
        program: the program.
        mesh: the devices.
        known: shardings of all values. The first of these mappings under which an equation is rewritten decides.
    """
    rewrites = _Rewrites(program)
    made = (rewrites.program_for(shardings, mesh) for shardings in known) if rewrites.has_any else iter(())
    return next((other for other in made if other is not None), program)


class _Rewrites:
    """The equations of a program that may be rewritten."""

    def __init__(self, program: Program):
        self.program = program
        every = list(program.block.walk())
        self.loops = [(edge, e) for e in every for edge in e.edges if edge.stacked]
        self.transforms = [e for e in every if is_transform(e)]
        self.blocks = [b for b in _blocks(program.block) if any(map(may_begin, b.equations))]
        self.products = products(program)

    @property
    def has_any(self) -> bool:
        """Whether there are such equations."""
        return bool(self.loops or self.transforms or self.blocks or self.products)

    def program_for(self, shardings: Mapping[Value, Sharding], mesh: Mesh) -> Program | None:
        """The rewritten program where values are split so; None if nothing is rewritten.

        Where values are in as many parts as before, it has the very same block: values are compared by identity.
        """
        block, dims = self.program.block, {v: s.dims for v, s in shardings.items()}
        parts = tuple(tuple(map(mesh.count, dims[v])) for v in block.values())
        made = self.program.decomposed.get((block, parts), lambda: self._block_for(dims, mesh))
        return None if made is None else dataclasses.replace(self.program, block=made)

    def _block_for(self, dims: Dims, mesh: Mesh) -> Block | None:
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
            block.inputs, tuple(without_unread(equations, block.outputs, needless.__contains__)), block.outputs
        )

    def made(e: Equation) -> Sequence[Equation]:
        if e in instead:
            return instead[e]
        blocks = tuple(map(changed, e.blocks))
        return (e if blocks == e.blocks else with_edges(dataclasses.replace(e, blocks=blocks)),)

    return dataclasses.replace(program, block=permitted(changed(program.block), finite=program.finite))
