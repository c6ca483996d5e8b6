"""By class: scores of high-, medium- and low-resource languages, all sentences of a class together; and of languages.

A score of a few sentences is an accident. So the languages of a class are scored as one text, which has an interval,
and a language has a line of its own only where it has sentences enough.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from gshard_m4.corpus.pair import Pair
from gshard_m4.score import ALL, counted
from gshard_m4.significance import compare, holm

CLASSES = ("high", "medium", "low")
ALONE = 50
"""Sentences from which on a language has a line of its own."""


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
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
        p_bleu_holm, p_chrf_holm: the same, corrected for the number of comparisons: both measures of all rows.
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


@dataclasses.dataclass(frozen=True)
class Scored:
    """Translations of a test, from which the scores of all languages and classes are computed.

    Args:
        examples: what was translated.
        counts_NK: counts of what the model wrote; see `score.counted`.
        pairs: number of training pairs of each language; 0 where it is not known.
        theirs: what a baseline wrote for each example; None where it does not have the language.
    """

    examples: Sequence[Pair]
    counts_NK: np.ndarray
    pairs: Mapping[str, int]
    theirs: Sequence[str | None] = ()

    @property
    def classes(self) -> dict[str, str]:
        """The class of each language that was translated, from high to low resource."""
        codes = {example.language for example in self.examples}
        return resource_classes(sorted(codes, key=lambda code: (-self.pairs.get(code, 0), code)))

    def by_class(self) -> list[Row]:
        """Scores of each class that has languages, and of all of them."""
        classes = self.classes
        groups = {name: [code for code in classes if name in (classes[code], ALL)] for name in (*CLASSES, ALL)}
        return self._rows({name: codes for name, codes in groups.items() if codes})

    def by_language(self) -> list[Row]:
        """Scores of each language, from high to low resource."""
        return self._rows({code: [code] for code in self.classes})

    def lines(self) -> list[str]:
        """The line of a table that each example goes into: that of its language, or of those of a class that are small.

        >>> examples = [Pair(code, "", "") for code, count in (("de", 50), ("fr", 2), ("yo", 1)) for _ in range(count)]
        >>> Scored(examples, np.zeros((53, 1)), {"de": 9, "fr": 8, "yo": 7}).lines()[-4:]
        ['de', '1 medium', '1 medium', '1 low']
        """
        classes, sentences = self.classes, Counter(example.language for example in self.examples)
        few = Counter(classes[code] for code, count in sentences.items() if count < ALONE)
        return [
            code if sentences[code] >= ALONE else f"{few[classes[code]]} {classes[code]}"
            for code, _, _ in self.examples
        ]

    def _rows(self, groups: Mapping[str, Sequence[str]]) -> list[Row]:
        found = [self._row(name, codes) for name, codes in groups.items()]
        corrected = iter(holm([p for row in found for p in (row.p_bleu, row.p_chrf)]))
        return [dataclasses.replace(row, p_bleu_holm=next(corrected), p_chrf_holm=next(corrected)) for row in found]

    def _row(self, name: str, codes: Sequence[str]) -> Row:
        own = [at for at, example in enumerate(self.examples) if example.language in codes]
        sure = compare([self.examples[at].english for at in own], self.counts_NK[own])
        pairs = [self.pairs.get(code, 0) for code in codes]
        (bleu, chrf), (bleu_95, chrf_95) = sure.score, sure.half
        found = Row(
            name, len(codes), len(own), min(pairs), max(pairs), bleu, chrf, bleu_95, chrf_95, english=sure.english
        )
        both = {at: theirs for at in own if self.theirs and (theirs := self.theirs[at]) is not None}
        if not both:
            return found
        references = [self.examples[at].english for at in both]
        chance = compare(references, self.counts_NK[list(both)], counted(list(both.values()), references))
        compared = len({self.examples[at].language for at in both})
        (delta_bleu, delta_chrf), (p_bleu, p_chrf) = chance.delta, chance.p
        return dataclasses.replace(
            found, compared=compared, delta_bleu=delta_bleu, delta_chrf=delta_chrf, p_bleu=p_bleu, p_chrf=p_chrf
        )


def resource_classes(codes: Sequence[str]) -> dict[str, str]:
    """high, medium or low for each language: a quarter, half and a quarter of them, by training pairs.

    These are the shares of Arivazhagan et al. (2019), 25, 52 and 25 of 102 languages.

    Args:
        codes: languages, from the most to the fewest training pairs.

    >>> list(resource_classes([str(n) for n in range(8)]).values())
    ['high', 'high', 'medium', 'medium', 'medium', 'medium', 'low', 'low']
    """
    quarter = round(len(codes) * 25 / 102)
    return {
        code: CLASSES[0] if at < quarter else CLASSES[2] if at >= len(codes) - quarter else CLASSES[1]
        for at, code in enumerate(codes)
    }


def summary(rows: Sequence[Row], baseline: str = "") -> str:
    """The rows as text.

    Args:
        rows: of `Scored.by_class`.
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
