"""Rows: what an explanation tells of each array, and of each kind of collective."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from gshard.core.mesh import Mesh
from gshard.core.plan import Plan
from gshard.core.program import Block, Value
from gshard.core.spmd import Collective
from gshard.tracing.manual_regions import parts_of


@dataclasses.dataclass(frozen=True, slots=True)
class TensorRow:
    """One array of the program.

    Attributes:
        name: an argument's path, or ``%12`` with the primitive and line that made it.
        sharding: text form.
        bytes: of the whole array.
        local_bytes: of one device's part.
        is_argument: whether the caller hands it in.
        why: for each dimension that is split, the reasons from here back to a mark.
        value: the value in the plan.
        note: what to know of a value that no mark can split: one device's part, or what becomes of parts.
    """

    name: str
    sharding: str
    bytes: int
    local_bytes: int
    is_argument: bool
    why: tuple[tuple[str, ...], ...]
    value: Value = dataclasses.field(repr=False)
    note: str = ""

    @property
    def reason(self) -> str:
        """For each dimension the nearest reason and the mark where the chain ends, in one line."""
        texts = []
        for nearest, *further in self.why:
            root = further[-1].partition(": ")[2] if further else ""
            texts.append(nearest if not root or root in nearest else f"{nearest} <- {root}")
        return "; ".join(texts) or self.note or "nothing asks to split it"


@dataclasses.dataclass(frozen=True, slots=True)
class CollectiveRow:
    """Collectives of one kind over the same axes for the same line.

    Attributes:
        kind: all_gather, all_reduce, reduce_scatter, all_to_all or collective_permute.
        axes: names of mesh axes, or of their parts.
        times: how many run in one call of the program.
        bytes: what each device sends in all of them.
        shape: the local operand of the largest.
        line: the user's source line.
        why: what needed it.
    """

    kind: str
    axes: str
    times: int
    bytes: int
    shape: str
    line: str
    why: str


def rows_of_collectives(collectives: Sequence[Collective], mesh: Mesh) -> tuple[CollectiveRow, ...]:
    """The collectives in rows, most bytes first."""
    rows: dict[tuple[str, str, str, str, str], CollectiveRow] = {}
    for c in collectives:
        axes = mesh.format_atoms(c.atoms)
        key = (c.kind, axes, c.line, c.why, c.shape)
        old = rows.get(key)
        times, sent = c.times + (old.times if old else 0), c.total_bytes + (old.bytes if old else 0)
        rows[key] = CollectiveRow(c.kind, axes, times, sent, c.shape, c.line, c.why)
    return tuple(sorted(rows.values(), key=lambda r: -r.bytes))


def reason_of(plan: Plan, value: Value, dim: int) -> str:
    """The nearest reason for a dimension that is split."""
    return f"dimension {dim}: {plan.reasons[value, dim]}" if (value, dim) in plan.reasons else f"dimension {dim}"


def text_of_rings(plan: Plan, without: float, taken: float, machine: str) -> str:
    """What collective matmuls were chosen for: seconds of a call without them and with them, on a machine."""
    what = f"{len(plan.rings)} product{'s' if len(plan.rings) > 1 else ''}"
    return (
        f"{what} taken part by part while other parts are sent (collective matmul): a call on {machine} takes "
        f"{taken * 1e3:.4g} instead of {without * 1e3:.4g} ms; windowed=False forbids it"
    )


def notes_of_parts(block: Block) -> dict[Value, str]:
    """What to know of values that are one device's part, or that an equation without a choice reads or makes."""
    notes = {}
    for e in block.walk():
        if e.rule is not None and e.rule.fixed is not None:
            note = f"{e.name}{f' at {e.line}' if e.line else ''} says how it is sharded there"
            notes.update({v: note for v in (*e.inputs, *e.outputs) if isinstance(v, Value)})
    for v, parts in parts_of(block).items():
        notes[v] = f"one of {parts} parts: each device holds its own until manual_to_auto"
    return notes
