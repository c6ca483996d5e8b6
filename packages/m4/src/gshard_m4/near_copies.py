"""Near copies: sentences whose translation stands in the source already, and why copying scores what it scores.

A translator that copies its input is right wherever names, numbers, placeholders and words that both languages share
make up the sentence. A score says more where it is known how much of it such sentences give away.

>>> is_near_copy("Python %s installieren", "Install Python %s"), is_near_copy("Datei öffnen", "Open file")
(True, False)
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from gshard_m4 import score

_WORD = re.compile(r"\w+|%\S+|\{[^{}]*\}")


def is_near_copy(source: str, english: str) -> bool:
    """Whether half of the words of the translation, or more, are in the source."""
    words = [word.casefold() for word in _WORD.findall(english)]
    theirs = {word.casefold() for word in _WORD.findall(source)}
    return bool(words) and 2 * sum(word in theirs for word in words) >= len(words)


def told_apart(what: str, picked: Sequence[bool], references: Sequence[str], written: Sequence[str]) -> str:
    """In a line: how many sentences are of some kind, and what a translator scores on these and on the others.

    Args:
        what: the kind, such as ``have a near twin in training``.
        picked: whether each sentence is of it.
        references: their translations.
        written: what the translator wrote.

    >>> print(told_apart("are long", [True, False], ["one two three four", "five"], ["one two three four", "six"]))
    1 of 2 sentences are long: BLEU 100.0, chrF++ 100.0 on these, BLEU 0.0, chrF++ 6.6 on the other 1.
    """
    count = sum(picked)
    head = f"{count:,} of {len(picked):,} sentences {what}"
    if count in (0, len(picked)):
        return f"{head}."
    found = score.score(written, references, ["these" if one else "others" for one in picked])
    ours, others = (f"BLEU {of.bleu:.1f}, chrF++ {of.chrf:.1f}" for of in (found["these"], found["others"]))
    return f"{head}: {ours} on these, {others} on the other {len(picked) - count:,}."


def told_longer(room: int, cut: Sequence[bool], references: Sequence[str], written: Sequence[str]) -> str:
    """The scores of sentences that are longer than the model reads, and of the others; see `told_apart`."""
    what = f"are longer than the {room} tokens that the model reads, and were translated without their end"
    return told_apart(what, cut, references, written)


def told_twins(twins: Sequence[bool], references: Sequence[str], written: Sequence[str]) -> str:
    """The scores of sentences that have a near twin in training, and of the others; see `told_apart`."""
    return told_apart("have a near twin in training (80 % of the letters)", twins, references, written)


def told(sources: Sequence[str], references: Sequence[str], written: Sequence[str]) -> str:
    """The scores of near copies, and of the others, of the model and of copying the source; see `told_apart`.

    >>> print(told(["Django 5", "a b"], ["Django 5", "c d"], ["Django 6", "c d"]))
    1 of 2 sentences are near copies, with half of their English words in the source: BLEU 0.0, chrF++ 61.3 on these, \
BLEU 0.0, chrF++ 100.0 on the other 1.
    copying the source: BLEU 0.0, chrF++ 100.0 on these, BLEU 0.0, chrF++ 0.0 on the other 1.
    """
    near = [is_near_copy(*pair) for pair in zip(sources, references, strict=True)]
    what = "are near copies, with half of their English words in the source"
    of_model, of_copies = (told_apart(what, near, references, lines) for lines in (written, sources))
    _, _, scores = of_copies.partition(": ")
    return f"{of_model}\ncopying the source: {scores}" if scores else of_model
