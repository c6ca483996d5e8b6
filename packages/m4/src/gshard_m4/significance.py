"""Significance: how sure a score is, and whether one system is better than another by more than chance.

A test has each English sentence once for every language that translates it, and a model that fails at a sentence fails
at it in most of them. So not sentences but clusters are drawn again, with replacement, a thousand times (Koehn, 2004;
Cameron, Gelbach and Miller, 2008): a cluster has all pairs of one English sentence. The scores of the samples give an
interval around a score. For two systems, both scored on the same samples, p is the share of samples whose difference is
further from the mean of these differences, on either side, than the measured difference is from 0.

Several p-values are corrected together by `holm`.

>>> english = [f"open the new file number {'abcdefghijklmnopqrstuvwxyz'[n]} now" for n in range(26)]
>>> worse = [line.replace("file", "door") if n % 2 else line for n, line in enumerate(english)]
>>> found = compare(english, english, worse)
>>> found.bleu_p < 0.01, compare(english, english, english).bleu_p
(True, 1.0)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from sacrebleu.metrics import BLEU, CHRF

from gshard_m4.corpus import hold_out

SAMPLES = 1000
FEWEST = 10
"""English sentences below which there is no p: samples of so few say nothing of others."""

_SEED = 12345
_AT_ONCE = 100  # samples


@dataclasses.dataclass(frozen=True, slots=True)
class Sureness:
    """How sure the scores of some translations are.

    Attributes:
        bleu, chrf: half the width of the interval that holds 95 % of the samples' scores.
        bleu_p, chrf_p: probability of a difference as large between systems that are equally good, not corrected for
            the number of comparisons; None if there is nothing to compare with, or fewer than `FEWEST` English
            sentences.
        english: different English sentences, the clusters that were drawn.
    """

    bleu: float
    chrf: float
    bleu_p: float | None = None
    chrf_p: float | None = None
    english: int = 0


def compare(references: Sequence[str], ours: Sequence[str], theirs: Sequence[str] | None = None) -> Sureness:
    """Intervals of our scores, and whether they differ from another system's.

    Args:
        references: what should have been written. Those that differ in case, digits and punctuation only are one
            cluster.
        ours: what was.
        theirs: what a baseline wrote.
    """
    cluster_N, count = _clusters(references)
    draws_SC = _draws(count)
    halves: list[float] = []
    chances: list[float | None] = []
    for metric in (BLEU(), CHRF(word_order=2)):
        scores_S, score = _samples(metric, ours, references, cluster_N, draws_SC)
        low, high = np.percentile(scores_S, [2.5, 97.5])
        halves.append(float(high - low) / 2)
        if theirs is None or count < FEWEST:
            chances.append(None)
            continue
        others_S, other = _samples(metric, theirs, references, cluster_N, draws_SC)
        differences_S = scores_S - others_S
        further_S = np.abs(differences_S - differences_S.mean()) >= abs(score - other)
        chances.append(float((1 + further_S.sum()) / (1 + SAMPLES)))
    return Sureness(halves[0], halves[1], chances[0], chances[1], count)


def holm(chances: Sequence[float | None]) -> list[float | None]:
    """P-values corrected for their number (Holm, 1979): the probability of one as small anywhere among them.

    Args:
        chances: of one family of comparisons; None for what was not compared, which does not count.

    >>> holm([0.01, 0.04, None, 0.03])
    [0.03, 0.06, None, 0.06]
    """
    order = sorted((p, at) for at, p in enumerate(chances) if p is not None)
    found: list[float | None] = [None] * len(chances)
    least = 0.0
    for rank, (p, at) in enumerate(order):
        found[at] = least = max(least, min(1.0, round((len(order) - rank) * p, 12)))
    return found


def _clusters(references: Sequence[str]) -> tuple[np.ndarray, int]:
    """The number of each reference's cluster, int64 [N], and how many clusters there are."""
    numbers: dict[str, int] = {}
    of = [numbers.setdefault(hold_out.key(english) or english, len(numbers)) for english in references]
    return np.array(of), len(numbers)


def _draws(count: int) -> np.ndarray:
    """How often each sample has each cluster, int64 [S, C]."""
    rng = np.random.default_rng(_SEED)
    even = np.full(count, 1 / count)
    blocks = [rng.multinomial(count, even, min(_AT_ONCE, SAMPLES - at)) for at in range(0, SAMPLES, _AT_ONCE)]
    return np.concatenate(blocks)


def _samples(
    metric: BLEU | CHRF, written: Sequence[str], references: Sequence[str], cluster_N: np.ndarray, draws_SC: np.ndarray
) -> tuple[np.ndarray, float]:
    """The scores of the samples, float64 [S], and that of the whole text.

    Counts of n-grams add up over sentences, so each cluster is counted once.
    """
    counts_NK = np.array(metric._extract_corpus_statistics(list(written), [list(references)]), np.int64)
    counts_CK = np.zeros((draws_SC.shape[1], counts_NK.shape[1]), np.int64)
    np.add.at(counts_CK, cluster_N, counts_NK)
    scores_S = [float(metric._compute_score_from_stats(counts_K).score) for counts_K in (draws_SC @ counts_CK).tolist()]
    return np.array(scores_S), float(metric._compute_score_from_stats(counts_CK.sum(0).tolist()).score)
