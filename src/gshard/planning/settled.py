"""Alternates propagation and the rewrites that depend on shardings until neither changes anything.

    program, mesh ──▶ pipelines ──▶ rules of the mesh ──▶ propagate ⇄ rewrite where split ──▶ Propagated

Propagation (``planning.propagated``) does not change a program. Rewrites (``planning.decompose``) read the propagated
shardings: a loop over a dimension becomes an operator only where that dimension is split. gshard propagates a rewritten
program again, because its equations pass other shardings on. The loop ends, because every rewrite removes an equation
that could be rewritten.
"""

from __future__ import annotations

from gshard.core.mesh import Mesh
from gshard.core.phases import log_stage
from gshard.core.program import Program
from gshard.planning.decompose import rewritten_where_split
from gshard.planning.on_mesh import on_mesh
from gshard.planning.pipelined import pipelined
from gshard.planning.propagated import Propagated, propagated_from


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
