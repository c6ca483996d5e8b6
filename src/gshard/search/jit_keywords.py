"""Writes the keywords of ``gshard.jit`` that run a searched plan from marks: the mesh, the machine, the memory limit.

mesh={"data": 2, "model": 4}, machine="h100:1x8", donate_argnames=("state",)
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

from gshard.core.mesh import Mesh
from gshard.device.hardware import machine_to_plan_for
from gshard.device.machine import Machine, MachineError
from gshard.search.priced import PricedPlan


def jit_keywords(
    mesh: Mesh, priced: PricedPlan, limit: float, paths: Sequence[str], donated: Collection[int]
) -> dict[str, str]:
    """The keywords by name, as source text, without those that are the default."""
    machine = priced.cost.machine
    keywords = {"mesh": json.dumps(dict(mesh.axes), ensure_ascii=False)}
    if machine != machine_to_plan_for(mesh) and _reads_as(machine):
        keywords["machine"] = json.dumps(machine.name)
    if limit != machine.memory or priced.recomputed:
        keywords["memory_limit"] = str(int(limit))
    parameters: dict[str, list[bool]] = {}
    for i, path in enumerate(paths):
        parameters.setdefault(path.partition("/")[0], []).append(i in donated)
    names = [json.dumps(name) for name, given in parameters.items() if all(given) and name.isidentifier()]
    if names:
        keywords["donate_argnames"] = f"({', '.join(names)},)" if len(names) == 1 else f"({', '.join(names)})"
    return keywords


def _reads_as(machine: Machine) -> bool:
    """Whether the name of a machine is all that ``Machine.of`` needs to make it."""
    try:
        return Machine.of(machine.name, machine.size) == machine
    except MachineError:
        return False
