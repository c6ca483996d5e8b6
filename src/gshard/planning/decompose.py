"""Rewrites equations whose arrays are split (``rewrite.rewrites.SPLIT``).

A scan over a split dimension runs each iteration where its slices are. A transform of several dimensions becomes one
transform for each. A product with a banded table reads a halo. Arrays that are joined or cut a little are computed in
pieces.

These rewrites depend on shardings, and shardings depend on them: ``planning.settled`` alternates them with propagation.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

from gshard.core.fired import Fired
from gshard.core.jax_adapter import no_mesh_set
from gshard.core.mesh import Atoms, Mesh
from gshard.core.program import Block, Equation, Program, Value
from gshard.core.sharding import Sharding
from gshard.language.region import with_edges
from gshard.rewrite.dce import without_dead_code
from gshard.rewrite.driver import Split, run_where_split
from gshard.rewrite.rewrites import SPLIT
from gshard.tracing.builder import Builder
from gshard.tracing.permitted import permitted

Dims = Mapping[Value, Sequence[Atoms]]


def rewritten_where_split(program: Program, mesh: Mesh, *known: Mapping[Value, Sharding]) -> Program:
    """The program with equations rewritten for these shardings; the same object if nothing is rewritten."""
    rewrites = _Rewrites(program)
    programs = (rewrites.program_for(shardings, mesh) for shardings in known) if rewrites.rows else iter(())
    return next((rewritten for rewritten in programs if rewritten is not None), program)


class _Rewrites:
    """The equations of a program that may be rewritten."""

    def __init__(self, program: Program):
        self.program = program
        self.rows = {row: found for row in SPLIT if (found := row.candidates(program))}

    def program_for(self, shardings: Mapping[Value, Sharding], mesh: Mesh) -> Program | None:
        """The rewritten program under these shardings; None if nothing is rewritten.

        If values have as many parts as before, the result has the same block object: values are compared by identity.
        """
        block, dims = self.program.block, {v: s.dims for v, s in shardings.items()}
        parts = tuple(tuple(map(mesh.count, dims[v])) for v in block.values())
        rewritten = self.program.decomposed.get((block, parts), lambda: self._rewritten(dims, mesh))
        return None if rewritten is None else dataclasses.replace(self.program, block=rewritten[0], fired=rewritten[1])

    @no_mesh_set()
    def _rewritten(self, dims: Dims, mesh: Mesh) -> tuple[Block, tuple[Fired, ...]] | None:
        counter = itertools.count(1 + max((v.index for v in self.program.block.values()), default=0))
        split = Split(lambda v, d: mesh.count(dims[v][d]), Builder(counter))
        others, fired = run_where_split(self.rows, split)
        return (with_others(self.program, others).block, (*self.program.fired, *fired)) if others else None


def with_others(program: Program, instead: Mapping[Equation, Sequence[Equation]]) -> Program:
    """The program with some equations replaced, without dead code."""

    def changed(block: Block) -> Block:
        if not any(e in instead for e in block.walk()):
            return block
        equations = (q for e in block.equations for q in replaced(e))
        return Block(block.inputs, tuple(without_dead_code(equations, block.outputs)), block.outputs)

    def replaced(e: Equation) -> Sequence[Equation]:
        if e in instead:
            return instead[e]
        blocks = tuple(map(changed, e.blocks))
        return (e if blocks == e.blocks else with_edges(dataclasses.replace(e, blocks=blocks)),)

    return dataclasses.replace(program, block=permitted(changed(program.block), finite=program.finite))
