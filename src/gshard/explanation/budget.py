"""Budget: refuses a program in which a device sends more bytes than the user allows, and shows what to change.

gshard.jit(step, mesh=8, strict=50e6)       # at most 50 MB sent by each device in one call
"""

from __future__ import annotations

import dataclasses
from typing import Any

from gshard.core.errors import PlanError
from gshard.core.plan import Plan
from gshard.core.spmd import Collective, SpmdProgram
from gshard.explanation.advice import advice

SHOWN = 3  # collectives that an error tells of


@dataclasses.dataclass(frozen=True, slots=True)
class Budget:
    """The bytes that each device may send in one call of a program."""

    bytes: float  # how many

    @staticmethod
    def of(strict: Any) -> Budget | None:
        """What ``strict=`` allows; None if it is about rules only.

        >>> Budget.of(1e6), Budget.of(True)
        (Budget(bytes=1000000.0), None)
        """
        if isinstance(strict, bool):
            return None
        if not isinstance(strict, int | float) or not strict >= 0:
            raise PlanError(
                f"strict={strict!r} says nothing.",
                hint="Write True, False, or the number of bytes that each device may send in one call: strict=50e6.",
            )
        return Budget(strict)

    def check(self, plan: Plan, spmd: SpmdProgram) -> None:
        """Refuses a program that sends more."""
        total = sum(c.total_bytes for c in spmd.collectives)
        if total <= self.bytes:
            return
        producers = {v: e for e in plan.program.block.walk() for v in e.outputs}
        most = sorted(spmd.collectives, key=lambda c: -c.total_bytes)
        rows = [_row(c, plan) + f"\n    {advice(c, plan, producers)}" for c in most[:SHOWN]]
        if rest := most[SHOWN:]:
            rows.append(f"and {len(rest)} more collectives, {_bytes(sum(c.total_bytes for c in rest))}")
        raise PlanError(
            f"each device would send {_bytes(total)} in one call of {plan.program.name}, "
            f"and strict allows {_bytes(self.bytes)}.",
            most[0].line or None,
            "\n  ".join([f"mesh: {plan.mesh}; most is sent by", *rows]),
            "Change these marks, or allow more bytes.",
        )


def _row(c: Collective, plan: Plan) -> str:
    times = f", {c.times} times" if c.times > 1 else ""
    at = f" at {c.line}" if c.line else ""
    axes = plan.mesh.format_atoms(c.atoms)
    return f"{c.kind} of {c.shape} over {axes} for {c.why}{at}: {_bytes(c.total_bytes)}{times}"


def _bytes(n: float) -> str:
    return f"{n:,.0f} bytes"
