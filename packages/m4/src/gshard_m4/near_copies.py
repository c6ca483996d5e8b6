"""Near copies: sentences whose translation stands in the source already, and why copying scores what it scores.

A translator that copies its input is right wherever names, numbers, placeholders and words that both languages share
make up the sentence. A score says more where it is known how much of it such sentences give away.

>>> is_near_copy("Python %s installieren", "Install Python %s"), is_near_copy("Datei öffnen", "Open file")
(True, False)
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from gshard_m4.score import told_apart

_WORD = re.compile(r"\w+|%\S+|\{[^{}]*\}")


def is_near_copy(source: str, english: str) -> bool:
    """Whether half of the words of the translation, or more, are in the source."""
    words = [word.casefold() for word in _WORD.findall(english)]
    theirs = {word.casefold() for word in _WORD.findall(source)}
    return bool(words) and 2 * sum(word in theirs for word in words) >= len(words)


def told(sources: Sequence[str], references: Sequence[str], counts_NK: np.ndarray, copies_NK: np.ndarray) -> str:
    """The scores of near copies and of the others, of the model and of copying the source; see `score.told_apart`.

    Args:
        sources, references: the sentences and their translations.
        counts_NK: counts of what the model wrote (`score.counted`).
        copies_NK: counts of the sources as translations.
    """
    near = [is_near_copy(*pair) for pair in zip(sources, references, strict=True)]
    what = "are near copies, with half of their English words in the source"
    of_model, of_copies = (told_apart(what, near, counts) for counts in (counts_NK, copies_NK))
    _, _, scores = of_copies.partition(": ")
    return f"{of_model}\ncopying the source: {scores}" if scores else of_model
