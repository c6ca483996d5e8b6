"""Debian packages: all translations that a program's package ships, in one pass over its files."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from gshard_m4.corpus import help_pages, qt
from gshard_m4.corpus.archive import members
from gshard_m4.corpus.gettext import catalogue, pairs
from gshard_m4.corpus.language import language
from gshard_m4.corpus.pair import Pair, Unreadable
from gshard_m4.corpus.sentences import align

# Where programs put the catalogue of a language, the usual place first.
_GETTEXT = (
    re.compile(r"/(?:locale|locales|translations|resource|i18n|languages)/([A-Za-z_@.-]+)/(?:LC_MESSAGES|LC_SCRIPTS)/"),
    re.compile(r"/([a-z]{2,3}(?:[_-][A-Za-z]{2,4})?(?:@[a-z]+)?)\.mo$"),
    re.compile(r"-([a-z]{2,3}(?:_[A-Z]{2,3})?(?:@?[a-z]*))\.mo$"),
    re.compile(r"/([a-z]{2,3}(?:_[A-Z]{2})?(?:@[a-z]+)?)/[^/]+\.mo$"),
)
_QT = (
    re.compile(r"[_.-]([a-z]{2,3}(?:[_-][A-Z]{2}|[_-][A-Z][a-z]{3})?(?:@[a-z]+)?)\.qm$"),
    re.compile(r"/([a-z]{2,3}(?:_[A-Z]{2})?)\.qm$"),
    re.compile(r"/locale/([a-z]{2,3}(?:_[A-Z]{2})?(?:@[a-z]+)?)/"),
)
_ORIGINAL = ("C", "en")


def read(files: Sequence[Path]) -> Iterator[Pair | Unreadable]:
    """Catalogues of gettext and Qt, and help pages."""
    for file in files:
        pages: dict[str, dict[str, list[tuple[str, str]]]] = defaultdict(dict)
        for name, data in members(file, _wanted):
            if name.endswith(".mo"):
                of_language = _language(name, _GETTEXT)
                if of_language:
                    yield from pairs(name, of_language, catalogue(name, data))
            elif name.endswith(".qm"):
                of_language = _language(name, _QT)
                if of_language:
                    yield from _qt_pairs(name, of_language, data)
            else:
                found = help_pages.PAGE.search(name)
                blocks = help_pages.blocks(data)
                if found and blocks:
                    pages[found.group(2) or found.group(4)][found.group(1) or found.group(3)] = blocks
        yield from _page_pairs(pages)


def _wanted(name: str) -> bool:
    page = name.endswith((".page", ".docbook", ".xml")) and help_pages.PAGE.search(name) is not None
    return page or name.endswith((".mo", ".qm"))


def _language(name: str, places: Sequence[re.Pattern[str]]) -> str | None:
    found = next(filter(None, (place.search(name) for place in places)), None)
    return language(found.group(1)) if found else None


def _qt_pairs(name: str, of_language: str, data: bytes) -> Iterator[Pair | Unreadable]:
    try:
        for english, foreign in qt.messages(data):
            yield Pair(of_language, foreign, english)
    except ValueError as error:
        yield Unreadable(name, str(error))


def _page_pairs(pages: dict[str, dict[str, list[tuple[str, str]]]]) -> Iterator[Pair]:
    for versions in pages.values():
        english = next((versions[code] for code in _ORIGINAL if code in versions), None)
        for code, foreign in versions.items() if english else ():
            of_language = language(code)
            if of_language and code not in _ORIGINAL:
                yield from (Pair(of_language, theirs, ours) for ours, theirs in align(english or [], foreign))
