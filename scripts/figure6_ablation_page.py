"""The page of scripts/figure6_ablation.py: tables of cross entropies, and what follows from them."""

import shlex
from collections.abc import Iterator, Sequence

from figure6_compared import (
    BOTH,
    HEARD,
    SEEN,
    SETS,
    TIMES,
    TRAINING,
    UNDRAWN,
    UNSEEN,
    Ablation,
    below,
    sure,
    told,
)
from figure6_job import DENSE, Job, manifest, records
from figure6_losses import ALL, CLASSES, Found, total


def write(job: Job, found: Found, lines: Sequence[Sequence[str]]) -> None:
    """Writes the page from what was measured."""
    ablation = Ablation(found)
    parts = [
        HEAD.format(model=ablation.model, steps=job.steps), shown(ablation), how_often(ablation), by_heart(ablation),
        the_english(ablation), low_above_high(ablation), every_loss(ablation), text(job, ablation), again(job, lines),
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


def shown(of: Ablation) -> str:
    """What follows from the tables, in words."""
    first, second = of.temperatures
    return (
        "\n\n".join(
            ["## What is shown, and what is not", f"**{headline(of)}**", verdict(of), *_reasons(of, first, second)]
        )
        + "\n"
    )


def headline(of: Ablation) -> str:
    """What is shown, and what not, in short."""
    first, _ = of.temperatures
    better = [name for name in BOTH if sure(of.loss(first, of.gain, name, ALL))]
    most = [told for name, told in UNSEEN.items() if sure(of.low_above_high(name, {first: 1.0}))]
    rest = [told for told in UNSEEN.values() if told not in most]
    parts = [
        f"{of.model} has a lower cross entropy than the dense model on {_list(better)}"
        if better
        else f"that {of.model} has a lower cross entropy than the dense model is shown on neither test",
        "that low-resource languages gain most is "
        + " and ".join(filter(None, [most and f"shown on {_list(most)}", rest and f"not shown on {_list(rest)}"])),
    ]
    if (matched := of.matched(first)) and UNSEEN[UNDRAWN] in most:
        share = matched.size / of.low_above_high(UNDRAWN, {first: 1.0}).size
        parts.append(
            f"of their lead on {UNSEEN[UNDRAWN]}, {max(share, 0):.0%} is there between pairs whose English was drawn "
            f"equally often with other languages, {told(matched)} nats a token"
        )
    if rest:
        parts.append(f"that repetition explains what they lack is {'shown' if repeats(of) else 'not shown'}")
    return f"{'; '.join(parts)}."


def repeats(of: Ablation) -> bool:
    """Whether low resource is learnt by heart more by experts, and leads by more where it is not repeated."""
    first, second = of.temperatures
    return sure(of.more_by_heart(first, {"low": 1.0})) and bool(_rises(of, first, second))


def _rises(of: Ablation, first: float, second: float) -> list[str]:
    return [name for name in BOTH if sure(of.low_above_high(name, {second: 1.0, first: -1.0}))]


def verdict(of: Ablation) -> str:
    """What low-resource languages gain under each temperature, and what changes between them."""
    first, second = of.temperatures
    heart = sure(of.more_by_heart(first, {"low": 1.0}))
    where = " and ".join(_rises(of, first, second))
    return (
        f"With a temperature of {first:g}, low-resource languages {_gain(of, first)}. "
        + f"That {of.model} learns their pairs by heart more than the dense model does is "
        + ("shown. " if heart else "not shown. ")
        + f"With a temperature of {second:g}, which repeats no pairs more than others, they {_gain(of, second)}; their "
        + f"lead over high-resource languages is larger than with {first:g} on {where or 'neither test'}."
    )


def _gain(of: Ablation, temperature: float) -> str:
    """On which new text low-resource languages gain more than high-resource ones, and on which not."""
    leads = {told: of.low_above_high(name, {temperature: 1.0}) for name, told in UNSEEN.items()}
    outcome = {
        "gain more than high-resource ones": [name for name, lead in leads.items() if sure(lead)],
        "gain less than high-resource ones": [name for name, lead in leads.items() if below(lead)],
    }
    rest = [name for name in leads if not any(name in names for names in outcome.values())]
    outcome["gain neither more nor less than high-resource ones, beyond chance,"] = rest
    return ", and ".join(f"{how} on {_list(names)}" for how, names in outcome.items() if names)


def _said(resource: str) -> str:
    return "all languages" if resource == ALL else f"{resource} resource"


def _list(names: Sequence[str]) -> str:
    """Names with commas and an ``and``.

    >>> _list(["a", "b", "c"])
    'a, b and c'
    """
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


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
    more = ", ".join(f"{told(of.change(n, r))} on {n} for {_said(r)}" for n in BOTH for r in (ALL, "low", "high"))
    changes = " and by ".join(f"{told(of.low_above_high(n, {second: 1.0, first: -1.0}))} on {n}" for n in BOTH)
    yield (
        f"*Low resource against high.* The class of low resource gains more than that of high resource by {leads}. "
        f"From {first:g} to {second:g} that changes by {changes}."
    )
    yield f"*What experts bring under the other temperature.* From {first:g} to {second:g} the gain changes by {more}."
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
    between = "; ".join(
        f"with {t:g} it is {told(of.low_above_high(UNDRAWN, {t: 1.0}))}, and {told(of.matched(t))} between pairs whose "
        "English was drawn equally often"
        for t in of.temperatures
    )
    english = " and ".join(
        f"{n['low'].english:.1f} times of low and {n['high'].english:.1f} times of high resource with {t:g}"
        for t, n in of.found.exposures.items()
        if {"low", "high"} <= n.keys()
    )
    yield (
        f"*The English, not the pair.* The English of a pair was drawn, with whatever language, {english}. The lead of "
        f"low resource on pairs that were never drawn: {between}."
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


def the_english(of: Ablation) -> str:
    """Pairs that were never drawn, by how often their English was."""
    rows = [
        "## The English of a pair\n",
        f"What {of.model} gains on training pairs that were never drawn, by how often their English was drawn with "
        "other languages. Last, the mean of the differences between low and high resource in these columns. A dash: "
        "some language has too few. The columns are of different text: what many languages have is drawn more often.\n",
        f"| temperature | languages | {' | '.join(f'English drawn {name}' for name in HEARD)} | equally often |",
        f"|---|---|{'---|' * len(HEARD)}---|",
    ]
    for temperature in of.temperatures:
        for resource in (*CLASSES, ALL):
            gains = [of.heard(temperature, {resource: 1.0}, drawn) for drawn in HEARD.values()]
            count = len(of.found.languages(resource))
            cells = " | ".join("–" if e is None else str(e) for e in gains)
            rows.append(f"| {temperature:g} | {count} {resource} | {cells} |  |")
        leads = [of.heard(temperature, {"low": 1.0, "high": -1.0}, drawn) for drawn in HEARD.values()]
        cells = " | ".join(map(told, [*leads, of.matched(temperature)]))
        rows.append(f"| {temperature:g} | low above high | {cells} |")
    return "\n".join([*rows, ""])


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
vocabularies. The models saw {seen}.
The options of training are those that results.md chose on dev, with a temperature of {of.temperatures[0]:g}; nothing
was chosen for this page. Trained on {job.machine}.

All held-out sentences that fit are measured: {of_sets};
the former are both held-out parts, the latter is the test. Intervals and p follow from the differences of the same
sentences under two models. Sentences with the same English count as one, whatever their languages: the deviation of a
mean is that of sums over different English (linearised).
"""


def again(job: Job, lines: Sequence[Sequence[str]]) -> str:
    """The command lines."""
    ran = "\n".join(shlex.join(["gshard-m4", *line]) for line in lines)
    return f"## Doing it again\n\n```bash\n{job.asked}\n```\n\nwhich ran:\n\n```bash\n{ran}\n```\n"
