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
import time
from collections.abc import Callable, Sequence

import jax

from gshard.core.program import format_bytes
from gshard.search.progress import Progress
from gshard.xla_programs.constraint_candidates import Candidates
from gshard.xla_programs.expression_text import ExpressionTexts, type_text
from gshard.xla_programs.traced_expressions import Constraint, constrained
from gshard.xla_programs.tried_shardings import WORTH, Explained, Figures

MORE_PEAK = 1.05  # of the peak: what a constraint may take for less time or fewer bytes
_SAME = 1.001  # of seconds: no more is no more
_MORE_FLOPS = 1.02  # of the operations, without a machine: a constraint may move some elementwise work
_ALONE = 0.7  # of the seconds, in which constraints are tried one by one; the others put them together
_ROWS = 8  # constraints that are printed


@dataclasses.dataclass(frozen=True, slots=True)
class TriedConstraint:
    """A constraint that was compiled.

    Attributes:
        constraint: the expression and its sharding.
        text: what to write, and where.
        figures: what the program takes with it.
    """

    constraint: Constraint
    text: str
    figures: Figures

    def __str__(self) -> str:
        expression = self.constraint.expression
        return f"{self.text}  ({type_text(expression.dtype, expression.shape)})"


@dataclasses.dataclass(frozen=True)
class TriedConstraints:
    """What XLA compiles with sharding constraints on values inside.

    Attributes:
        before: what the unchanged program takes.
        helping: the constraints that help by themselves, the best first; the best one of each expression.
        together: those of them that help together, and what the program then takes.
        tried, candidates: how many constraints were compiled, of how many.
        refused: at how many of these JAX or XLA failed.
        left_out: expressions whose value cannot be constrained: see ``expressions_of``.
        matched, collectives: how many collectives move a value of an expression, of how many.
        unmatched_bytes: that each device sends in the others.
        seconds: that this took.
    """

    before: Figures
    helping: tuple[TriedConstraint, ...]
    together: tuple[tuple[TriedConstraint, ...], Figures]
    tried: int
    candidates: int
    refused: int
    left_out: int
    matched: int
    collectives: int
    unmatched_bytes: int
    seconds: float

    @property
    def lines(self) -> tuple[str, list[str]]:
        """The result as a title and lines below it."""
        of = f"{self.tried} of {self.candidates}" if self.tried < self.candidates else f"all {self.candidates}"
        limit = f"the peak may rise by {MORE_PEAK - 1:.0%}".replace("%", " %")
        rows: list[str] = []
        if self.helping:
            title = f"Sharding constraints inside that help, compiled with {of} in {self.seconds:.0f} s; {limit}"
        elif not self.candidates:
            title = "No sharding constraint inside to try"
        else:
            title = f"Compiled with {of} sharding constraints inside in {self.seconds:.0f} s: none helps; {limit}"
        for one in self.helping[:_ROWS]:
            rows += [str(one), f"  {self.before.change_to(one.figures)}"]
        rows += [f"and {len(self.helping) - _ROWS} more that help"] * (len(self.helping) > _ROWS)
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

    def __str__(self) -> str:
        title, rows = self.lines
        return "\n".join([f"{title}{':' if rows else '.'}", *(f"  {row}" for row in rows)])


def try_constraints(
    found: Explained,
    candidates: Candidates,
    left_out: int,
    compiled: Callable[[], Explained | None],
    mesh: jax.sharding.Mesh,
    seconds: float,
    progress: Progress,
) -> TriedConstraints:
    """Compiles a program with sharding constraints on values inside.

    Args:
        found: the unchanged program.
        candidates: the constraints to try, in this order.
        left_out: how many expressions are not among them.
        compiled: traces and compiles the function; None if JAX or XLA refuses.
        mesh: the devices.
        seconds: how long to go on. No program is begun that would end later, if it takes as long as the longest before;
            one is compiled in any case, unless this is 0.
        progress: gets a line for each constraint.
    """
    began, longest = time.monotonic(), 0.0
    before, texts = Figures.of(found), ExpressionTexts()

    def figures(constraints: Sequence[Constraint]) -> Figures | None:
        nonlocal longest
        start = time.monotonic()
        with constrained(constraints, mesh) as outcome:
            made = compiled()
        longest = max(longest, time.monotonic() - start)
        return None if made is None or not outcome.is_as_before else Figures.of(made)

    def has_time(share: float = 1.0) -> bool:
        return not longest or time.monotonic() - began + longest <= share * seconds

    best: dict[object, TriedConstraint] = {}
    tried = refused = 0
    for constraint in candidates.constraints if seconds > 0 else ():
        if not has_time(_ALONE):
            break
        tried, text = tried + 1, texts.written(constraint)
        progress.step(f"compiling with a constraint, {tried} of {len(candidates.constraints)}: {text}")
        made = figures([constraint])
        refused += made is None
        known = best.get(constraint.expression)
        if made is not None and improves(made, before) and (known is None or made.rank < known.figures.rank):
            best[constraint.expression] = TriedConstraint(constraint, text, made)
    helping = sorted(best.values(), key=lambda one: one.figures.rank)
    together, after = (helping[:1], helping[0].figures) if helping else ([], before)
    for one in helping[1:]:
        if not has_time():
            break
        progress.step(f"compiling with {len(together) + 1} constraints")
        more = figures([kept.constraint for kept in (*together, one)])
        if more is not None and improves(more, after, peak=before.peak):
            together, after = [*together, one], more
    return TriedConstraints(
        before, tuple(helping), (tuple(together), after), tried, len(candidates.constraints), refused, left_out,
        candidates.matched, candidates.collectives, candidates.unmatched_bytes, time.monotonic() - began,
    )  # fmt: skip


def improves(now: Figures, before: Figures, peak: int | None = None) -> bool:
    """Whether a constraint helps.

    Args:
        now, before: with it and without.
        peak: of the unchanged program, if ``before`` already has constraints.
    """
    if now.peak > MORE_PEAK * (before.peak if peak is None else peak):
        return False
    sends_less = now.sent < WORTH * before.sent
    if not before.seconds:
        return sends_less and now.flops <= _MORE_FLOPS * before.flops
    is_faster = now.seconds < WORTH * before.seconds
    return is_faster or (sends_less and now.seconds <= _SAME * before.seconds)
