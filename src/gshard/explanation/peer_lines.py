"""Peer lines: compares bytes and times of each source line under XLA's partitioner and under gshard.

    print(gshard.explain(step, params, batch, mesh=8).against_xla())

XLA is given the same marks and the same shardings of arguments. Both programs are compiled, and read in one way: bytes
and products from their text, times modelled: collectives as the network has it, products at the peak rate, and nothing
else. Where the compiler combined several collectives, all of it stands at the line of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from gshard.core.errors import MeshError
from gshard.core.memory_kinds import shape_in_memory
from gshard.core.mesh import Mesh
from gshard.core.plan import Plan
from gshard.core.spmd import SpmdProgram
from gshard.device.machine import Machine
from gshard.device.network import atoms_among, permutation_seconds, seconds
from gshard.emit.compile import compile_spmd, named_sharding
from gshard.explanation.difference import FORMAT, Difference, difference
from gshard.xla.hlo_collectives import CompiledCollective, collectives, executed
from gshard.xla.hlo_parser import read_module
from gshard.xla.kernels import operations
from gshard.xla.peer import xla_function

Lines = dict[str, list[float]]  # by place: seconds, bytes sent, FLOPs of products


def against_xla(
    plan: Plan, spmd: SpmdProgram, donated: frozenset[int], machine: Machine, data: Mapping[str, Any]
) -> Difference:
    """The difference from XLA's partitioner to ours."""
    if plan.mesh.devices is None:
        raise MeshError(
            "XLA cannot compile for an abstract mesh.",
            got=f"mesh: {plan.mesh}",
            hint="Explain for devices that exist: mesh=8, with "
            "XLA_FLAGS=--xla_force_host_platform_device_count=8 on one CPU.",
        )
    program = plan.program
    shardings = [named_sharding(plan.mesh, s, program.input_memory(i)) for i, s in enumerate(spmd.in_shardings)]
    theirs = jax.jit(xla_function(plan.program, plan.mesh), in_shardings=shardings)
    takes = [shape_in_memory(v.shape, v.dtype, on_host=v.on_host) for v in program.block.inputs]
    compiled = (theirs.lower(*takes).compile(), compile_spmd(spmd, donated).compiled)
    places = {place.rpartition("/")[2]: place for place in data["lines"]}
    sides = []
    for by, made in zip(("XLA's partitioner", "gshard"), compiled, strict=True):
        lines = _of_text(str(made.as_text()), plan.mesh, machine)
        sides.append(_side(f"{program.name} by {by}", {places.get(at, at): row for at, row in lines.items()}, data))
    return difference(*sides)


def _side(label: str, lines: Lines, data: Mapping[str, Any]) -> dict[str, Any]:
    took, sent, products = (sum(row[i] for row in lines.values()) for i in range(3))
    totals = {"seconds": took, "sent": int(sent), "flops": int(products), "peak": None}
    shown = {place: row for place, row in lines.items() if place}
    return {"format": FORMAT, "name": label, "totals": totals, "lines": shown, "files": data["files"]}


def _of_text(text: str, mesh: Mesh, machine: Machine) -> Lines:
    lines: Lines = {}
    for c in collectives(text):
        row = lines.setdefault(c.line, [0.0, 0, 0])
        row[1] += c.total_bytes
        row[0] += c.executions * _network_seconds(c, mesh, machine)
    module = read_module(text)
    for computation, made, times, _ in executed(module):
        if made.opcode == "dot":
            products, _, dtype = operations(computation, made)
            row = lines.setdefault(module.line_of(made), [0.0, 0, 0])
            row[0] += products * times / machine.rate(dtype)
            row[2] += products * times
    return lines


def _network_seconds(c: CompiledCollective, mesh: Mesh, machine: Machine) -> float:
    """Of one run; a permutation is taken as one between neighbours."""
    if not c.bytes_moved:
        return 0.0
    if c.kind == "collective_permute":
        return permutation_seconds(c.bytes_moved, [(0, 1)], machine)
    atoms = atoms_among(mesh, c.groups)
    return seconds(c.kind, c.operand_bytes, mesh, machine, mesh.atoms if atoms is None else atoms)
