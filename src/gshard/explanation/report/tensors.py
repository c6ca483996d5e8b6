"""Report tensors: all arrays of a program as rows of the report, linked by their reasons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gshard.core.partition_spec import text_of_spec
from gshard.core.plan import Plan
from gshard.core.program import Equation, Value
from gshard.explanation.report.places import Places
from gshard.explanation.rows import TensorRow


def tensor_rows(
    told: Sequence[TensorRow], plan: Plan, producers: Mapping[Value, Equation], places: Places
) -> list[dict[str, Any]]:
    """All arrays, largest first; a reason is [dimension, text, the row it came from or -1, its dimension]."""
    order = sorted(plan.shardings, key=lambda v: (-v.bytes, v.index))
    row_of = {v: i for i, v in enumerate(order)}
    read: dict[Value, dict[str, None]] = {v: {} for v in plan.program.block.inputs}
    for e in plan.program.block.walk():
        for v in e.inputs:
            if isinstance(v, Value) and v in read:
                read[v][places.of(e)] = None
    rows = []
    for v, row in zip(order, told, strict=True):
        reasons = []
        for d, atoms in enumerate(plan.shardings[v].dims):
            if atoms and (reason := plan.reasons.get((v, d))):
                source = plan.sources[v, d]
                reasons.append([d, str(reason), *((-1, -1) if source is None else (row_of[source[0]], source[1]))])
        rows.append(
            {
                "name": row.name,
                "short": row.short,
                "sharding": row.sharding,
                "dtype": v.dtype_name,
                "spec": _spec(plan, v) if row.is_argument else "",
                "dims": [list(atoms) for atoms in plan.shardings[v].dims],
                "shape": list(v.shape),
                "bytes": row.bytes,
                "local": row.local_bytes,
                "argument": row.is_argument,
                "place": places.of(producers.get(v)),
                "read": list(read.get(v, ())),  # of an argument: the lines that read it
                "note": row.note,
                "reason": row.reason if reasons else "",
                "reasons": reasons,
            }
        )
    return rows


def _spec(plan: Plan, v: Value) -> str:
    """How an argument is split as JAX writes it, where that can say it."""
    spec = plan.mesh.spec_of(plan.shardings[v].dims)
    return "" if spec is None else text_of_spec(spec)
