"""Alternates propagation and the rewrites that depend on shardings and on the mesh until nothing changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from gshard.core.errors import RuleError
from gshard.core.jax_adapter import no_mesh_set
from gshard.core.mesh import Atoms, Mesh
from gshard.core.phases import log_stage
from gshard.core.program import Block, Equation, Fired, Program, Value
from gshard.core.rule import Rule
from gshard.core.sharding import Sharding
from gshard.planning.pipelined import pipelined
from gshard.planning.propagated import Propagated, propagated_from
from gshard.rewrite.driver import Split, run_where_split
from gshard.rewrite.equation_graph import with_others
from gshard.rewrite.rewrites import SPLIT
from gshard.tracing.builder import Builder
from gshard.tracing.permitted import permitted

# Rewrites equations whose arrays are split (``rewrite.rewrites.SPLIT``).

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
        split = Split(lambda v, d: mesh.count(dims[v][d]), Builder.after(self.program.block))
        others, fired = run_where_split(self.rows, split)
        return (_with_instead(self.program, others), (*self.program.fired, *fired)) if others else None


def _with_instead(program: Program, instead: Mapping[Equation, Sequence[Equation]]) -> Block:
    return permitted(with_others(program.block, instead.get, clean=True), finite=program.finite)


# Resolves the rules of a program that depend on the mesh (``Rule.on_mesh``).


def on_mesh(program: Program, mesh: Mesh) -> Program:
    """The program with its rules on a mesh of several devices. Equal meshes give the same object."""
    dependent = [e for e in program.block.walk() if e.rule is not None and e.rule.on_mesh is not None]
    if not dependent or mesh.size == 1:
        return program

    def resolved_block() -> Block:
        return _with_instead(program, {e: (dataclasses.replace(e, rule=_rule(e, mesh)),) for e in dependent})

    return dataclasses.replace(program, block=program.decomposed.get((program.block, mesh), resolved_block))


def _rule(e: Equation, mesh: Mesh) -> Rule:
    assert e.operator_rule.on_mesh is not None
    try:
        rule: Rule = e.operator_rule.on_mesh(mesh)
    except RuleError as error:
        if error.where:
            raise
        raise RuleError(error.what, e.line, error.got, error.hint) from error
    return rule


def settled(program: Program, mesh: Mesh) -> Propagated:
    """Settles a program: the program to plan (``Propagated.program``) and the shardings that follow from its marks.

    A settled program is a fixed point: ``settled(found.program, mesh).program is found.program``.
    """
    program = pipelined(program, mesh)
    while True:
        program = on_mesh(program, mesh)
        propagated = propagated_from(program, mesh)
        log_stage("propagate", program.name, propagated)
        rewritten = rewritten_where_split(program, mesh, propagated.shardings, propagated.supposed)
        if rewritten is program:
            return propagated
        log_stage("rewrite where split", program.name, rewritten)
        program = rewritten
