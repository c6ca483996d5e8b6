"""Boundary: constraints on the arguments and results of a program, besides marks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from gshard.core.sharding import Sharding


@dataclasses.dataclass(frozen=True)
class Boundary:
    """What is asked of the arguments and results of a program, besides marks.

    Attributes:
        donated: the inputs (captured arrays counted) whose memory results may take.
        padded: the inputs that come as padded parts, and how they are cut.
        keep_uneven: whether results leave as padded parts where they are sharded unevenly.
    """

    donated: tuple[int, ...] = ()
    padded: Mapping[int, Sharding] = dataclasses.field(default_factory=dict)
    keep_uneven: bool = False


# Nothing is asked besides marks.
AS_MARKED = Boundary()
