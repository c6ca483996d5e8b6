"""Holds the result of a search on one mesh."""

from __future__ import annotations

import dataclasses

from gshard.core.mesh import Mesh
from gshard.planning.graph import Graph
from gshard.search.priced import PricedPlan
from gshard.solver.solve import Solution


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Best:
    """The result of a search on one mesh.

    Attributes:
        mesh: the mesh.
        chosen: the fastest plan that fits; if none fits, the one with the least memory.
        searched: the best of the searched plans; None if the search did not get as far.
        others: the presets.
        graph: the problem, which is the simplified model; None if the search did not get as far.
        solution: the solution that became ``searched``.
        bound: seconds that every plan within the limit takes at least, in the simplified model.
        predicted: seconds of ``chosen`` in the simplified model; None if the model has no such plan.
        limit: bytes that a device may hold.
        seconds: the time that the search took.
        left_out: steps that were cut or not begun because the time was over.
        failed: candidates that ended with an error, each with its first line.
        stopped: the signal that ended the search; None if none did.
        near: the mesh on which the plan was found near which the others were compared; None if there is no such plan.
        is_limited: whether there are plans over whole axes that were not compared: ``bound`` says nothing of them.
    """

    mesh: Mesh
    chosen: PricedPlan
    searched: PricedPlan | None
    others: tuple[PricedPlan, ...]
    graph: Graph | None
    solution: Solution | None
    bound: float
    predicted: float | None
    limit: float
    seconds: float
    left_out: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    stopped: int | None = None
    near: Mesh | None = None
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
