"""The page of scripts/figure6.py: docs/results.md and its figures, from what was measured."""

import csv
import shlex
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from figure6_job import DENSE, DONE, Job, held_out, manifest, records
from figure6_shown import Loss, shown

from gshard_m4 import evaluate, figure
from gshard_m4.evaluate import CLASSES, Results
from gshard_m4.held_out import BOTH, NEW_ENGLISH, HeldOut

LAST = 500  # steps whose training cross entropy is told
FEW = 40  # languages that have a row each


def write(job: Job, lines: Sequence[Sequence[str]]) -> None:
    """Writes the page and its figures from what is there."""
    job.page.parent.mkdir(parents=True, exist_ok=True)
    there = [name for name in job.size.models if (job.evaluation(name) / DONE).exists()]
    parts = [HEAD, what_is_shown(job, there), corpus(job), models(job, there), chosen(job), progress(job, there)]
    for held in BOTH:
        parts += [versus_dense(job, held, there), draw(job, held, there), by_language(job, held, there)]
    parts += [versus_one_language(job, there), again(job, lines)]
    job.page.write_text("\n".join(filter(None, parts)), "utf-8")
    print(f"written: {job.page}", flush=True)


HEAD = """# Results

<!-- Written by scripts/figure6.py from what it measured: change that, not this. -->

Do more experts translate better with the same compute, and which languages gain? Models of this page have the same
FLOPs for a token, took the same steps on the same batches, and were trained once, with the seed 0. They are scored on
two tests ([Translating](translating.md)): *known English*, pairs that are new although other languages have their
English in training, and *new English*, which is in no training pair.
[Which languages gain, and why](results_ablation.md) compares models of the size `narrow` sentence by sentence, and with
the languages drawn otherwise.
"""


def what_is_shown(job: Job, there: Sequence[str]) -> str:
    """How sure the answers are, from what the page has in its tables."""
    if len(there) < 2:
        return ""
    tables = {held.name: {name: table(job.evaluation(name, held) / "classes.csv") for name in there} for held in BOTH}
    losses = {name: losses_of(job, name) for name in there}
    found = Results.load(job.evaluation(DENSE, NEW_ENGLISH))
    classes = evaluate.resource_classes(found)
    pairs = {of: [found.languages[code].pairs for code in classes if classes[code] == of] for of in CLASSES}
    tokens = sum(r["tokens"] for r in records(job.run(DENSE)))
    return shown(tables, losses, tokens, pairs, manifest(job.data)["settings"]["temperature"])


def losses_of(job: Job, name: str) -> Loss:
    """Cross entropies of a model at its end."""
    known, new = (Results.load(job.evaluation(name, held)).cross_entropy for held in BOTH)
    return Loss(np.mean([r["cross_entropy"] for r in records(job.run(name))[-LAST:]]), known, new)


def corpus(job: Job) -> str:
    """What was trained on."""
    m = manifest(job.data)
    few = sorted(m["languages"], key=lambda code: -m["languages"][code])
    tier, sources = (m["settings"][name] for name in ("tier", "sources"))
    of = f"The sources {', '.join(sources)}" if sources else f"The tier `{tier}`"
    names = f" ({', '.join(few)})" if len(few) <= FEW else ""
    return f"""## The text

{of} of [the corpus](corpus.md): {m["pairs"]["train"]:,} training pairs in
{len(m["languages"])} languages{names}, drawn with a temperature of {m["settings"]["temperature"]:g}; vocabularies of
{m["source_vocabulary"]:,} and {m["target_vocabulary"]:,} pieces; sentences of up to {m["settings"]["length"]} tokens;
batches of {job.size.tokens:,} tokens on each side. In scoring, the models do not get the language of a sentence.
"""


def chosen(job: Job) -> str:
    """What was tried, and what was taken."""
    tried = [(choice, at) for choice, at in job.pilots() if at]
    if len(tried) < 2:
        return ""
    names = job.size.piloted
    rows = [
        "## What was chosen on dev\n",
        f"Each choice was tried for {job.size.pilot_steps:,} steps; below is the cross entropy of the dev part of new "
        f"English after them. The one with the lowest mean is that of all models: `{shlex.join(job.training)}`. "
        "Nothing else was tried: not the vocabularies, the temperature or dropout.\n",
        f"| choice | {' | '.join(names)} |",
        f"|---|{'---|' * len(names)}",
    ]
    for choice, at in tried:
        rows.append(f"| `{choice}` | {' | '.join(f'{at[name]:.3f}' if name in at else '' for name in names)} |")
    return "\n".join([*rows, ""])


def progress(job: Job, there: Sequence[str]) -> str:
    """Cross entropies after some steps."""
    losses = {name: held_out(job.run(name)) for name in there}
    steps = sorted(set.intersection(*map(set, losses.values())))
    if len(steps) < 2:
        return ""
    taken = {name: np.array([r["cross_entropy"] for r in records(job.run(name))]) for name in there}
    rows = [
        "## While training\n",
        f"Cross entropy in nats for each token, of the batches of the {LAST} steps before (with dropout) / of the dev "
        "part of new English.\n",
        f"| steps | {' | '.join(there)} |",
        f"|---|{'---|' * len(there)}",
    ]
    for step in steps:
        cells = [f"{taken[name][max(step - LAST, 0) : step].mean():.3f} / {losses[name][step]:.3f}" for name in there]
        rows.append(f"| {step:,} | {' | '.join(cells)} |")
    return "\n".join([*rows, ""])


def models(job: Job, there: Sequence[str]) -> str:
    """A row for each model that has been scored."""
    rows = [
        "## The models\n",
        "| model | options | steps | target tokens | minutes of steps | cross entropy, training | known | new |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in there:
        taken = records(job.run(name))
        loss = losses_of(job, name)
        tokens, seconds = (sum(r[key] for r in taken) for key in ("tokens", "seconds"))
        rows.append(
            f"| {name} | `{job.size.models[name]}` | {len(taken):,} | {tokens / 1e6:.2f} M | {seconds / 60:.1f} "
            f"| {loss.training:.3f} | {loss.known:.3f} | {loss.new:.3f} |"
        )
    return "\n".join(rows) + (
        f"\n\nCross entropy is in nats for each token: of the batches of the last {LAST} steps, and of the dev parts "
        f"of the two tests. Minutes are those of the steps, compilation included, on {job.machine}.\n"
    )


def versus_dense(job: Job, held: HeldOut, there: Sequence[str]) -> str:
    """Every model beside the dense one, by class."""
    rows = [
        f"## {held.name[0].upper()}{held.name[1:]}\n",
        f"Here {held.about}. All sentences of a class are scored as one text, ± half of the 95 % interval; differences "
        "are to the dense model on the same sentences. p is the probability that chance makes one as large, two-sided, "
        "with all pairs of an English sentence drawn together, and not corrected for the number of comparisons: one of "
        "twenty is below 0.05 by chance.\n",
        "| model | languages | pairs of each | sentences | BLEU | chrF++ | ΔBLEU (p) | ΔchrF++ (p) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in there:
        for row in table(job.evaluation(name, held) / "classes.csv"):
            cells = [f"{row[key]:.1f} ± {row[f'{key}_95']:.1f}" for key in ("bleu", "chrf")]
            deltas = [
                "" if row[f"delta_{key}"] is None else with_chance(row[f"delta_{key}"], row[f"p_{key}"])
                for key in ("bleu", "chrf")
            ]
            rows.append(
                f"| {name} | {row['languages']:.0f} {row['resource']} | {row['fewest']:,.0f} to {row['most']:,.0f} "
                f"| {row['sentences']:,.0f} | {' | '.join([*cells, *deltas])} |"
            )
    found = Results.load(job.evaluation(there[0], held))
    beside = "; ".join(f"{name}: BLEU {bleu:.1f}, chrF++ {chrf:.1f}" for name, (bleu, chrf) in found.beside.items())
    return "\n".join(rows) + f"\n\nTranslators that know nothing score, {beside}. `{found.signature}`\n"


def with_chance(difference: float, p: float | None) -> str:
    """A difference and its p; a dash where too few sentences differ in English for a p."""
    return f"{difference:+.2f} ({'–' if p is None else f'{p:.3f}'})"


def table(path: Path) -> list[dict]:
    """The rows of a table, numbers as numbers; None for what is empty."""

    def read(value: str) -> float | str | None:
        try:
            return float(value) if value else None
        except ValueError:
            return value

    if not path.exists():  # of this test there are no sentences
        return []
    with path.open(encoding="utf-8") as file:
        return [{name: read(value) for name, value in row.items()} for row in csv.DictReader(file)]


def draw(job: Job, held: HeldOut, there: Sequence[str]) -> str:
    """The figure of a test, and its line on the page."""
    if len(there) < 2:
        return ""
    dense = Results.load(job.evaluation(DENSE, held))
    series, rows = {}, []
    for name in there[1:]:
        ours = Results.load(job.evaluation(name, held))
        deltas = {code: chrf for code, (_, chrf) in evaluate.differences(ours, [dense]).items()}
        series[name] = ours, deltas
        classes = evaluate.resource_classes(ours)
        for resource in CLASSES:
            values = np.array([deltas[code] for code in deltas if classes[code] == resource])
            if len(values) > 1:
                mean, half = figure.interval(values)
                rows.append(f"{name} {mean:+.2f} ± {half:.2f} for the {len(values)} {resource}-resource languages")
    file = job.page.with_name(f"figure6-{held.name.replace(' ', '-')}.svg")
    figure.trend(file, series, "chrF++ above the dense model", held.name)
    means = f"Means over languages: {'; '.join(rows)}." if rows else ""
    return f"![chrF++ above the dense model, languages from high to low resource]({file.name})\n{means}\n"


def by_language(job: Job, held: HeldOut, there: Sequence[str]) -> str:
    """A row for each language, where they are few."""
    tables = {name: table(job.evaluation(name, held) / "scores.csv") for name in there[1:]}
    if not tables or not 0 < max(map(len, tables.values())) <= FEW:
        return ""
    columns = " | ".join(f"{name}: chrF++ | ΔBLEU (p) | ΔchrF++ (p)" for name in tables)
    rows = [
        f"| language | pairs | sentences | {columns} |",
        f"|---|---|---|{'---|---|---|' * len(tables)}",
    ]
    for together in zip(*tables.values(), strict=True):
        cells = [
            f"{row['chrf++']:.1f} ± {row['chrf++_95']:.1f} | {with_chance(row['delta_bleu'], row['p_bleu'])} "
            f"| {with_chance(row['delta_chrf++'], row['p_chrf++'])}"
            for row in together
        ]
        first = together[0]
        rows.append(f"| {first['language']} | {first['pairs']:,.0f} | {first['sentences']:.0f} | {' | '.join(cells)} |")
    return "\n".join([*rows, ""])


def versus_one_language(job: Job, there: Sequence[str]) -> str:
    """The comparison with models of one language, as far as they are there."""
    rows = []
    for held in BOTH:
        for name in (name for name in there if (job.alone_evaluation(name) / DONE).exists()):
            for row in table(job.alone_evaluation(name, held) / "scores.csv"):
                rows.append(
                    f"| {row['language']} | {row['pairs']:,.0f} | {held.name} | {name} | {row['sentences']:.0f} "
                    f"| {row['chrf++']:.1f} ± {row['chrf++_95']:.1f} | {row['chrf++'] - row['delta_chrf++']:.1f} "
                    f"| {with_chance(row['delta_chrf++'], row['p_chrf++'])} |"
                )
    if not rows:
        return ""
    head = [
        "## Against one language alone\n",
        f"Each model of one language took {job.size.alone_steps:,} steps (`{job.size.alone}`). To it, known English is "
        "as new as any: what the others gain there is what they carry over from other languages.\n",
        "| language | pairs | test | model | sentences | chrF++, 95 % | alone | ΔchrF++ (p) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*head, *rows, ""])


def again(job: Job, lines: Sequence[Sequence[str]]) -> str:
    """The command lines."""
    text = "\n".join(shlex.join(["gshard-m4", *line]) for line in lines)
    return f"## Doing it again\n\n```bash\n{job.asked}\n```\n\nwhich ran:\n\n```bash\n{text}\n```\n"
