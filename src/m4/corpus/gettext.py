"""Translation catalogues of GNU gettext, read inside a package's archive without installing it."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

import polib

from m4.corpus.language import language
from m4.corpus.pair import Pair, Unreadable

_CATALOGUE = re.compile(r"(?:^|/)locale/([^/]+)/LC_MESSAGES/[^/]+\.po$")


def read(archive: Path) -> Iterator[Pair | Unreadable]:
    """Every translated entry of every catalogue in a wheel; fuzzy and obsolete entries are left out.

    Singular and plural forms are pairs of their own: the first form goes with the singular, the last with the plural.
    """
    with zipfile.ZipFile(archive) as wheel:
        for name in sorted(wheel.namelist()):
            found = _CATALOGUE.search(name)
            name_of_language = language(found.group(1)) if found else None
            if name_of_language is None:
                continue
            try:
                text = wheel.read(name).decode("utf-8")
                catalogue = polib.pofile(text, wrapwidth=0)
            except (UnicodeDecodeError, OSError, ValueError) as error:
                yield Unreadable(name, str(error))  # one broken catalogue of hundreds: its package's fault
                continue
            for entry in catalogue.translated_entries():
                if entry.msgid_plural:
                    forms = [entry.msgstr_plural[i] for i in sorted(entry.msgstr_plural)]
                    yield Pair(name_of_language, forms[0], entry.msgid)
                    yield Pair(name_of_language, forms[-1], entry.msgid_plural)
                else:
                    yield Pair(name_of_language, entry.msgstr, entry.msgid)
