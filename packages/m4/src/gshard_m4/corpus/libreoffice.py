"""LibreOffice: the component of its source package that holds all translations, of programs and of their help."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from gshard_m4.corpus.archive import members
from gshard_m4.corpus.gettext import catalogue, pairs
from gshard_m4.corpus.language import language
from gshard_m4.corpus.pair import Pair, Unreadable

_FILE = re.compile(r"translations/source/([^/]+)/.*\.po$")
_NO_TEXT = ("/autotext", "/autocorr")
# Help text is said once for each operating system, and has descriptions of pictures and entries of the index in it.
_INSIDE = re.compile(
    r"<(caseinline)[^>]*>.*?</caseinline>|<alt[^>]*>.*?</alt>|<bookmark_value>.*?</bookmark_value>", re.S
)


def read(files: Sequence[Path]) -> Iterator[Pair | Unreadable]:
    """Every translated entry."""
    for file in files:
        for name, data in members(file, lambda name: name.endswith(".po")):
            found = _FILE.search(name)
            of_language = language(found.group(1)) if found else None
            if of_language is None or any(part in name for part in _NO_TEXT):
                continue
            help_text = "helpcontent2" in name
            for item in pairs(name, of_language, catalogue(name, data)):
                if not help_text or isinstance(item, Unreadable):
                    yield item
                elif "<bookmark_value>" not in item.english:
                    yield Pair(of_language, _INSIDE.sub("", item.foreign), _INSIDE.sub("", item.english))
