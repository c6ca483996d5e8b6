"""Trials: plans the program again with one change of marks at a time, within a time limit.

    Tried 12 of 40 changes of marks in 10 s, those of the largest collectives first.

What a change is said to bring is proven: the whole program was planned and partitioned with it, and sends less. A plan
for a machine takes several times as long as one by bytes. So where a program is planned for a machine, changes are
first tried by bytes, and those that send less so are planned for the machine, the best first.

How many changes are tried depends on the time that they take, and so on the computer. Their order does not, nor what is
found where all are tried.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

from gshard.core.number_text import format_seconds
from gshard.core.plan import Plan
from gshard.core.planning_tables import with_tables
from gshard.core.program import Program
from gshard.core.spmd import Collective, SpmdProgram
from gshard.device.cost import WORTH
from gshard.explanation.changes import changes_of
from gshard.explanation.proposal import Proposal
from gshard.explanation.what_if import Planner, replanned
from gshard.search.time_budget import TRIAL_SECONDS, Watch

_SCREENING = 0.5  # of the seconds, in which changes are tried by bytes where the plan is for a machine


@dataclasses.dataclass(frozen=True)
class Trials:
    """What changes of marks bring, as far as they were tried."""

    # the changes that lower the bytes sent, each with the number of the collectives that it is for
    found: tuple[tuple[int, Proposal], ...]
    tried: int  # how many changes were tried;
    changes: int  # of how many
    seconds: float  # of processor time that this took
    one: float = 0.0  # seconds that one change takes, if none was tried because of them

    @property
    def is_complete(self) -> bool:
        """Whether all changes were tried."""
        return self.tried == self.changes

    def __str__(self) -> str:
        if not self.changes:
            return "No change of marks to try."
        if self.is_complete:
            return f"Tried all changes of marks that the collectives go back to: {self.changes}."
        if self.one:
            return f"Tried none of {self.changes} changes of marks: one takes about {format_seconds(self.one)}."
        took = f" in {format_seconds(self.seconds)}" if self.tried else ""
        return f"Tried {self.tried} of {self.changes} changes of marks{took}, those of the largest collectives first."


@with_tables
def trials(
    rows: Sequence[Sequence[Collective]],
    plan: Plan,
    marked: Planner,
    *,
    by_bytes: Planner | None = None,
    seconds: float = TRIAL_SECONDS,
    one: float = 0.0,
    clock: Callable[[], float] = time.thread_time,
) -> Trials:
    """Plans the program again with changes of marks, those at which most bytes are at stake first."""
    began = clock()
    sent = sum(c.total_bytes for same in rows for c in same)
    found: list[tuple[int, Proposal]] = []
    changes = changes_of(rows, plan) if sent else []
    tried = 0
    one = one if changes and max(seconds, TRIAL_SECONDS) < one else 0.0
    to_prove = changes if seconds > 0 and not one else []
    if by_bytes is not None and to_prove:
        now = _sent(by_bytes, lambda: plan.program, Watch(began, clock))
        screening = Watch(began + _SCREENING * seconds, clock)
        promising = []
        for change in changes:
            if screening.is_over:
                break
            again = _sent(by_bytes, change.program, screening)
            if again is not None and now is not None and again[0] < WORTH * now[0]:
                promising.append((again[0], change))
            else:
                tried += 1
        to_prove = [change for _, change in sorted(promising, key=lambda pair: pair[0])]
    proving = Watch(began + seconds, clock)
    for change in to_prove:
        if proving.is_over:
            break
        again = _sent(marked, change.program, proving)
        tried += 1
        if again is not None and again[0] < WORTH * sent:
            found.append((change.row, Proposal(change.mark, change.at, sent, again[0], change.instead, again[1])))
    return Trials(tuple(found), tried, len(changes), clock() - began, one)


def _sent(planner: Planner, program: Callable[[], Program | None], watch: Watch) -> tuple[int, SpmdProgram] | None:
    """Bytes that each device sends in one call of a program, and what it becomes; None if its marks do not fit."""
    with watch.trial():
        made = replanned(planner, program())
    return None if made is None else (sum(c.total_bytes for c in made.collectives), made)
