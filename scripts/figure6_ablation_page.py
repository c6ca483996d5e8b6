"""The page of scripts/figure6_ablation.py: tables of cross entropies, and what follows from them."""

import shlex
from collections.abc import Iterator, Sequence

from figure6_job import DENSE, Job, manifest, records
from figure6_losses import ALL, CLASSES, Estimate, Found, Group, total
from figure6_shown import SURE

MANY = 1 << 62
NEVER, DRAWN = (0, 0), (1, MANY)
TIMES = {"never": NEVER, "once": (1, 1), "twice": (2, 2), "more often": (3, MANY)}
KNOWN, NEW, TRAINING = "known English", "new English", "training"
BOTH = (KNOWN, NEW)
SEEN = "training pairs that were drawn"
UNDRAWN, UNHEARD = "training pairs that were not drawn", "of these, English not drawn either"
SETS = {
    SEEN: (TRAINING, DRAWN, None), UNDRAWN: (TRAINING, NEVER, None),
    UNHEARD: (TRAINING, NEVER, NEVER), KNOWN: (KNOWN, None, None), NEW: (NEW, None, None),
}  # fmt: skip
UNSEEN = {UNDRAWN: "training pairs that were never drawn", KNOWN: KNOWN, NEW: NEW}


def write(job: Job, found: Found, lines: Sequence[Sequence[str]]) -> None:
    """Writes the page from what was measured."""
    ablation = Ablation(found)
    parts = [
        HEAD.format(model=ablation.model, steps=job.steps), shown(ablation), how_often(ablation), by_heart(ablation),
        low_above_high(ablation), every_loss(ablation), text(job, ablation), again(job, lines),
    ]  # fmt: skip
    job.page.parent.mkdir(parents=True, exist_ok=True)
    job.page.write_text("\n".join(parts), "utf-8")
    print(f"written: {job.page}", flush=True)


HEAD = """# Which languages gain, and why

<!-- Written by scripts/figure6_ablation.py from what it measured: change that, not this. -->

[Results](results.md) shows that experts translate better, and does not show that low-resource languages gain most. Here
the same models, dense and {model}, are compared by the cross entropy of each sentence, which is less of an accident
than its translation; and they are trained a second time with a temperature of 1, which repeats the pairs of no language
more than those of another. Each took {steps:,} steps and was trained once, with the seed 0.
"""


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
        name, times, english = SETS[of]
        return total(self.found.groups(1.0, temperature, models, name, resource, times, english))

    def low_above_high(self, of: str, factors: dict[float, float]) -> Estimate | None:
        """What low resource gains above high resource, added up over temperatures."""
        name, times, english = SETS[of]
        groups: list[Group] = []
        for temperature, factor in factors.items():
            for resource, sign in (("low", factor), ("high", -factor)):
                own = self.found.groups(sign, temperature, self.gain, name, resource, times, english)
                if not own:
                    return None
                groups += own
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


def shown(of: Ablation) -> str:
    """What follows from the tables, in words."""
    first, second = of.temperatures
    return "\n\n".join(["## What is shown, and what is not", f"**{verdict(of)}**", *_reasons(of, first, second)]) + "\n"


def verdict(of: Ablation) -> str:
    """What low-resource languages gain, and whether repetition explains what they do not."""
    first, second = of.temperatures
    parts = [f"With a temperature of {first:g}, low-resource languages {_gain(of, first)}."]
    if all(sure(of.low_above_high(name, {first: 1.0})) for name in BOTH):
        return parts[0]
    heart = sure(of.more_by_heart(first, {"low": 1.0}))
    rises = [name for name in BOTH if sure(of.low_above_high(name, {second: 1.0, first: -1.0}))]
    if heart:
        parts.append(f"{of.model[0].upper()}{of.model[1:]} learns their pairs by heart more than the dense model does;")
    else:
        parts.append(f"That {of.model} learns their pairs by heart more than the dense model does is not shown;")
    where = " and ".join(rises)
    parts.append(
        f"with a temperature of {second:g}, which repeats no pairs more than others, their lead over high-resource "
        + (f"languages is larger on {where}:" if rises else "languages is larger on neither test:")
    )
    parts.append(
        "repetition explains what they lack." if rises and heart else "repetition does not explain what they lack."
    )
    parts.append(f"With {second:g} they {_gain(of, second)}.")
    return " ".join(parts)


def _gain(of: Ablation, temperature: float) -> str:
    """On which new text low-resource languages gain more than high-resource ones, and on which not."""
    leads = {told: of.low_above_high(name, {temperature: 1.0}) for name, told in UNSEEN.items()}
    outcome = {
        "gain more than high-resource ones": [name for name, lead in leads.items() if sure(lead)],
        "gain less than high-resource ones": [name for name, lead in leads.items() if _below(lead)],
    }
    rest = [name for name in leads if not any(name in names for names in outcome.values())]
    outcome["gain neither more nor less than high-resource ones, beyond chance,"] = rest
    return ", and ".join(f"{how} on {_list(names)}" for how, names in outcome.items() if names)


def _list(names: Sequence[str]) -> str:
    """Names with commas and an ``and``.

    >>> _list(["a", "b", "c"])
    'a, b and c'
    """
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _below(estimate: Estimate | None) -> bool:
    return estimate is not None and estimate.size < 0 and estimate.p < SURE


def _reasons(of: Ablation, first: float, second: float) -> Iterator[str]:
    cases = [(t, name) for t in of.temperatures for name in BOTH]
    gains = [of.loss(t, of.gain, name, ALL) for t, name in cases]
    unseen = [(t, name) for t in of.temperatures for name in UNSEEN]
    yield (
        f"*Experts are better than none.* On new text {of.model} has a lower cross entropy than the dense model by "
        f"more than chance in {sum(map(sure, gains))} of {len(gains)} comparisons: by "
        + ", ".join(f"{told(gain)} on {name} with {t:g}" for gain, (t, name) in zip(gains, cases, strict=True))
        + ", in nats a token, all languages. p is that of chance in the choice of sentences; what another seed would "
        "change is in none."
    )
    leads = "; ".join(f"{told(of.low_above_high(n, {t: 1.0}))} on {UNSEEN[n]} with {t:g}" for t, n in unseen)
    changes = " and by ".join(f"{told(of.low_above_high(n, {second: 1.0, first: -1.0}))} on {n}" for n in BOTH)
    yield (
        f"*Low resource against high.* The class of low resource gains more than that of high resource by {leads}. "
        f"From {first:g} to {second:g} that changes by {changes}."
    )
    times = {t: of.found.exposures[t]["low"].times for t in of.temperatures if "low" in of.found.exposures[t]}
    cases = [(t, resource) for t in of.temperatures for resource in ("low", "high")]
    learnt = [(of.more_by_heart(t, {resource: 1.0}), t, resource) for t, resource in cases]
    more = ", ".join(f"{told(e)} of {resource} resource with {t:g}" for e, t, resource in learnt if e is not None)
    drawn = " and ".join(f"{n:.2f} times with {t:g}" for t, n in times.items())
    shares = " and ".join(f"{share:.0%} with {t:g}" for t in of.temperatures if (share := _by_heart_share(of, t)))
    yield (
        f"*Learning by heart.* A pair of low resource was drawn {drawn}. Pairs that were drawn cost less than pairs of "
        "the same languages that were not, and chance alone decided which were: that is what was learnt by heart. "
        + (f"With {of.model} it is more than with the dense model, by {more}. " if more else "Here they are too few. ")
        + (f"Of what low resource gains on pairs that were drawn, that is {shares}." if shares else "")
    )
    yield (
        "*What a temperature changes besides.* It also decides how much of all that is trained on is of a language, so "
        "models of two temperatures differ by more than by repetition: a language that is drawn less often is known "
        "less well by both."
    )


def _by_heart_share(of: Ablation, temperature: float) -> float | None:
    """The share of low resource's gain on pairs that were drawn that is not there on pairs that were not."""
    heart, gain = of.more_by_heart(temperature, {"low": 1.0}), of.loss(temperature, of.gain, SEEN, "low")
    return heart.size / gain.size if heart and gain and gain.size > 0 else None


def how_often(of: Ablation) -> str:
    """Draws of each class."""
    rows = [
        "## How often a pair was drawn\n",
        "Counted in the batches of all steps; pairs that are too long for a batch are left out. The last two columns "
        "are of the English of a pair, drawn with whatever language.\n",
        "| temperature | languages | pairs | of all draws | times a pair was drawn | never | its English | never |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for temperature in of.temperatures:
        for name, e in of.found.exposures[temperature].items():
            rows.append(
                f"| {temperature:g} | {len(of.found.languages(name))} {name} | {e.pairs:,} | {e.share:.1%} "
                f"| {e.times:.2f} | {e.never:.1%} | {e.english:.1f} | {e.unheard:.1%} |"
            )
    return "\n".join([*rows, ""])


def by_heart(of: Ablation) -> str:
    """Pairs that were drawn against those that were not."""
    size = len(of.found.sets[TRAINING].data)
    rows = [
        "## Learning by heart\n",
        f"{size:,} training pairs, as many of each language, picked at random. How far the cross entropy of those that "
        "were never in a batch is above that of those that were, in nats a token, without dropout: what training on "
        "just these pairs has brought. Then what the model of experts gains over the dense one on pairs that were "
        "drawn so often. ± is half of the 95 % interval. A dash: some language has too few.\n",
        f"| temperature | languages | {DENSE} | {of.model} | more by {of.model} | "
        + " | ".join(f"gain, drawn {name}" for name in TIMES)
        + " |",
        f"|---|---|---|---|---|{'---|' * len(TIMES)}",
    ]
    for temperature in of.temperatures:
        for name in (*CLASSES, ALL):
            both = [of.by_heart(temperature, {model: 1.0}, {name: 1.0}) for model in (DENSE, of.model)]
            gains = []
            for times in TIMES.values():
                whole = of.found.enough(temperature, TRAINING, name, (times,)) == of.found.languages(name)
                groups = of.found.groups(1.0, temperature, of.gain, TRAINING, name, times)
                gains.append(str(total(groups)) if whole and groups else "–")
            cells = ["–" if e is None else str(e) for e in both]
            cells += [told(of.more_by_heart(temperature, {name: 1.0})), *gains]
            rows.append(f"| {temperature:g} | {len(of.found.languages(name))} {name} | {' | '.join(cells)} |")
    return "\n".join([*rows, ""])


def low_above_high(of: Ablation) -> str:
    """What the class of low resource gains against that of high resource."""
    rows = [
        "## Low resource against high resource\n",
        f"Nats a token by which {of.model} is better than the dense model.\n",
        "| temperature | pairs | low gains | high gains | low above high |",
        "|---|---|---|---|---|",
    ]
    for temperature in of.temperatures:
        for name in SETS:
            low, high = (of.loss(temperature, of.gain, name, resource) for resource in ("low", "high"))
            cells = ["–" if e is None else str(e) for e in (low, high)]
            lead = told(of.low_above_high(name, {temperature: 1.0}))
            rows.append(f"| {temperature:g} | {name} | {' | '.join(cells)} | {lead} |")
    first, second = of.temperatures
    for name in BOTH:
        change = told(of.low_above_high(name, {second: 1.0, first: -1.0}))
        rows.append(f"| {second:g} less {first:g} | {name} |  |  | {change} |")
    return "\n".join([*rows, ""])


def every_loss(of: Ablation) -> str:
    """All cross entropies."""
    rows = [
        "## Cross entropies\n",
        "Nats a token, without dropout; the languages of a class count alike. Training pairs are shorter than the "
        "sentences of new English, so rows of different sets are not to be compared.\n",
        f"| temperature | pairs | languages | {DENSE} | {of.model} | gain |",
        "|---|---|---|---|---|---|",
    ]
    for temperature in of.temperatures:
        for name in SETS:
            for resource in (*CLASSES, ALL):
                both = [of.loss(temperature, {model: 1.0}, name, resource) for model in (DENSE, of.model)]
                cells = ["–" if e is None else f"{e.size:.3f}" for e in both]
                gain = told(of.loss(temperature, of.gain, name, resource))
                count = len(of.found.languages(resource))
                rows.append(f"| {temperature:g} | {name} | {count} {resource} | {' | '.join(cells)} | {gain} |")
    return "\n".join([*rows, ""])


def text(job: Job, of: Ablation) -> str:
    """What was trained on, what was measured, and how sure it is."""
    m, found = manifest(job.data), of.found
    tokens = {t: sum(r["tokens"] for r in records(job.runs / f"temperature-{t:g}" / DENSE)) for t in of.temperatures}
    seen = ", ".join(f"{n / 1e6:.2f} M target tokens with a temperature of {t:g}" for t, n in tokens.items())
    of_sets = "; ".join(f"{len(found.sets[name].data):,} of {name}" for name in BOTH)
    names = ", ".join(sorted(found.pairs, key=lambda code: -found.pairs[code]))
    return f"""## The text, and what is measured

{m["pairs"]["train"]:,} training pairs in {len(m["languages"])} languages ({names}) of the tier
`{m["settings"]["tier"]}`, prepared as that of [results](results.md); both temperatures have the same text and the same
vocabularies. The models saw {seen}. The options of training are those that results.md chose on dev, with a temperature
of {of.temperatures[0]:g}; nothing was chosen for this page. Trained on {job.machine}.

All held-out sentences that fit are measured: {of_sets}; the former are both held-out parts, the latter is the test.
Intervals and p follow from the differences of the same sentences under two models. Sentences with the same English
count as one, whatever their languages: the deviation of a mean is that of sums over different English (linearised).
"""


def again(job: Job, lines: Sequence[Sequence[str]]) -> str:
    """The command lines."""
    ran = "\n".join(shlex.join(["m4", *line]) for line in lines)
    return f"## Doing it again\n\n```bash\n{job.asked}\n```\n\nwhich ran:\n\n```bash\n{ran}\n```\n"
