"""Translation catalogues of GNU gettext (.po, .mo)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import polib

from gshard_m4.corpus.archive import members
from gshard_m4.corpus.language import language
from gshard_m4.corpus.pair import Pair, Unreadable

_CHARSET = re.compile(rb'"Content-Type:[^"\n]*charset=([A-Za-z0-9][\w.-]*)')
_SEPARATORS = re.compile("[\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")
_IN_WHEEL = re.compile(r"(?:^|/)locale/([^/]+)/LC_MESSAGES/[^/]+\.po$")
_NAMED = re.compile(r"/([a-z]{2,3}(?:_[A-Z]{2})?(?:@[a-z]+)?)\.po$")
_FOLDERS = re.compile(r"/po/([A-Za-z_@]+)/[^/]+\.po$")


def parse(text: str) -> polib.POFile:
    """A catalogue in text form.

    Raises:
        OSError: it is broken.
    """
    # polib takes all of these for ends of lines; one of them would cost the whole catalogue.
    return polib.pofile(_SEPARATORS.sub(" ", text), wrapwidth=0)


def catalogue(name: str, data: bytes) -> list[polib.POEntry] | Unreadable:
    """The translated entries of a .po or .mo file; fuzzy and obsolete ones are left out."""
    try:
        if name.endswith(".mo"):
            found = polib.mofile(data)
        else:
            charset = _CHARSET.search(data)
            found = parse(data.decode(charset.group(1).decode() if charset else "utf-8"))
        return list(found.translated_entries())
    # One broken catalogue of hundreds is its package's fault; polib has no error of its own and raises many.
    except Exception as error:
        return Unreadable(name, " ".join(str(error).split()) or type(error).__name__)


def pairs(name: str, of_language: str, entries: Iterable[polib.POEntry] | Unreadable) -> Iterator[Pair | Unreadable]:
    """Pairs of entries; of plural forms, the first goes with the singular and the last with the plural."""
    if isinstance(entries, Unreadable):
        yield entries
        return
    entry: Any  # polib is not sure whether it is one
    for entry in entries:
        if entry.msgid_plural:
            forms = [entry.msgstr_plural[i] for i in sorted(entry.msgstr_plural)]
            yield Pair(of_language, forms[0], entry.msgid)
            yield Pair(of_language, forms[-1], entry.msgid_plural)
        else:
            yield Pair(of_language, entry.msgstr, entry.msgid)


def read(files: Sequence[Path]) -> Iterator[Pair | Unreadable]:
    """Catalogues of a wheel: locale/LANGUAGE/LC_MESSAGES/NAME.po."""
    return _read(files, _IN_WHEEL)


def read_named(files: Sequence[Path]) -> Iterator[Pair | Unreadable]:
    """Catalogues of a source package: LANGUAGE.po."""
    return _read(files, _NAMED)


def read_folders(files: Sequence[Path]) -> Iterator[Pair | Unreadable]:
    """Catalogues of a source package: po/LANGUAGE/NAME.po."""
    return _read(files, _FOLDERS)


def _read(files: Sequence[Path], pattern: re.Pattern[str]) -> Iterator[Pair | Unreadable]:
    for file in files:
        for name, data in members(file, lambda name: name.endswith(".po")):
            found = pattern.search(name)
            of_language = language(found.group(1)) if found else None
            if of_language is not None:
                yield from pairs(name, of_language, catalogue(name, data))
