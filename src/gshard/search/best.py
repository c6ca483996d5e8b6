"""Holds the result of a search on one mesh."""

from __future__ import annotations

import dataclasses

from gshard.core.mesh import Mesh
from gshard.planning.graph import Graph
from gshard.search.priced import PricedPlan
from gshard.solver.solve import Solution


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Best:
    """The result of a search on one mesh."""

    mesh: Mesh  # the mesh
    chosen: PricedPlan  # the fastest plan that fits; if none fits, the one with the least memory
    searched: PricedPlan | None  # the best of the searched plans; None if the search did not get as far
    others: tuple[PricedPlan, ...]  # the presets
    graph: Graph | None  # the problem, which is the simplified model; None if the search did not get as far
    solution: Solution | None  # the solution that became ``searched``
    bound: float  # seconds that every plan within the limit takes at least, in the simplified model
    predicted: float | None  # seconds of ``chosen`` in the simplified model; None if the model has no such plan
    limit: float  # bytes that a device may hold
    seconds: float  # the time that the search took
    left_out: tuple[str, ...] = ()  # steps that were cut or not begun because the time was over
    failed: tuple[str, ...] = ()  # candidates that ended with an error, each with its first line
    stopped: int | None = None  # the signal that ended the search; None if none did
    # the mesh on which the plan was found near which the others were compared; None if there is no such plan
    near: Mesh | None = None
    # whether there are plans over whole axes that were not compared: ``bound`` says nothing of them
    is_limited: bool = False

    @property
    def fits(self) -> bool:
        """Whether the plan keeps within the limit of memory."""
        return self.chosen.cost.peak <= self.limit

    @property
    def gap(self) -> float | None:
        """The largest share of ``predicted`` that a plan that was compared could save; None if nothing is proven.

        Both numbers belong to the simplified model. Nothing is proven if the plan does not fit, if the model has no
        such plan, or if the solver found no bound.
        """
        if not self.fits or self.predicted is None:
            return None
        if not self.predicted:
            return 0.0
        return max(0.0, 1 - self.bound / self.predicted) if self.bound > 0 else None
