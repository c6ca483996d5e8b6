"""Peer lines: compares bytes and times of each source line under XLA's partitioner and under gshard.

    print(gshard.explain(step, params, batch, mesh=8).against_xla())

XLA is given the same marks and the same shardings of arguments. Both programs are compiled, and read in one way: bytes
and products from their text, times modelled: collectives as the network has it, products at the peak rate, and nothing
else. Where the compiler combined several collectives, all of it stands at the line of one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from gshard.core.errors import MeshError
from gshard.core.memory_kinds import shape_in_memory
from gshard.core.mesh import Atoms, Mesh
from gshard.core.plan import Plan
from gshard.core.spmd import SpmdProgram
from gshard.device.machine import Machine
from gshard.device.network import members, permutation_seconds, seconds
from gshard.emit.compile import compile_spmd, named_sharding
from gshard.explanation.difference import FORMAT, Difference, difference
from gshard.xla.hlo_collectives import collectives, executed, line_of
from gshard.xla.hlo_parser import read_module
from gshard.xla.peer import xla_function

Lines = dict[str, list[float]]  # by place: seconds, bytes sent, FLOPs of products


def against_xla(
    plan: Plan, spmd: SpmdProgram, donated: frozenset[int], machine: Machine, data: Mapping[str, Any]
) -> Difference:
    """The difference from XLA's partitioner to ours.

    Args:
        plan, spmd: ours, for devices that exist.
        donated: arguments whose memory results may take.
        machine: what times are modelled on.
        data: ours as data, for its places in the source.

    Raises:
        MeshError: the mesh is abstract, so that XLA cannot compile for it.
    """
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
        row[0] += c.executions * _network_seconds(c.kind, c.operand_bytes, c.bytes_moved, c.group, mesh, machine)
    for line, dtype, products in _products(text):
        row = lines.setdefault(line, [0.0, 0, 0])
        row[0] += products / machine.rate(dtype)
        row[2] += products
    return lines


def _network_seconds(kind: str, operand: int, sent: int, group: tuple[int, ...], mesh: Mesh, machine: Machine) -> float:
    """Of one run; a permutation is taken as one between neighbours."""
    if not sent:
        return 0.0
    if kind == "collective_permute":
        return permutation_seconds(sent, [(0, 1)], machine)
    return seconds(kind, operand, mesh, machine, _atoms_of(group, mesh))


def _atoms_of(group: tuple[int, ...], mesh: Mesh) -> Atoms:
    """The atoms over which a group runs; all of them if it is no group over atoms."""
    stride, found = mesh.size, []
    for atom, size in mesh.atom_sizes.items():
        stride //= size
        found += [atom] if stride in group else []
    return tuple(found) if members(mesh, tuple(found)) == group else mesh.atoms


def _products(text: str) -> Iterator[tuple[str, str, int]]:
    """The line, dtype and operations of every product that a device runs, in all its runs."""
    module = read_module(text)
    for computation, made, times, _ in executed(module):
        if made.opcode == "dot":
            dtype, result = _array(made.type)
            _, operand = _array(computation.instructions[made.operands[0]].type)
            over = re.search(r"\blhs_contracting_dims=\{([\d,]*)\}", made.attributes)
            contracted = [operand[int(d)] for d in over[1].split(",") if d] if over else []
            yield line_of(made, module.frames), dtype, 2 * times * math.prod(result) * math.prod(contracted)


def _array(text: str) -> tuple[str, list[int]]:
    found = re.search(r"\b([a-z]+\d*)[a-z0-9]*\[([\d,]*)\]", text)
    return ("f32", []) if found is None else (found[1], [int(n) for n in found[2].split(",") if n])
