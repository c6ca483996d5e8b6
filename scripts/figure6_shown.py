"""What the tables of docs/results.md show, and what they do not: how sure each claim is, and what it would take.

Everything here follows from numbers of the page as they are printed, so that a reader can compute it again.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import NamedTuple

from gshard_m4.significance import holm

SURE = 0.05
FOUND = 0.8  # of the tests of so many sentences should find a difference that is there
LEAST = 3  # tokens of a sentence: `gshard-m4 prepare` keeps no pair with fewer than two English words, and it ends
MEASURES = {"bleu": "BLEU", "chrf": "chrF++"}
NORMAL = NormalDist()

Rows = Sequence[Mapping[str, float | str | None]]
"""The rows of classes.csv: resource, sentences, delta_bleu, p_bleu, ..."""


class Loss(NamedTuple):
    """Cross entropies of a model: of its last training batches, of the dev parts of known and of new English."""

    training: float
    known: float
    new: float


def chance(strength: float) -> float:
    """The two-sided p of a difference of so many of its own standard deviations, where differences are normal.

    >>> round(chance(0.0), 3), round(chance(1.0), 3), round(chance(3.0), 4)
    (1.0, 0.317, 0.0027)
    """
    return 2 * NORMAL.cdf(-abs(strength))


def strength(p: float) -> float:
    """How many of its standard deviations a difference has whose p is this.

    >>> round(strength(chance(1.3)), 6), strength(1.0)
    (1.3, 0.0)
    """
    return abs(NORMAL.inv_cdf(min(max(p, 1e-9), 1.0) / 2))


def needed(sentences: float, has: float, asked: float) -> str:
    """Sentences with which a difference like this one would mostly be found; deviations fall with their square root.

    >>> needed(1000, 1.0, strength(0.05)), needed(1000, -0.1, 1.6)
    ('6,000', '–')
    """
    if has <= 0:
        return "–"
    found = sentences * ((asked + NORMAL.inv_cdf(FOUND)) / has) ** 2
    digits = 2 - len(str(int(found)))
    return f"{round(found, digits):,.0f}"


class Difference(NamedTuple):
    """A difference between scores: its size, its standard deviation, and the sentences it is from."""

    size: float
    deviation: float
    sentences: float


def difference(row: Mapping[str, float | str | None], measure: str) -> Difference:
    """A model's to the dense one, as a row of the page has it."""
    size, p = round(float(row[f"delta_{measure}"] or 0), 2), chance_of(row, measure)
    return Difference(size, abs(size) / strength(p) if strength(p) else math.inf, float(row["sentences"] or 0))


def chance_of(row: Mapping[str, float | str | None], measure: str) -> float:
    """The p of a difference, as the page has it; 1 where there is none."""
    p = row[f"p_{measure}"]
    return 1.0 if p is None else round(float(p), 3)


def shown(
    tables: Mapping[str, Mapping[str, Rows]],
    losses: Mapping[str, Loss],
    tokens: float,
    pairs: Mapping[str, Sequence[int]],
    temperature: float,
) -> str:
    """The section of the page.

    Args:
        tables: name of a test -> model -> its rows.
        losses: of the models, the dense one first.
        tokens: target tokens that each model was trained on.
        pairs: class -> training pairs of each of its languages.
        temperature: of the draws from them.
    """
    losses = {name: Loss(*(round(value, 3) for value in of)) for name, of in losses.items()}
    tokens = round(tokens, -4)
    better, low = [], []
    for test, of in tables.items():
        for name in losses:
            rows = {row["resource"]: row for row in of[name]}
            if "all" not in rows or rows["all"]["delta_bleu"] is None:  # no sentences, or the dense model itself
                continue
            for measure, told in MEASURES.items():
                what, p = f"{test} | {name} | {told}", chance_of(rows["all"], measure)
                every = difference(rows["all"], measure)
                more = needed(every.sentences, every.size / every.deviation, strength(SURE))
                better.append((f"| {what} | {every.size:+.2f} | {p:.3f} |", p, f" {every.sentences:,.0f} | {more} |"))
                if {"low", "high"} <= rows.keys():
                    a, b = (difference(rows[resource], measure) for resource in ("low", "high"))
                    has = (a.size - b.size) / math.hypot(a.deviation, b.deviation)
                    p, count = NORMAL.cdf(-has), a.sentences + b.sentences
                    more = needed(count, has, NORMAL.inv_cdf(1 - SURE))
                    row = f"| {what} | {a.size:+.2f} | {b.size:+.2f} | {p:.2f} | {count:,.0f} | {more} |"
                    low.append((row, p < SURE, a.size > b.size))
    corrected = [float(p or 0) for p in holm([p for _, p, _ in better])]
    rows_of_all = [f"{begin} {p:.3f} |{end}" for (begin, _, end), p in zip(better, corrected, strict=True)]
    tests = [row.split(" | ")[0].removeprefix("| ") for row in rows_of_all]
    parts = [HEAD, *rows_of_all, "", _told_of_all(tests, [p < SURE for p in corrected])]
    if low:
        parts += [LOW, *(row for row, _, _ in low), "", _told_of_low([(sure, above) for _, sure, above in low])]
    return "\n".join([*parts, _why(losses, tokens, pairs, temperature)])


HEAD = f"""## What is shown, and what is not

*More experts are better than none.* All sentences of a test. p is two-sided; the next column is p corrected for the
number of rows (Holm). The last column is how many sentences would be needed for a difference of this size to be found
(p < {SURE}, before the correction) by {FOUND:.0%} of such tests; `gshard-m4 prepare` holds out more with `--known` and
`--test`.

| test | model | measure | above dense | p | p, corrected | sentences | needed |
|---|---|---|---|---|---|---|---|"""

LOW = """*Low-resource languages gain most.* What the class of low resource gains against what that of high resource
gains; p is the probability that chance puts it as far above, and there is a dash where it is below.

| test | model | measure | low gains | high gains | p | sentences | needed |
|---|---|---|---|---|---|---|---|"""


def _told_of_all(tests: Sequence[str], sure: Sequence[bool]) -> str:
    """For each test, how many of its differences are beyond chance after the correction."""
    counts = {test: [one for name, one in zip(tests, sure, strict=True) if name == test] for test in tests}
    told = (f"{sum(of)} of {len(of)} differences on {test}" for test, of in counts.items())
    return f"After the correction that is shown by {' and '.join(told)}.\n"


def _told_of_low(found: Sequence[tuple[bool, bool]]) -> str:
    sure, above = (sum(column) for column in zip(*found, strict=True))
    end = "that is shown there" if sure else "that they gain most is not shown here"
    return (
        f"Low-resource languages gain more than high-resource ones in {above} of {len(found)} comparisons, by more "
        f"than chance in {sure} of them: {end}.\n"
    )


def _why(losses: Mapping[str, Loss], tokens: float, pairs: Mapping[str, Sequence[int]], temperature: float) -> str:
    """What the numbers of the page say of the reasons."""
    gaps = ", ".join(f"{of.new - of.training:.3f} for {name}" for name, of in losses.items())
    lines = [
        "Each model was trained once: what another seed would change is in no p and in no interval.\n",
        "*Learning by heart.* From training batches to new English the cross entropy rises by "
        f"{gaps} (nats a token; with dropout in training, without it on new English).",
    ]
    names = list(losses)
    for one, other in itertools.pairwise(names):
        a, b = losses[one], losses[other]
        lines[-1] += (
            f" From {one} to {other} it falls by {a.training - b.training:.3f} in training, by {a.known - b.known:.3f} "
            f"on known and by {a.new - b.new:.3f} on new English."
        )
    every = sum(n ** (1 / temperature) for of in pairs.values() for n in of)
    passes = [
        f"{tokens / LEAST * sum(n ** (1 / temperature) for n in of) / every / sum(of):.1f} times for {name} resource"
        for name, of in pairs.items()
    ]
    lines.append(
        f"\n*How often the same text came.* {tokens / 1e6:.2f} M target tokens are at most "
        f"{tokens / LEAST / 1e6:.2f} M "
        f"sentences (none has fewer than {LEAST}), so a pair was drawn at most {', '.join(passes)} on average. How "
        "much of this more experts learn by heart is [measured](results_ablation.md).\n"
    )
    return "\n".join(lines)
