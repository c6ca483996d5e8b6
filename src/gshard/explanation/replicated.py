"""Replicated work: products that every device repeats although an operand is split.

Without a machine no product is (``planning.objective``). On a named one it may be faster to gather a small operand than
to combine large results; then each such equation is listed with how often its share is computed, what that spares, and
the mark that forbids it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from gshard.comm.reshard import reshard_bytes
from gshard.core.mesh import Atoms, Mesh
from gshard.core.plan import Plan
from gshard.core.program import Block, Equation, Value
from gshard.core.rule import Rule
from gshard.core.sharding import Sharding
from gshard.core.split import Split, operand_sharding, parts, result_sharding
from gshard.device.fusion_model import is_product
from gshard.planning.candidates import Arrays, arrays_of, candidates


@dataclasses.dataclass(frozen=True, slots=True)
class Replicated:
    """An equation computed whole over some axes over which an operand is split."""

    equation: Equation  # what is computed
    operand: Value  # the operand that is gathered
    dim: int  # its dimension that is split
    axes: str  # over which
    times: int  # how often a device's share every device computes
    spared: int  # bytes that splitting this equation alone would send more

    def __str__(self) -> str:
        e, at = self.equation, f" at {self.equation.line}" if self.equation.line else ""
        saves = f" to save {self.spared:,} B of communication" if self.spared > 0 else ""
        what = f"{e.name}{at}: every device repeats this work ({self.times} times its share)"
        unsplit = f"gshard does not split %{self.operand.index} over {self.axes} here{saves}"
        return f"{what}: {unsplit}; split(result, ..., {self.axes!r}) prevents that"


def replicated_work(plan: Plan) -> tuple[Replicated, ...]:
    """The products of a plan that could run in more parts as their operands are split, in program order."""
    found = []
    for e in plan.program.block.walk():
        split = plan.splits.get(e)
        if e.rule is None or split is None or not is_product(e.rule) or not e.rule.is_free:
            continue
        used = {a for atoms in split.values() for a in atoms}
        for v in e.inputs:
            lost = [(d, atoms) for d, atoms in enumerate(_dims(v, plan)) if atoms and not used & set(atoms)]
            if lost and isinstance(v, Value) and (row := _row(e, split, v, *lost[0], plan)):
                found.append(row)
                break
    return tuple(found)


def _dims(v: object, plan: Plan) -> tuple[Atoms, ...]:
    return plan.shardings[v].dims if isinstance(v, Value) else ()


def _row(e: Equation, split: Split, v: Value, dim: int, atoms: Atoms, plan: Plan) -> Replicated | None:
    """The row of an equation, if one of its candidates would keep the operand's parts."""
    assert e.rule is not None
    rule, arrays, mesh = e.rule, arrays_of(e, plan.shardings), plan.mesh
    wider = [s for s in candidates(e.rule, arrays, mesh) if parts(s, mesh) > parts(split, mesh)]
    if not wider:
        return None

    best = min(wider, key=lambda s: sent_by(rule, s, arrays, mesh))
    times = parts(best, mesh) // parts(split, mesh)
    more = sent_by(rule, best, arrays, mesh) - sent_by(rule, split, arrays, mesh)
    return Replicated(e, v, dim, mesh.format_atoms(atoms), times, more)


def sent_by(rule: Rule, split: Split, arrays: Arrays, mesh: Mesh) -> int:
    """Bytes that each device sends to bring operands into place and results to where they belong."""
    moved = 0 if rule.sends is None else rule.sends(mesh, split)
    count = len(rule.operands)
    for i, x in enumerate(arrays):
        if x is not None:
            pair = (
                (x.sharding, operand_sharding(rule, i, split))
                if i < count
                else (result_sharding(rule, i - count, split), x.sharding)
            )
            moved += reshard_bytes(*pair, x.shape, x.itemsize, mesh)
    return moved


def notes_of_whole_values(plan: Plan, replicated: tuple[Replicated, ...]) -> dict[Value, str]:
    """For values that are split nowhere: the equation that gave a split up for them, or that added parts up."""
    gave_up = {row.equation: row for row in replicated}
    notes: dict[Value, str] = {}
    _of_block(plan.program.block, plan, gave_up, notes)
    return notes


def _of_block(block: Block, plan: Plan, gave_up: Mapping[Equation, Replicated], notes: dict[Value, str]) -> None:
    for e in block.equations:
        for body in e.blocks:
            _of_block(body, plan, gave_up, notes)
        split = plan.splits.get(e, {})
        at = f" at {e.line}" if e.line else ""
        for v in e.outputs:
            if any(plan.shardings[v].dims):
                continue
            row = gave_up.get(e)
            made = Sharding(()) if e.rule is None else result_sharding(e.rule, e.outputs.index(v), split)
            source = next((x for x in e.inputs if isinstance(x, Value) and x in notes), None)
            if row is not None:
                notes[v] = (
                    f"computed whole by every device: {e.name}{at} gives up the split of an operand over {row.axes}"
                )
            elif any(made.dims):
                notes[v] = f"gathered where {e.name}{at} makes it: cheapest for what reads it"
            elif made.unreduced and not plan.shardings[v].unreduced:
                notes[v] = f"the parts of a sum that {e.name}{at} makes are combined for every device"
            elif source is not None:
                notes[v] = notes[source]
            elif e.rule is not None and any(any(_dims(x, plan)) for x in e.inputs):
                notes[v] = f"computed whole by every device: what {e.name}{at} reads is gathered, which is cheapest"
