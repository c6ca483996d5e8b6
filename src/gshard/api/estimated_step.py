"""Estimated step: a configuration with its estimate, and the search for its plan once that has begun."""

from __future__ import annotations

import dataclasses

from gshard.api.built_step import BuiltStep
from gshard.api.configurations import NotSearched
from gshard.api.search import Searched, SearchRun
from gshard.search.find import MeshSearch
from gshard.search.pipeline import PricedPlan
from gshard.search.screening import Estimate

_RECOMPUTES = 4 / 3  # of the time of a step whose estimate does not fit: a second forward pass, at most


@dataclasses.dataclass(eq=False)
class EstimatedStep:
    """A configuration that is estimated, and its search if that has begun."""

    built: BuiltStep
    searched: Searched
    estimate: Estimate
    limit: float
    run: SearchRun | None = None
    why: str = "not begun, because the time was over"

    def promise(self, limit: float) -> float:
        """Orders configurations, the most promising one first."""
        return self.estimate.seconds * (_RECOMPUTES if self.estimate.peak > limit else 1.0)

    def least_seconds(self, meshes: int) -> float:
        """Seconds that it takes at least in the simplified model, on any mesh."""
        solved = [max(one.least_seconds, self.estimate.least_seconds) for one in self.solved]
        return min(solved) if len(solved) == meshes else self.estimate.least_seconds

    @property
    def chosen(self) -> PricedPlan | None:
        """The best plan so far."""
        plans = [] if self.run is None else [one.chosen for one in self.run.begun if one.has_found]
        return min(plans, key=lambda plan: plan.rank(self.limit), default=None)

    def is_better(self, other: EstimatedStep, limit: float) -> bool:
        """Whether a configuration that fits by its estimate is no slower than another one by theirs.

        They differ in one keyword, or in the memory of the state.
        """
        ours, theirs = self.built.keywords, other.built.keywords
        changed = sum(ours[key] != theirs[key] for key in ours) + (bool(self.built.host) != bool(other.built.host))
        fits = self.estimate.peak <= limit
        return changed == 1 and fits and self.estimate.seconds <= other.estimate.seconds

    def fits_as_it_is(self, limit: float) -> bool:
        """Whether its best plan so far fits without recomputed values."""
        return self.chosen is not None and self.chosen.cost.peak <= limit and not self.chosen.recomputed

    def expected(self, limit: float) -> float:
        """Seconds of the best plan by hand; longer if values have to be recomputed to fit."""
        assert self.chosen is not None
        return self.chosen.cost.seconds * (_RECOMPUTES if self.chosen.cost.peak > limit else 1.0)

    def left_out(self, limit: float) -> NotSearched:
        """The configuration as one without a plan."""
        fits = self.estimate.least_bytes <= limit
        return NotSearched(self.built.text, self.why, fits, self.estimate.least_seconds)

    @property
    def solved(self) -> list[MeshSearch]:
        """The meshes for which its whole problem is solved."""
        begun = [] if self.run is None else self.run.begun
        return [one for one in begun if one.is_solved and one.near is None]
