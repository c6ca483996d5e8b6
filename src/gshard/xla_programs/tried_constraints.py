"""Tried constraints: sharding constraints on values inside of a function, each proved by compiling with it.

    Sharding constraints that help, compiled with 12 of 40; the peak may rise by 5 %:
      after train.py:9: x = jax.lax.with_sharding_constraint(x, P("data"))  (float32[32,128])
        sent 75.0 MiB -> 63.0 MiB, 24 -> 20 messages, peak 324.5 MiB -> 108.5 MiB, a call 1392 ms -> 532.3 ms

A constraint helps if it lowers the modelled time, or the bytes sent at no more time, and raises the peak by a stated
share at most. Without a machine it helps if less is sent and at most 2 % more is computed. The constraints that help
are put together, the best first, as long as each helps. The figures of all together are those of one program that was
compiled with them.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Hashable, Sequence

import jax

from gshard.core.program import format_bytes
from gshard.search.time_budget import Progress
from gshard.xla_programs.constraint_candidates import Candidates
from gshard.xla_programs.expression_text import ExpressionTexts, type_text
from gshard.xla_programs.traced_expressions import Constraint, constrained
from gshard.xla_programs.tried_changes import ROWS, SAME, WORTH, Figures, Tried, TriedChange, try_changes

MORE_PEAK = 1.05  # of the peak: what a constraint may take for less time or fewer bytes
_MORE_FLOPS = 1.02  # of the operations, without a machine: a constraint may move some elementwise work
_ALONE = 0.7  # of the seconds, in which constraints are tried one by one; the others put them together


@dataclasses.dataclass(frozen=True, slots=True)
class TriedConstraint(TriedChange):
    """A constraint that was compiled."""

    constraint: Constraint  # the expression and its sharding
    text: str  # what to write, and where

    @property
    def parts(self) -> set[Hashable]:
        """The expression."""
        return {self.constraint.expression}

    def __str__(self) -> str:
        expression = self.constraint.expression
        return f"{self.text}  ({type_text(expression.dtype, expression.shape)})"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TriedConstraints(Tried[TriedConstraint]):
    """What XLA compiles with sharding constraints on values inside: of each expression the best one that helps."""

    left_out: int  # expressions whose value cannot be constrained: see ``expressions_of``
    matched: int  # matched, collectives: how many collectives move a value of an expression, of how many
    collectives: int
    unmatched_bytes: int  # that each device sends in the others
    seconds: float  # that this took

    @property
    def candidates(self) -> int:
        """How many constraints there are to try."""
        return self.changes

    @property
    def lines(self) -> tuple[str, list[str]]:
        """The result as a title and lines below it."""
        limit = f"the peak may rise by {MORE_PEAK - 1:.0%}".replace("%", " %")
        rows: list[str] = []
        if self.helping:
            title = f"Sharding constraints inside that help, compiled with {self.of} in {self.seconds:.0f} s; {limit}"
        elif not self.candidates:
            title = "No sharding constraint inside to try"
        else:
            title = f"Compiled with {self.of} sharding constraints inside in {self.seconds:.0f} s: none helps; {limit}"
        for one in self.helping[:ROWS]:
            assert one.figures is not None, "it helps"
            rows += [str(one), f"  {self.before.change_to(one.figures)}"]
        rows += [f"and {len(self.helping) - ROWS} more that help"] * (len(self.helping) > ROWS)
        constraints, after = self.together
        if len(constraints) > 1:
            numbers = " ".join(f"({self.helping.index(one) + 1})" for one in constraints)
            rows += [f"together {numbers}", f"  {self.before.change_to(after)}"]
        if self.refused:
            rows.append(f"JAX or XLA refused {self.refused} of them")
        if self.matched < self.collectives:
            others, sent = self.collectives - self.matched, format_bytes(self.unmatched_bytes)
            rows.append(
                f"{others} of {self.collectives} collectives ({sent}) move arguments, or no value of one expression"
            )
        if self.left_out:
            rows.append(f"{self.left_out} expressions have no one array as their value")
        if self.tried < self.candidates:
            rows.append("with more seconds, more are tried")
        return title, rows


def try_constraints(
    before: Figures,
    candidates: Candidates,
    left_out: int,
    compiled: Callable[[], Figures | None],
    mesh: jax.sharding.Mesh,
    seconds: float,
    progress: Progress,
) -> TriedConstraints:
    """Compiles a program with sharding constraints on values inside."""
    began, texts, numbers = time.monotonic(), ExpressionTexts(), itertools.count(1)
    changes = [TriedConstraint(one, texts.written(one)) for one in candidates.constraints]

    def constraining(some: Sequence[TriedConstraint]) -> Figures | None:
        first = f"a constraint, {next(numbers)} of {len(changes)}: {some[0].text}" if len(some) == 1 else ""
        progress.step(f"compiling with {first or f'{len(some)} constraints'}")
        with constrained([one.constraint for one in some], mesh) as outcome:
            made = compiled()
        return made if outcome.is_as_before else None

    def helps(now: Figures, then: Figures) -> bool:
        return improves(now, then, peak=before.peak)

    found = try_changes(before, changes, constraining, helps, seconds, alone=_ALONE, only_best=True)
    return TriedConstraints(
        **vars(found), left_out=left_out, matched=candidates.matched, collectives=candidates.collectives,
        unmatched_bytes=candidates.unmatched_bytes, seconds=time.monotonic() - began,
    )  # fmt: skip


def improves(now: Figures, before: Figures, peak: int | None = None) -> bool:
    """Whether a constraint helps."""
    if now.peak > MORE_PEAK * (before.peak if peak is None else peak):
        return False
    sends_less = now.sent < WORTH * before.sent
    if not before.seconds:
        return sends_less and now.flops <= _MORE_FLOPS * before.flops
    is_faster = now.seconds < WORTH * before.seconds
    return is_faster or (sends_less and now.seconds <= SAME * before.seconds)
