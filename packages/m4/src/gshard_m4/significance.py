"""Significance: how sure a score is, and whether one system is better than another by more than chance.

A test has each English sentence once for every language that translates it, and a model that fails at a sentence fails
at it in most of them. So not sentences but clusters are drawn again, with replacement, a thousand times (Koehn, 2004;
Cameron, Gelbach and Miller, 2008): a cluster has all pairs of one English sentence. The scores of the samples give an
interval around a score. For two systems, both scored on the same samples, p is the share of samples whose difference is
further from the mean of these differences, on either side, than the measured difference is from 0.

Several p-values are corrected together by `holm`.

>>> from gshard_m4.score import counted
>>> english = [f"open the new file number {'abcdefghijklmnopqrstuvwxyz'[n]} now" for n in range(26)]
>>> right, worse = (counted([line.replace("file", word) for line in english], english) for word in ("file", "door"))
>>> max(compare(english, right, worse).p) < 0.01, compare(english, right, right).p
(True, [1.0, 1.0])
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gshard_m4.corpus import hold_out
from gshard_m4.score import points

SAMPLES = 1000
FEWEST = 10
"""English sentences below which there is no p: samples of so few say nothing of others."""

_SEED = 12345


class Sureness(NamedTuple):
    """The scores of some translations, and how sure they are; each of BLEU and of chrF++.

    Attributes:
        english: different English sentences, the clusters that were drawn.
        score: of the translations.
        half: half the width of the interval that holds 95 % of the samples' scores.
        delta: by how much the score is better than another system's; None if there is nothing to compare with.
        p: probability of a difference as large between systems that are equally good, not corrected for the number
            of comparisons; None if there is nothing to compare with, or fewer than `FEWEST` English sentences.
    """

    english: int
    score: Sequence[float]
    half: Sequence[float]
    delta: Sequence[float | None] = (None, None)
    p: Sequence[float | None] = (None, None)


def compare(references: Sequence[str], ours_NK: np.ndarray, theirs_NK: np.ndarray | None = None) -> Sureness:
    """Intervals of our scores, and whether they differ from another system's.

    Args:
        references: what should have been written. Those that differ in case, digits and punctuation only are one
            cluster.
        ours_NK: counts of what was written; see `score.counted`.
        theirs_NK: counts of what a baseline wrote.
    """
    cluster_N, count = _clusters(references)
    draws_SC = np.random.default_rng(_SEED).multinomial(count, np.full(count, 1 / count), SAMPLES)
    score_M, samples_MS = _samples(ours_NK, cluster_N, draws_SC)
    low_M, high_M = np.percentile(samples_MS, [2.5, 97.5], axis=1)
    found = Sureness(count, score_M.tolist(), ((high_M - low_M) / 2).tolist())
    if theirs_NK is None:
        return found
    other_M, others_MS = _samples(theirs_NK, cluster_N, draws_SC)
    delta_M, deltas_MS = score_M - other_M, samples_MS - others_MS
    further_MS = np.abs(deltas_MS - deltas_MS.mean(1, keepdims=True)) >= np.abs(delta_M)[:, None]
    p_M = (1 + further_MS.sum(1)) / (1 + SAMPLES)
    return found._replace(delta=delta_M.tolist(), p=found.p if count < FEWEST else p_M.tolist())


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


def _samples(counts_NK: np.ndarray, cluster_N: np.ndarray, draws_SC: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The scores of the whole text, float64 [2], and those of samples that have each cluster so often, [2, S]."""
    counts_CK = np.zeros((draws_SC.shape[1], counts_NK.shape[1]), np.int64)
    np.add.at(counts_CK, cluster_N, counts_NK)
    samples = [points(counts_K) for counts_K in draws_SC @ counts_CK]
    return points(counts_CK.sum(0)), np.ascontiguousarray(np.transpose(samples))
