"""Resolves the rules of a program that depend on the mesh (``Rule.on_mesh``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from gshard.core.errors import RuleError
from gshard.core.mesh import Mesh
from gshard.core.program import Block, Equation, Program
from gshard.core.rule import Rule
from gshard.planning.decompose import with_others


def on_mesh(program: Program, mesh: Mesh) -> Program:
    """The program with its rules on a mesh of several devices. Equal meshes give the same object."""
    dependent = [e for e in program.block.walk() if e.rule is not None and e.rule.on_mesh is not None]
    if not dependent or mesh.size == 1:
        return program

    def resolved_block() -> Block:
        instead: dict[Equation, Sequence[Equation]] = {}
        for e in dependent:
            instead[e] = (dataclasses.replace(e, rule=_rule(e, mesh)),)
        return with_others(program, instead).block

    return dataclasses.replace(program, block=program.decomposed.get((program.block, mesh), resolved_block))


def _rule(e: Equation, mesh: Mesh) -> Rule:
    assert e.rule is not None
    assert e.rule.on_mesh is not None
    try:
        rule: Rule = e.rule.on_mesh(mesh)
    except RuleError as error:
        if error.where:
            raise
        raise RuleError(error.what, e.line, error.got, error.hint) from error
    return rule
