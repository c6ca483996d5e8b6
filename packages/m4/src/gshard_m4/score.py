"""Scores: BLEU and chrF++ of translations.

Scores are sacrebleu's, with its signatures, so that they can be compared with those of others. Both follow from counts
of n-grams, which add up over sentences; so sentences are counted once, and the score of any of them is that of a sum.

>>> counts_NK = counted(["the cat sat on it", "no"], ["the cat sat on it", "yes"])
>>> points(counts_NK[0]).round(1).tolist(), points(counts_NK.sum(0)).round(1).tolist()
([100.0, 100.0], [95.5, 93.2])
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np
from sacrebleu.metrics import BLEU, CHRF

ALL = "all"
"""The name of all languages together."""

_BLEU, _CHRF = BLEU(references=[[""]]), CHRF(word_order=2, references=[[""]])
_OF_BLEU = 2 + 2 * _BLEU.max_ngram_order  # counts: lengths, and n-grams that are right and there

SIGNATURE = f"BLEU|{_BLEU.get_signature()} chrF++|{_CHRF.get_signature()}"
"""How sacrebleu computes both."""

_WORD = re.compile(r"\w+|%\S+|\{[^{}]*\}")


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


def told_apart(what: str, picked: Sequence[bool], counts_NK: np.ndarray, copies_NK: np.ndarray | None = None) -> str:
    """In a line: how many sentences are of some kind, and what a translator scores on these and on the others.

    Args:
        what: the kind, such as ``have a near twin in training``.
        picked: whether each sentence is of it.
        counts_NK: of what the translator wrote.
        copies_NK: of the sources, whose scores follow in another line.

    >>> print(told_apart("are long", [True, False], counted(["a b c d", "six"], ["a b c d", "e"])))
    1 of 2 sentences are long: BLEU 100.0, chrF++ 100.0 on these, BLEU 0.0, chrF++ 0.0 on the other 1.
    """
    picked_N = np.array(picked, bool)
    count, others = int(picked_N.sum()), int((~picked_N).sum())
    head = f"{count:,} of {len(picked):,} sentences {what}"
    if not count or not others:
        return f"{head}."
    told = []
    for own_NK in (counts_NK,) if copies_NK is None else (counts_NK, copies_NK):
        scores = (points(own_NK[own_N].sum(0)) for own_N in (picked_N, ~picked_N))
        these, the_others = (f"BLEU {bleu:.1f}, chrF++ {chrf:.1f}" for bleu, chrf in scores)
        told.append(f": {these} on these, {the_others} on the other {others:,}.")
    return head + "\ncopying the source".join(told)


def is_near_copy(source: str, english: str) -> bool:
    """Whether half of the words of the translation, or more, are in the source, so that copying it scores much.

    >>> is_near_copy("Python %s installieren", "Install Python %s"), is_near_copy("Datei öffnen", "Open file")
    (True, False)
    """
    words = [word.casefold() for word in _WORD.findall(english)]
    theirs = {word.casefold() for word in _WORD.findall(source)}
    return bool(words) and 2 * sum(word in theirs for word in words) >= len(words)
