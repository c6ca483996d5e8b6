"""Idle: devices to which a plan gives no work of their own.

An axis that splits nothing makes copies: its devices compute the same. A dimension with fewer elements than parts
leaves devices without any.
"""

from __future__ import annotations

from collections.abc import Iterator

from gshard.core.mesh import Atoms
from gshard.core.plan import Plan
from gshard.core.program import Value
from gshard.naming.array_names import ArrayNames


def idle_devices(plan: Plan, names: ArrayNames) -> tuple[str, ...]:
    """A line for each axis whose devices repeat each other's work, and for each argument with too few elements."""
    mesh = plan.mesh
    if mesh.size == 1 or any(e.rule is not None and not e.rule.is_free for e in plan.program.block.walk()):
        return ()  # parts that are written for several devices split as they say
    used = _used(plan)
    if not used:
        first = mesh.axes[0][0]
        return (
            f"no array is split: each of the {mesh.size} devices computes the whole program; split(x, 0, {first!r}) of "
            "a batch would make it data parallel",
        )
    return (*_unused_axes(plan, used), *_too_few(plan, names))


def _used(plan: Plan) -> set[str]:
    """The atoms that split an array, a sum or an equation."""
    cut = {a for s in plan.shardings.values() for atoms in s.dims for a in atoms}
    cut |= {a for s in plan.shardings.values() for a, _ in s.unreduced}
    return cut | {a for split in plan.splits.values() for atoms in split.values() for a in atoms}


def _unused_axes(plan: Plan, used: set[str]) -> Iterator[str]:
    mesh = plan.mesh
    for axis, size in mesh.axes:
        copies = mesh.count([a for a in mesh.atoms_of[axis] if a not in used])
        if copies == size > 1:
            yield f"axis {axis!r} splits no array: its {size} devices repeat the same work"
        elif copies > 1:
            parts = size // copies
            yield f"axis {axis!r} splits arrays into {parts} parts of {size}: {copies} devices repeat the same work"


def _too_few(plan: Plan, names: ArrayNames) -> Iterator[str]:
    mesh, told = plan.mesh, set[tuple[int, Atoms]]()
    for v in plan.program.block.inputs:
        for d, (n, atoms) in enumerate(zip(v.shape, plan.sharding(v).dims, strict=True)):
            if n < mesh.count(atoms) and (n, atoms) not in told:
                told.add((n, atoms))
                yield _shortage(v, d, n, atoms, plan, names)


def _shortage(v: Value, d: int, n: int, atoms: Atoms, plan: Plan, names: ArrayNames) -> str:
    parts, over = plan.mesh.count(atoms), plan.mesh.format_atoms(atoms)
    elements = f"{n} element{'s' * (n != 1)}"
    what = f"dimension {d} of {names.array(v).alike} has {elements}, and is split over {over} ({parts} parts)"
    return f"{what}: {parts - n} of {parts} devices have none of it"
