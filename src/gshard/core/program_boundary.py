"""Defines constraints on the arguments and results of a program other than marks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from gshard.core.sharding import Sharding


@dataclasses.dataclass(frozen=True)
class Boundary:
    """Constraints on the arguments and results of a program other than marks."""

    # the numbers of the inputs (including captured arrays) whose memory results may reuse
    donated: tuple[int, ...] = ()
    # the shardings of the inputs that are passed as padded parts
    padded: Mapping[int, Sharding] = dataclasses.field(default_factory=dict)
    keep_uneven: bool = False  # whether unevenly sharded results are returned as padded parts


# No constraints other than marks.
AS_MARKED = Boundary()
