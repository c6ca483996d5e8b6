"""What scripts/figure6_ablation.py compares: gains of classes of languages, on which text, under which temperature."""

from figure6_job import DENSE
from figure6_losses import Estimate, Found, Group, Range, total
from figure6_shown import SURE

MANY = 1 << 62
NEVER, DRAWN = (0, 0), (1, MANY)
TIMES = {"never": NEVER, "once": (1, 1), "twice": (2, 2), "more often": (3, MANY)}
KNOWN, NEW, TRAINING = "known English", "new English", "training"
BOTH = (KNOWN, NEW)
HEARD = {"never": NEVER, "once or twice": (1, 2), "3 to 8 times": (3, 8), "more often": (9, MANY)}
SEEN, UNDRAWN = "training pairs that were drawn", "training pairs that were not drawn"
SETS = {SEEN: (TRAINING, DRAWN), UNDRAWN: (TRAINING, NEVER), KNOWN: (KNOWN, None), NEW: (NEW, None)}
UNSEEN = {UNDRAWN: "training pairs that were never drawn", KNOWN: KNOWN, NEW: NEW}


class Ablation:
    """The comparisons that the page is made of; gains are nats a token by which the model of experts is better.

    Args:
        found: what was measured.
    """

    def __init__(self, found: Found) -> None:
        self.found = found
        self.temperatures = sorted(found.drawn, reverse=True)
        names = {name for _, name, _ in found.nats}
        self.model = next(name for name in names if name != DENSE)
        self.gain = {DENSE: 1.0, self.model: -1.0}

    def loss(self, temperature: float, models: dict[str, float], of: str, resource: str) -> Estimate | None:
        """The mean cross entropy of a class, or a difference of models."""
        name, times = SETS[of]
        return total(self.found.groups(1.0, temperature, models, name, resource, times))

    def low_above_high(self, of: str, factors: dict[float, float]) -> Estimate | None:
        """What low resource gains above high resource, added up over temperatures."""
        name, times = SETS[of]
        groups: list[Group] = []
        for temperature, factor in factors.items():
            for resource, sign in (("low", factor), ("high", -factor)):
                own = self.found.groups(sign, temperature, self.gain, name, resource, times)
                if not own:
                    return None
                groups += own
        return total(groups)

    def change(self, of: str, resource: str) -> Estimate | None:
        """By how much more a class gains under the second temperature than under the first."""
        name, times = SETS[of]
        groups: list[Group] = []
        for temperature, factor in zip(self.temperatures, (-1.0, 1.0), strict=True):
            groups += self.found.groups(factor, temperature, self.gain, name, resource, times)
        return total(groups)

    def heard(self, temperature: float, resources: dict[str, float], drawn: Range) -> Estimate | None:
        """Gains on pairs that were never drawn and whose English was drawn so often; None where languages lack them."""
        groups: list[Group] = []
        for resource, sign in resources.items():
            own = self.found.groups(sign, temperature, self.gain, TRAINING, resource, NEVER, drawn)
            if len(own) < len(self.found.languages(resource)):
                return None
            groups += own
        return total(groups)

    def matched(self, temperature: float) -> Estimate | None:
        """What low resource gains above high resource on them, English that was drawn equally often compared."""
        of = {"low": 1.0, "high": -1.0}
        ranges = [drawn for drawn in HEARD.values() if self.heard(temperature, of, drawn) is not None]
        groups: list[Group] = []
        for drawn in ranges:
            for resource, sign in of.items():
                factor = sign / len(ranges)
                groups += self.found.groups(factor, temperature, self.gain, TRAINING, resource, NEVER, drawn)
        return total(groups)

    def by_heart(self, temperature: float, models: dict[str, float], resources: dict[str, float]) -> Estimate | None:
        """How far the cross entropy of pairs that were never drawn is above that of pairs that were."""
        groups: list[Group] = []
        for resource, sign in resources.items():
            codes = self.found.enough(temperature, TRAINING, resource, (NEVER, DRAWN))
            if not codes:
                return None
            for times, factor in ((NEVER, sign), (DRAWN, -sign)):
                groups += self.found.groups(factor, temperature, models, TRAINING, resource, times, None, codes)
        return total(groups)

    def more_by_heart(self, temperature: float, resources: dict[str, float]) -> Estimate | None:
        """By how much more the model of experts has learnt by heart than the dense one."""
        return self.by_heart(temperature, {self.model: 1.0, DENSE: -1.0}, resources)


def told(estimate: Estimate | None) -> str:
    """A difference with its interval and its p."""
    if estimate is None:
        return "–"
    return f"{estimate} (p {'< 0.001' if estimate.p < 0.001 else f'= {estimate.p:.3f}'})"


def sure(estimate: Estimate | None) -> bool:
    """Whether a difference is above nothing by more than chance."""
    return estimate is not None and estimate.size > 0 and estimate.p < SURE


def below(estimate: Estimate | None) -> bool:
    """Whether a difference is below nothing by more than chance."""
    return estimate is not None and estimate.size < 0 and estimate.p < SURE
