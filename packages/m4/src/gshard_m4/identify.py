"""Identifying the language of a text, by how often each piece of the source vocabulary occurs in each language.

Pieces are taken as independent (naive Bayes), all languages as equally likely, and each language's counts are smoothed
with those of all of them. That is enough to tell a reader what the text was taken for; the model does not ask.

>>> counts_LV = np.array([[9, 1, 0], [1, 9, 0]])
>>> Identifier(("de", "fr"), log_frequencies(counts_LV)).of([0, 0, 1, 0])
'de'
"""

from __future__ import annotations

import dataclasses

import numpy as np

from gshard_m4.encoded import Encoded

_PAIRS = 20_000  # of a language, which are counted
_SHARE = 0.1  # of a language's probabilities that all languages decide
_SURE = 0.9  # the probability from which on an answer is given
_LEAST = 3  # pieces that a text must have


@dataclasses.dataclass(frozen=True)
class Identifier:
    """Tells languages apart.

    Attributes:
        languages: their names.
        log_LV: for each of them the log-frequencies of the source ids, float32.
    """

    languages: tuple[str, ...]
    log_LV: np.ndarray

    def of(self, ids: list[int]) -> str | None:
        """The language of source ids; None if it is not sure.

        Args:
            ids: of all lines of a text.
        """
        if len(ids) < _LEAST or not self.languages:
            return None
        log_L = self.log_LV[:, ids].sum(axis=1, dtype=np.float64)
        at = int(np.argmax(log_L))
        return self.languages[at] if 1.0 / np.exp(log_L - log_L[at]).sum() >= _SURE else None


def log_frequencies(counts_LV: np.ndarray) -> np.ndarray:
    """Log-frequencies of ids in each language, float32; never minus infinity.

    Args:
        counts_LV: how often each id occurs.
    """
    of_all_V = counts_LV.sum(axis=0) + 1.0
    of_all_V /= of_all_V.sum()
    own_LV = counts_LV / np.maximum(counts_LV.sum(axis=1, keepdims=True), 1)
    return np.log((1 - _SHARE) * own_LV + _SHARE * of_all_V).astype(np.float32)


def learn(data: Encoded, vocabulary: int) -> Identifier:
    """Counts the first pairs of each language.

    Args:
        data: the training pairs.
        vocabulary: number of source ids.
    """
    language_N = np.asarray(data.language)
    order_N = np.argsort(language_N, kind="stable")
    first_L = np.searchsorted(language_N[order_N], np.arange(len(data.languages) + 1))
    counts_LV = np.zeros((len(data.languages), vocabulary), np.int64)
    for at in range(len(data.languages)):
        pairs = order_N[first_L[at] : min(first_L[at + 1], first_L[at] + _PAIRS)]
        ids = [data.source[data.source_at[pair] : data.source_at[pair + 1]] for pair in pairs]
        if ids:
            counts_LV[at] = np.bincount(np.concatenate(ids), minlength=vocabulary)[:vocabulary]
    return Identifier(data.languages, log_frequencies(counts_LV))
