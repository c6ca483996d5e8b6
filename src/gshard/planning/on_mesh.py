"""On a mesh: resolves the rules that depend on the mesh (``Rule.on_mesh``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from gshard.core.errors import RuleError
from gshard.core.mesh import Mesh
from gshard.core.program import Block, Equation, Program
from gshard.core.rule import Rule
from gshard.planning.decompose import with_others


def on_mesh(program: Program, mesh: Mesh) -> Program:
    """The program with the rules of a mesh, if that has several devices; for equal meshes the very same program.

    Raises:
        RuleError: what a user said of an operator contradicts it.
    """
    found = [e for e in program.block.walk() if e.rule is not None and e.rule.on_mesh is not None]
    if not found or mesh.size == 1:
        return program

    def made() -> Block:
        instead: dict[Equation, Sequence[Equation]] = {}
        for e in found:
            instead[e] = (dataclasses.replace(e, rule=_rule(e, mesh)),)
        return with_others(program, instead).block

    return dataclasses.replace(program, block=program.decomposed.get((program.block, mesh), made))


def _rule(e: Equation, mesh: Mesh) -> Rule:
    assert e.rule is not None
    assert e.rule.on_mesh is not None
    try:
        made: Rule = e.rule.on_mesh(mesh)
    except RuleError as error:
        if error.where:
            raise
        raise RuleError(error.what, e.line, error.got, error.hint) from error
    return made
