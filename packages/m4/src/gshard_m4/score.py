"""Scores: BLEU and chrF++ of translations, beside two translators that know nothing.

Scores are sacrebleu's, with its signatures, so that they can be compared with those of others. Both follow from counts
of n-grams, which add up over sentences; so sentences are counted once, and the score of any of them is that of a sum.

>>> counts_NK = counted(["the cat sat on it", "no"], ["the cat sat on it", "yes"])
>>> points(counts_NK[0]).round(1).tolist(), points(counts_NK.sum(0)).round(1).tolist()
([100.0, 100.0], [95.5, 93.2])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from sacrebleu.metrics import BLEU, CHRF

ALL = "all"
"""The name of all languages together."""

_BLEU, _CHRF = BLEU(references=[[""]]), CHRF(word_order=2, references=[[""]])
_OF_BLEU = 2 + 2 * _BLEU.max_ngram_order  # counts: lengths, and n-grams that are right and there

SIGNATURE = f"BLEU|{_BLEU.get_signature()} chrF++|{_CHRF.get_signature()}"
"""How sacrebleu computes both."""


def counted(written: Sequence[str], references: Sequence[str]) -> np.ndarray:
    """What the scores of translations follow from, int64 [N, K].

    Args:
        written: translations.
        references: what should have been written, one for each.

    Raises:
        ValueError: the lengths differ, or there is nothing to score.
    """
    if not written or len(written) != len(references):
        raise ValueError(
            "there must be one reference for each translation: "
            f"{len(written)} translations, {len(references)} references"
        )
    sides = [metric._extract_corpus_statistics(list(written), [list(references)]) for metric in (_BLEU, _CHRF)]
    return np.hstack([np.array(side, np.int64) for side in sides])


def points(counts_K: np.ndarray) -> np.ndarray:
    """BLEU and chrF++ (chrF with pairs of words) of a text, 0 to 100, float64 [2].

    Args:
        counts_K: the sum of the counts of its sentences; see `counted`.
    """
    counts = counts_K.tolist()
    sides = (_BLEU, counts[:_OF_BLEU]), (_CHRF, counts[_OF_BLEU:])
    return np.array([float(metric._compute_score_from_stats(own).score) for metric, own in sides])


def baselines(sources: Sequence[str], references: Sequence[str], frequent: str) -> dict[str, np.ndarray]:
    """The counts of two translators that know no language.

    A score says little on short texts that resemble each other, unless it is beside that of the source itself, which
    names and numbers pass through, and that of the most frequent English sentence, whatever the source says.

    Args:
        sources: the sentences to translate.
        references: their translations.
        frequent: the most frequent English sentence of the training data.
    """
    return {
        "copy the source": counted(sources, references),
        "the most frequent sentence": counted([frequent] * len(references), references),
    }


def table(systems: Mapping[str, np.ndarray], labels: Sequence[str]) -> str:
    """Systems side by side, a row for each label and the last for all of them.

    Args:
        systems: name -> counts.
        labels: the row that each sentence belongs to.

    >>> print(table({"copy": counted(["a b c d", "e"], ["a b c d", "f"])}, ["de", "fr"]))
    language  sentences  copy: BLEU  chrF++
    de                1       100.0   100.0
    fr                1         0.0     0.0
    all               2        94.6    93.3
    """
    columns = [f"{name}: BLEU  chrF++" for name in systems]
    wide = max(len("language"), *map(len, labels))
    lines = ["  ".join([f"{'language':<{wide}}", "sentences", *columns])]
    for label in [*sorted(set(labels)), ALL]:
        own_N = np.array([label in (one, ALL) for one in labels])
        scores = [points(counts_NK[own_N].sum(0)) for counts_NK in systems.values()]
        cells = [f"{bleu:.1f} {chrf:>7.1f}" for bleu, chrf in scores]
        padded = [f"{cell:>{len(column)}}" for cell, column in zip(cells, columns, strict=True)]
        lines.append("  ".join([f"{label:<{wide}}", f"{own_N.sum():>9}", *padded]))
    return "\n".join(lines)


def told_apart(what: str, picked: Sequence[bool], counts_NK: np.ndarray) -> str:
    """In a line: how many sentences are of some kind, and what a translator scores on these and on the others.

    Args:
        what: the kind, such as ``have a near twin in training``.
        picked: whether each sentence is of it.
        counts_NK: of what the translator wrote.

    >>> print(told_apart("are long", [True, False], counted(["a b c d", "six"], ["a b c d", "e"])))
    1 of 2 sentences are long: BLEU 100.0, chrF++ 100.0 on these, BLEU 0.0, chrF++ 0.0 on the other 1.
    """
    picked_N = np.array(picked, bool)
    count, others = int(picked_N.sum()), int((~picked_N).sum())
    head = f"{count:,} of {len(picked):,} sentences {what}"
    if not count or not others:
        return f"{head}."
    scores = (points(counts_NK[own_N].sum(0)) for own_N in (picked_N, ~picked_N))
    told = (f"BLEU {bleu:.1f}, chrF++ {chrf:.1f}" for bleu, chrf in scores)
    return f"{head}: {next(told)} on these, {next(told)} on the other {others:,}."
