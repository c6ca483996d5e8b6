"""Sentences: paragraphs that belong together, split into sentences where both sides split alike.

>>> list(split("It is here. You can take it.", "Es ist da. Du kannst es nehmen."))
[('It is here.', 'Es ist da.'), ('You can take it.', 'Du kannst es nehmen.')]
>>> list(split("It is here. You can take it.", "Es ist da, nimm es nur."))
[('It is here. You can take it.', 'Es ist da, nimm es nur.')]
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

_END = re.compile(r"(?<=[.!?。！？])\s+(?=[^\sa-z])")


def split(english: str, foreign: str) -> Iterator[tuple[str, str]]:
    """English and foreign sentences; the whole paragraphs if they have not as many, or very different lengths."""
    ours, theirs = _END.split(english), _END.split(foreign)
    if len(ours) == len(theirs) > 1 and all(0.4 < (len(b) + 10) / (len(a) + 10) < 2.5 for a, b in zip(ours, theirs)):
        yield from zip(ours, theirs)
    else:
        yield english, foreign


def align(english: Sequence[tuple[str, str]], foreign: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Sentences of two documents given as (kind, text) blocks; nothing if their structures differ.

    >>> list(align([("title", "The river"), ("p", "It flows.")], [("title", "Der Fluss"), ("p", "Er fließt.")]))
    [('The river', 'Der Fluss'), ('It flows.', 'Er fließt.')]
    """
    if [kind for kind, _ in english] == [kind for kind, _ in foreign]:
        for (_, ours), (_, theirs) in zip(english, foreign):
            yield from split(ours, theirs)
