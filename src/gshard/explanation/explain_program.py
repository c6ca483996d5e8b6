"""Reads a plan and its per-device program into an explanation (``explanation.explain``)."""

from __future__ import annotations

from collections.abc import Callable

from gshard.core.memory_kinds import is_host_kind
from gshard.core.plan import Plan, local_bytes
from gshard.core.planning_tables import with_tables
from gshard.core.program import Program
from gshard.core.spmd import SpmdProgram
from gshard.device.machine import Machine
from gshard.explanation.explain import Explanation
from gshard.explanation.idle import idle_devices
from gshard.explanation.layout_usage import unused_of_layout, uses_of_layout
from gshard.explanation.replicated import notes_of_whole_values, replicated_work
from gshard.explanation.returned import returned_in_fewer_shards
from gshard.explanation.rows import rows_of_collectives, rows_of_equal_layers, rows_of_tensors
from gshard.explanation.sent_narrow import sent_narrow
from gshard.explanation.value_costs import Compared
from gshard.naming.array_names import ArrayNames


@with_tables
def explain_program(
    plan: Plan,
    spmd: SpmdProgram,
    marked: Callable[[Program], SpmdProgram],
    donated: frozenset[int] = frozenset(),
    *,
    by_bytes: bool = False,
    machine: Machine | None = None,
    marked_by_bytes: Callable[[Program], SpmdProgram] | None = None,
    choice: Callable[[], Compared | None] | None = None,
) -> Explanation:
    """Reads a plan and its per-device program.

    Args:
        plan, spmd: what ``propagate`` and ``partition`` made;
        marked: and what they make of the program with other marks.
        donated: arguments (counted without captured arrays) whose memory results may take.
        by_bytes: whether the plan was made by bytes;
        machine: or for which machine;
        marked_by_bytes: then what ``marked`` would be by bytes, which is made sooner.
        choice: what planning chose, and from what.
    """
    program, mesh = plan.program, plan.mesh
    names, replicated = ArrayNames(program), replicated_work(plan)
    tensors = rows_of_tensors(plan, names, notes_of_whole_values(plan, replicated))
    held = [v for i, v in enumerate(program.block.inputs) if not is_host_kind(program.input_memory(i))]
    return Explanation(
        program.name,
        mesh,
        sum(1 for _ in program.block.walk()),
        tensors,
        rows_of_equal_layers(spmd.collectives, mesh, names),
        rows_of_collectives(spmd.collectives, mesh, names),
        tuple(plan.gathered_text()),
        (sum(v.bytes for v in held), sum(local_bytes(v, plan.shardings[v], mesh) for v in held)),
        plan,
        spmd,
        marked,
        names,
        donated,
        (*idle_devices(plan, names), *map(str, replicated)),
        uses_of_layout(program),
        (*program.unread_marks, *unused_of_layout(program, mesh)),
        by_bytes,
        machine,
        tuple(map(str, program.dropped)),
        marked_by_bytes,
        choice,
        returned_in_fewer_shards(plan, names),
        sent_narrow(program, names),
    )
