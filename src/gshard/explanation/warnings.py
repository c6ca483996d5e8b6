"""Warnings about a plan: idle devices, repeated work, results that JAX cannot hold, marks without effect."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from gshard.comm.reshard import reshard_bytes
from gshard.comm.shards import sent_inside
from gshard.core.errors import known_names, warn_once
from gshard.core.jax_adapter import user_line
from gshard.core.mark import Mark
from gshard.core.mesh import Atoms, Mesh
from gshard.core.plan import Plan, local_bytes
from gshard.core.program import Equation, Program, Value, format_bytes
from gshard.core.rule import Split, operand_sharding, parts, result_sharding
from gshard.core.sharding import Sharding, cut_evenly
from gshard.device.fusion_model import is_product
from gshard.naming.array_names import ArrayNames
from gshard.planning.propagated import Arrays, arrays_of, candidates

# Idle: devices to which a plan gives no work of their own.


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
            parts = mesh.count(atoms)
            if n < parts and (n, atoms) not in told:
                told.add((n, atoms))
                has = f"dimension {d} of {names.array(v).alike} has {n} element{'s' * (n != 1)}"
                split = f"is split over {mesh.format_atoms(atoms)} ({parts} parts)"
                yield f"{has}, and {split}: {parts - n} of {parts} devices have none of it"


# Returned: the results that JAX cannot hold in the shards that the plan gives them.


def returned_in_fewer_shards(plan: Plan, names: ArrayNames | None = None) -> tuple[str, ...]:
    """A line for each such result: its sharding inside and as returned, the bytes on a device, and what avoids it."""
    mesh, block, found = plan.mesh, plan.program.block, dict[str, None]()
    for i, (v, leave) in enumerate(zip(block.outputs, plan.leave, strict=True)):
        if not isinstance(v, Value):
            continue
        inside = Sharding(plan.sharding(v).dims)
        is_even = cut_evenly(inside, v.shape, mesh) == inside
        if leave == inside or (is_even and mesh.spec_of(inside.dims) is not None):
            continue
        if mesh.count(leave.atoms) >= mesh.count(inside.atoms):
            continue
        names = names or ArrayNames(plan.program)
        what = names.array(v).alike or f"result {i}"
        shown = [s.format(mesh, v.shape, v.dtype_name) for s in (inside, leave)]
        sizes = [format_bytes(local_bytes(v, s, mesh)) for s in (inside, leave)]
        way = "make this part of the axis an axis of the mesh" if is_even else "pad the array to a size that divides"
        text = f"{what}: {shown[0]} inside ({sizes[0]} a device), {shown[1]} returned ({sizes[1]}); to keep the shards"
        found[f"{text}, {way}"] = None
    return tuple(found)


# Replicated work: products that every device repeats although an operand is split.


def replicated_work(plan: Plan) -> Iterator[str]:
    """A line for each product that could run in more parts, as its operands are split, in program order.

    It tells how often every device computes a device's share, and the bytes that splitting this product alone would
    send more.
    """
    mesh = plan.mesh
    for e in plan.program.block.walk():
        split = plan.splits.get(e)
        if e.rule is None or split is None or not is_product(e.rule) or not e.rule.is_free:
            continue
        used = {a for atoms in split.values() for a in atoms}
        operands = [v for v in e.inputs if isinstance(v, Value)]
        lost = [(v, atoms) for v in operands for atoms in plan.shardings[v].dims if atoms and not used & set(atoms)]
        if not lost:
            continue
        (v, atoms), *_ = lost
        arrays = arrays_of(e, plan.shardings)
        if wider := [s for s in candidates(e.rule, arrays, mesh) if parts(s, mesh) > parts(split, mesh)]:
            more, best = min(((sent_by(e, s, arrays, mesh), s) for s in wider), key=lambda pair: pair[0])
            times, spared = parts(best, mesh) // parts(split, mesh), more - sent_by(e, split, arrays, mesh)
            at, axes = f" at {e.line}" if e.line else "", mesh.format_atoms(atoms)
            saves = f" to save {spared:,} B of communication" if spared > 0 else ""
            yield (
                f"{e.name}{at}: every device repeats this work ({times} times its share): gshard does not split "
                f"%{v.index} over {axes} here{saves}; split(result, ..., {axes!r}) prevents that"
            )


def sent_by(e: Equation, split: Split, arrays: Arrays, mesh: Mesh) -> int:
    """Bytes that each device sends to bring operands into place and results to where they belong."""
    rule, moved = e.operator_rule, sent_inside(e, split, mesh)
    count = len(rule.operands)
    for i, x in enumerate(arrays):
        if x is not None:
            inside = operand_sharding(rule, i, split) if i < count else result_sharding(rule, i - count, split)
            pair = (x.sharding, inside) if i < count else (inside, x.sharding)
            moved += reshard_bytes(*pair, x.shape, x.itemsize, mesh)
    return moved


def notes_of_whole_values(plan: Plan) -> dict[Value, str]:
    """For values that are split nowhere: the equation that gathered an operand for them, or that added parts up."""
    notes: dict[Value, str] = {}
    for e in plan.program.block.walk():
        at = f"{e.name}{f' at {e.line}' if e.line else ''}"
        operands = [x for x in e.inputs if isinstance(x, Value)]
        source = next((notes[x] for x in operands if x in notes), None)
        for i, v in enumerate(e.outputs):
            made = Sharding(()) if e.rule is None else result_sharding(e.rule, i, plan.splits.get(e, {}))
            if any(plan.shardings[v].dims):
                continue
            if any(made.dims):
                notes[v] = f"gathered where {at} makes it: cheapest for what reads it"
            elif made.unreduced and not plan.shardings[v].unreduced:
                notes[v] = f"the parts of a sum that {at} makes are combined for every device"
            elif source is not None:
                notes[v] = source
            elif e.rule is not None and any(any(plan.shardings[x].dims) for x in operands):
                notes[v] = f"computed whole by every device: what {at} reads is gathered, which is cheapest"
    return notes


# Unexpected: one warning for a function whose program is split otherwise than its marks and its layout suggest.


def warn_of(plan: Plan, told: set[str]) -> None:
    """Warns of what a program that is compiled now does not do as its user may expect."""
    program = plan.program
    found = [
        *program.unread_marks,
        *_mistaken_rows(program),
        *dict.fromkeys(_foreign_marks(program, plan.mesh)),
        *returned_in_fewer_shards(plan),
    ]
    hint = f"gshard.explain shows more. {program.name} is compiled at {user_line()}." if found else ""
    warn_once(program.name, told, "is not split as it may seem:", found, hint)


def _foreign_marks(program: Program, mesh: Mesh) -> Iterator[str]:
    """Marks on a mesh that divides the devices into axes of other sizes: they split over parts of the mesh's axes."""
    for e in program.block.walk():
        if e.mark is not None and e.mark.is_foreign(mesh) and _sizes(e.mark) != _sizes(mesh):
            yield f"{e.line}: {e.mark.text_on(mesh)} splits over parts of the axes of {mesh}"


def _sizes(of: Mark | Mesh) -> list[int]:
    return [size for _, size in of.axes if size > 1]


def _mistaken_rows(program: Program) -> Iterator[str]:
    """Rows of the layout that are probably mistakes: those near a name of the program, or all rows if none applies.

    A layout may have rows for other functions, too, so rows that apply to nothing are no mistake in general.
    """
    of_layout = [named for named in program.named if named.layout == program.layout]
    names = sorted({name for named in of_layout for name in named.names.dims if name is not None})
    rows = program.layout.rows if program.layout is not None and names else ()
    unknown = [row for row in rows if row.name not in names]
    for row in unknown:
        if len(unknown) == len(rows) or difflib.get_close_matches(row.name, names, n=1):
            yield f"{row}: nothing is called {row.name!r}. {known_names(row.name, names, 'Names are')}"
