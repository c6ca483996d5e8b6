"""JOSM's catalogues (.lang): all strings in the order of English, each after its length in two bytes.

First the single strings, then those with plural forms, each after the number of its forms.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from gshard_m4.corpus.archive import members
from gshard_m4.corpus.language import language
from gshard_m4.corpus.pair import Pair, Unreadable

_PLURALS_FOLLOW, _AS_ENGLISH = 0xFFFF, 0xFFFE
_NONE, _FORMS_AS_ENGLISH = 0, 0xFE
_CONTEXT = re.compile(r"^___.*?___")


def read(files: Sequence[Path]) -> Iterator[Pair | Unreadable]:
    """Every translated string."""
    for file in files:
        catalogues = {PurePosixPath(name).stem: data for name, data in members(file, lambda n: n.endswith(".lang"))}
        if "en" not in catalogues:
            continue
        singles, plurals = strings(catalogues.pop("en"))
        for code, data in sorted(catalogues.items()):
            of_language = language(code)
            if of_language is None:
                continue
            try:
                their_singles, their_plurals = strings(data)
            except IndexError:
                yield Unreadable(f"{code}.lang", "the catalogue is cut")
                continue
            for ours, theirs in zip(singles, their_singles):
                if ours and theirs:
                    yield Pair(of_language, theirs, _CONTEXT.sub("", ours))
            for our_forms, their_forms in zip(plurals, their_plurals):
                if our_forms and their_forms:
                    yield Pair(of_language, their_forms[0], _CONTEXT.sub("", our_forms[0]))
                    if len(our_forms) > 1 and len(their_forms) > 1:
                        yield Pair(of_language, their_forms[-1], _CONTEXT.sub("", our_forms[-1]))


def strings(data: bytes) -> tuple[list[str], list[list[str]]]:
    r"""Single strings and lists of plural forms; empty where there is no translation, or it is as in English.

    >>> strings(b"\0\2No\xff\xfe\xff\xff\2\0\4page\0\5pages")
    (['No', ''], [['page', 'pages']])

    Raises:
        IndexError: the file is cut.
    """
    singles: list[str] = []
    plurals: list[list[str]] = []
    at = 0
    while at < len(data):
        size = _size(data, at)
        at += 2
        if size == _PLURALS_FOLLOW:
            break
        if size == _AS_ENGLISH:
            size = 0
        singles.append(data[at : at + size].decode("utf-8", "replace"))
        at += size
    while at < len(data):
        count = data[at]
        at += 1
        forms: list[str] = []
        for _ in range(0 if count in (_NONE, _FORMS_AS_ENGLISH) else count):
            size = _size(data, at)
            forms.append(data[at + 2 : at + 2 + size].decode("utf-8", "replace"))
            at += 2 + size
        plurals.append(forms)
    return singles, plurals


def _size(data: bytes, at: int) -> int:
    return data[at] << 8 | data[at + 1]
