"""By class: scores of high-, medium- and low-resource languages, all sentences of a class together; and of languages.

A score of a few sentences is an accident. So the languages of a class are scored as one text, which has an interval,
and a language has a line of its own only where it has sentences enough.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from gshard_m4 import score
from gshard_m4.corpus.pair import Pair
from gshard_m4.evaluate import CLASSES, Results, resource_classes
from gshard_m4.significance import compare, holm

ALONE = 50
"""Sentences from which on a language has a line of its own."""


@dataclasses.dataclass(frozen=True, slots=True)
class OfClass:
    """The score of a class of languages, or of one.

    Attributes:
        resource: high, medium or low, or all; or the language.
        languages, sentences: how many.
        fewest, most: training pairs of its smallest and its largest language.
        bleu, chrf: of all its sentences together.
        bleu_95, chrf_95: half the width of the intervals that hold 95 % of the samples' scores.
        compared: languages that the baseline has, too.
        delta_bleu, delta_chrf: by how much the model is better than the baseline on their sentences.
        p_bleu, p_chrf: probability of a difference as large by chance; see `gshard_m4.significance`.
        p_bleu_holm, p_chrf_holm: the same, corrected for the number of comparisons: both measures of all classes,
            or of all languages.
        english: different English sentences.
    """

    resource: str
    languages: int
    sentences: int
    fewest: int
    most: int
    bleu: float
    chrf: float
    bleu_95: float
    chrf_95: float
    compared: int = 0
    delta_bleu: float | None = None
    delta_chrf: float | None = None
    p_bleu: float | None = None
    p_chrf: float | None = None
    p_bleu_holm: float | None = None
    p_chrf_holm: float | None = None
    english: int = 0


def by_class(
    results: Results,
    examples: Sequence[Pair],
    translations: Sequence[str],
    theirs: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> list[OfClass]:
    """Scores of each class that has languages, and of all of them.

    Args:
        results: scores of each language.
        examples: what was translated.
        translations: of each.
        theirs: language -> what a baseline wrote for the examples of that language, in their order.
    """
    classes = resource_classes(results)
    groups = {
        name: [code for code in results.languages if name in (classes[code], score.ALL)]
        for name in (*CLASSES, score.ALL)
    }
    return _corrected(
        [_of_class(name, codes, results, examples, translations, theirs) for name, codes in groups.items() if codes]
    )


def by_language(
    results: Results,
    examples: Sequence[Pair],
    translations: Sequence[str],
    theirs: Mapping[str, Sequence[str]] = MappingProxyType({}),
    deltas: Mapping[str, tuple[float, float]] = MappingProxyType({}),
) -> list[OfClass]:
    """Scores of each language, from high to low resource.

    Args:
        results, examples, translations, theirs: see `by_class`.
        deltas: differences to a baseline, which may have kept no translations.
    """
    found = [_of_class(code, [code], results, examples, translations, theirs) for code in results.languages]
    return _corrected(
        [
            dataclasses.replace(row, delta_bleu=deltas[row.resource][0], delta_chrf=deltas[row.resource][1])
            if row.resource in deltas
            else row
            for row in found
        ]
    )


def _corrected(found: Sequence[OfClass]) -> list[OfClass]:
    corrected = holm([p for row in found for p in (row.p_bleu, row.p_chrf)])
    return [
        dataclasses.replace(row, p_bleu_holm=corrected[2 * at], p_chrf_holm=corrected[2 * at + 1])
        for at, row in enumerate(found)
    ]


def _of_class(
    name: str,
    codes: Sequence[str],
    results: Results,
    examples: Sequence[Pair],
    translations: Sequence[str],
    theirs: Mapping[str, Sequence[str]],
) -> OfClass:
    own = [(e, line) for e, line in zip(examples, translations, strict=True) if e.language in codes]
    references, written = [e.english for e, _ in own], [line for _, line in own]
    of = score.score(written, references, [name] * len(own))[name]
    sure = compare(references, written)
    pairs = [results.languages[code].pairs for code in codes]
    found = OfClass(
        name, len(codes), len(own), min(pairs), max(pairs), of.bleu, of.chrf, sure.bleu, sure.chrf,
        english=sure.english,
    )  # fmt: skip
    shared = [code for code in codes if code in theirs]
    if not shared:
        return found
    rows = {code: iter(theirs[code]) for code in shared}
    both = [(e.english, line, next(rows[e.language])) for e, line in own if e.language in rows]
    references, written, by_other = (list(column) for column in zip(*both, strict=True))
    ours, others = (score.score(lines, references, [name] * len(both))[name] for lines in (written, by_other))
    chance = compare(references, written, by_other)
    return dataclasses.replace(
        found, compared=len(shared), delta_bleu=ours.bleu - others.bleu, delta_chrf=ours.chrf - others.chrf,
        p_bleu=chance.bleu_p, p_chrf=chance.chrf_p,
    )  # fmt: skip


def summary(rows: Sequence[OfClass], baseline: str = "") -> str:
    """The rows as text.

    Args:
        rows: of `by_class`.
        baseline: its name.
    """
    compared = any(row.compared for row in rows)
    wide = f"   better than {baseline}: BLEU (p), chrF++ (p), p after Holm" if compared else ""
    head = f"{'resource':<8}  languages  sentences  English  {'pairs of each':>17}"
    lines = [f"{head}  {'BLEU, 95 %':>12}  {'chrF++, 95 %':>12}{wide}"]
    for row in rows:
        line = f"{row.resource:<8}  {row.languages:>9}  {row.sentences:>9}  {row.english:>7}"
        line += f"  {f'{row.fewest:,}-{row.most:,}':>17}"
        line += f"  {f'{row.bleu:.1f} ± {row.bleu_95:.1f}':>12}  {f'{row.chrf:.1f} ± {row.chrf_95:.1f}':>12}"
        if row.delta_bleu is not None and row.delta_chrf is not None:
            chances = ("–" if p is None else f"{p:.3f}" for p in (row.p_bleu_holm, row.p_chrf_holm))
            line += f"   {row.delta_bleu:+.2f} ({next(chances)}), {row.delta_chrf:+.2f} ({next(chances)})"
            if row.compared < row.languages:
                line += f", languages compared: {row.compared}"
        lines.append(line)
    return "\n".join(lines)


def lines_of(results: Results) -> dict[str, str]:
    """The line of a table that each language goes into: its own, or that of its class.

    >>> from gshard_m4.evaluate import OfLanguage
    >>> of = {"de": OfLanguage(9, 50, 0.0, 0.0, ""), "fr": OfLanguage(8, 49, 0.0, 0.0, ""),
    ...       "yo": OfLanguage(7, 3, 0.0, 0.0, "")}
    >>> lines_of(Results("m", of, (0.0, 0.0), ""))
    {'de': 'de', 'fr': '1 medium', 'yo': '1 low'}
    """
    classes = resource_classes(results)
    few = [code for code, of in results.languages.items() if of.sentences < ALONE]
    count = Counter(classes[code] for code in few)
    return {code: f"{count[classes[code]]} {classes[code]}" if code in few else code for code in results.languages}
