"""Finds near twins: two sentences with almost the same English, one in a test and one in training.

A model that has learnt *motion sensor* by heart translates *motion sense* well, and knows no more for it. Two sentences
are near twins if four fifths of their letters are common to both, in order (`rapidfuzz.fuzz.ratio` of their keys is at
least 80), whatever their length.

>>> english = NearTwins(["motion sensor", "the dog sees the cat"])
>>> [english.has(key) for key in ("motion sense", "motion sensor", "the cat")]
[True, True, False]
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable

from rapidfuzz import fuzz, process

RATIO = 80
"""Per cent of the letters of both sentences, from which on they are near twins."""

_SHORTER = RATIO / (200 - RATIO)  # a near twin has at least so many times the letters


class NearTwins:
    """Some English sentences, by their keys (`gshard_m4.corpus.hold_out.key`), in which near twins are looked for."""

    def __init__(self, keys: Iterable[str]):
        ordered = sorted((len(key), key) for key in set(keys))
        self._lengths = [length for length, _ in ordered]
        self._keys = [key for _, key in ordered]

    def has(self, key: str, *, besides_itself: bool = False) -> bool:
        """Whether there is a near twin of a sentence.

        Args:
            key: of the sentence.
            besides_itself: the sentence is one of these itself, and is no twin of its own.
        """
        shortest, longest = math.ceil(len(key) * _SHORTER), math.floor(len(key) / _SHORTER)
        first = bisect.bisect_left(self._lengths, shortest)
        last = bisect.bisect_right(self._lengths, longest)
        keys = self._keys[first:last]
        if besides_itself:
            keys = [other for other in keys if other != key]
        return process.extractOne(key, keys, scorer=fuzz.ratio, score_cutoff=RATIO) is not None
