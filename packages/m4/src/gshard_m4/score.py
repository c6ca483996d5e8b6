"""Scores: BLEU and chrF++ of translations, of each language and of all, beside two translators that know nothing.

Scores are sacrebleu's, with its signatures, so that they can be compared with those of others. A score alone says
little on short texts that resemble each other; so two baselines are scored with it: the source itself, which names
and numbers pass through, and the most frequent English sentence of the training data, whatever the source says.

>>> scores = score(["the cat sat on it"], ["the cat sat on it"], ["de"])
>>> print(scores["all"])
BLEU 100.0, chrF++ 100.0 on 1 sentence
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from sacrebleu.metrics import BLEU, CHRF

ALL = "all"
"""The key of the score over all languages together."""


@dataclasses.dataclass(frozen=True, slots=True)
class Score:
    """The quality of a set of translations.

    Attributes:
        bleu: corpus BLEU, 0 to 100.
        chrf: corpus chrF++ (chrF with pairs of words), 0 to 100.
        sentences: how many were scored.
        signature: how sacrebleu computed both.
    """

    bleu: float
    chrf: float
    sentences: int
    signature: str

    def __str__(self) -> str:
        count = f"{self.sentences} sentence{'s' if self.sentences != 1 else ''}"
        return f"BLEU {self.bleu:.1f}, chrF++ {self.chrf:.1f} on {count}"


def score(translations: Sequence[str], references: Sequence[str], languages: Sequence[str]) -> dict[str, Score]:
    """Scores translations for each language, and all together under `ALL`.

    Args:
        translations: what was written, one for each sentence.
        references: what should have been.
        languages: of the sources.

    Raises:
        ValueError: the lengths differ, or there is nothing to score.
    """
    if not translations or not len(translations) == len(references) == len(languages):
        raise ValueError(
            f"there must be one reference and one language for each translation: {len(translations)} translations, "
            f"{len(references)} references, {len(languages)} languages"
        )
    rows: dict[str, list[int]] = {}
    for i, language in enumerate(languages):
        rows.setdefault(language, []).append(i)
    wanted = {language: rows[language] for language in sorted(rows)} | {ALL: list(range(len(languages)))}
    return {
        language: _score([translations[i] for i in at], [references[i] for i in at]) for language, at in wanted.items()
    }


def baselines(
    sources: Sequence[str], references: Sequence[str], languages: Sequence[str], frequent: str
) -> dict[str, dict[str, Score]]:
    """The scores of two translators that know no language.

    Args:
        sources: the sentences to translate.
        references: their translations.
        languages: of the sources.
        frequent: the most frequent English sentence of the training data.
    """
    return {
        "copy the source": score(sources, references, languages),
        "the most frequent sentence": score([frequent] * len(references), references, languages),
    }


def table(systems: Mapping[str, Mapping[str, Score]]) -> str:
    """Systems side by side, a row for each language and the last for all of them.

    >>> print(table({"copy": score(["a b c d", "e"], ["a b c d", "f"], ["de", "fr"])}))
    language  sentences  copy: BLEU  chrF++
    de                1       100.0   100.0
    fr                1         0.0     0.0
    all               2        94.6    93.3
    """
    names = list(systems)
    columns = [f"{name}: BLEU  chrF++" for name in names]
    languages = list(systems[names[0]])
    wide = max(len("language"), *map(len, languages))
    lines = ["  ".join([f"{'language':<{wide}}", "sentences", *columns])]
    for language in languages:
        cells = [f"{s[language].bleu:.1f} {s[language].chrf:>7.1f}" for s in systems.values()]
        padded = [f"{cell:>{len(column)}}" for cell, column in zip(cells, columns, strict=True)]
        count = systems[names[0]][language].sentences
        lines.append("  ".join([f"{language:<{wide}}", f"{count:>9}", *padded]))
    return "\n".join(lines)


def _score(translations: list[str], references: list[str]) -> Score:
    bleu, chrf = BLEU(), CHRF(word_order=2)
    b = bleu.corpus_score(translations, [references])
    c = chrf.corpus_score(translations, [references])
    signature = f"BLEU|{bleu.get_signature()} chrF++|{chrf.get_signature()}"
    return Score(float(b.score), float(c.score), len(translations), signature)
