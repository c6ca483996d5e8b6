"""Readers: how the pairs of a source are found in its packages, by the name that sources.tsv gives.

A `Form` says which files of a package hold translations, and in which format (catalogues.py, documents.py). Catalogues
of gettext and Qt have both sides. In all other formats each language has files of its own, and a sentence has the same
key in all of them.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from gshard_m4.corpus import catalogues, documents
from gshard_m4.corpus.archive import members
from gshard_m4.corpus.language import language
from gshard_m4.corpus.pair import Pair, Unreadable
from gshard_m4.corpus.sentences import align

_PACK_OF_LANGUAGE = re.compile(r"(?:-l10n|_Translation)-([a-z]+(?:-[a-z]+)*)")


class Form(NamedTuple):
    """Files of one format.

    Attributes:
        read: contents -> pairs of English and foreign, or, if each language has files of its own, key -> string, or
            blocks of text as `gshard_m4.corpus.sentences.align` takes them. May raise anything if they are broken.
        paths: patterns of the paths in a package, the usual one first, with the groups ``code`` (of the language) and
            perhaps ``group``: only files of one group belong together.
        english: codes of the originals if each language has files of its own; the last one counts.
    """

    read: Callable[[bytes], Any]
    paths: Sequence[str]
    english: Sequence[str] = ()


def read(forms: Sequence[Form], files: Sequence[Path]) -> Iterator[Pair | Unreadable]:
    """The pairs in files of some forms; English and one package are in memory."""
    originals: dict[tuple[Form, str], dict[str, dict[Any, Any]]] = defaultdict(dict)
    for file in sorted(files, key=_english_first):
        translations: dict[tuple[Form, str], list[tuple[str, Mapping[Any, Any]]]] = defaultdict(list)
        for name, data in members(file, lambda name: _place(forms, name) is not None):
            place = _place(forms, name)
            assert place is not None
            form, group, code = place
            of_language = None if code in form.english else language(code)
            if of_language is None and code not in form.english:
                continue
            try:
                found = form.read(data)
            # One broken file of hundreds is its package's fault; polib has no error of its own and raises many.
            except Exception as error:
                yield Unreadable(name, " ".join(str(error).split()) or type(error).__name__)
                continue
            if of_language is None:
                originals[form, group].setdefault(code, {}).update(found)
            elif form.english:
                translations[form, group].append((of_language, found))
            else:
                yield from (Pair(of_language, foreign, english) for english, foreign in found)
        for (form, group), theirs in translations.items():
            versions = originals[form, group]
            ours = {key: text for code in form.english for key, text in versions.get(code, {}).items()}
            for of_language, strings in theirs:
                yield from (Pair(of_language, foreign, english) for english, foreign in _by_key(ours, strings))


def _english_first(file: Path) -> tuple[bool, str]:
    found = _PACK_OF_LANGUAGE.search(file.name)
    code = found[1] if found else ""
    return not code.startswith("en"), code


def _place(forms: Sequence[Form], name: str) -> tuple[Form, str, str] | None:
    """Form, group and code of a file; None if it has none of the forms."""
    for form in forms:
        for path in form.paths:
            if found := re.search(path, name):
                return form, found.groupdict().get("group", ""), found["code"]
    return None


def _by_key(english: Mapping[Any, Any], foreign: Mapping[Any, Any]) -> Iterator[tuple[str, str]]:
    for key, theirs in foreign.items():
        if key in english:
            if isinstance(theirs, str):
                yield english[key], theirs
            else:
                yield from align(english[key], theirs)


_PO = Form(
    catalogues.po,
    (
        r"(?:^|/)locale/(?P<code>[^/]+)/LC_MESSAGES/[^/]+\.po$",
        r"/po/(?P<code>[A-Za-z_@]+)/[^/]+\.po$",
        r"/(?P<code>[a-z]{2,3}(?:_[A-Z]{2})?(?:@[a-z]+)?)\.po$",
    ),
)
_MO = Form(
    catalogues.mo,
    (
        r"/(?:locale|locales|translations|resource|i18n|languages)/(?P<code>[A-Za-z_@.-]+)/(?:LC_MESSAGES|LC_SCRIPTS)/.*\.mo$",
        r"/(?P<code>[a-z]{2,3}(?:[_-][A-Za-z]{2,4})?(?:@[a-z]+)?)\.mo$",
        r"-(?P<code>[a-z]{2,3}(?:_[A-Z]{2,3})?(?:@?[a-z]*))\.mo$",
        r"/(?P<code>[a-z]{2,3}(?:_[A-Z]{2})?(?:@[a-z]+)?)/[^/]+\.mo$",
    ),
)
_QM = Form(
    catalogues.qm,
    (
        r"[_.-](?P<code>[a-z]{2,3}(?:[_-][A-Z]{2}|[_-][A-Z][a-z]{3})?(?:@[a-z]+)?)\.qm$",
        r"/(?P<code>[a-z]{2,3}(?:_[A-Z]{2})?)\.qm$",
        r"/locale/(?P<code>[a-z]{2,3}(?:_[A-Z]{2})?(?:@[a-z]+)?)/.*\.qm$",
    ),
)
_HELP_PAGES = Form(
    documents.page,
    (r"(?:/share/help|/doc/(?:kde/)?HTML)/(?P<code>[^/]+)/(?P<group>.*\.(?:page|docbook|xml))$",),
    ("en", "C"),
)
_FORMS: Mapping[str, tuple[Form, ...]] = {
    "component": (
        Form(
            catalogues.json_strings,
            (r"^(?P<group>.*/translations/(?:.*\.)?)(?P<code>[A-Za-z][A-Za-z-]*)\.json$",),
            ("en",),
        ),
    ),
    "debian": (_MO, _QM, _HELP_PAGES),
    "descriptions": (Form(documents.descriptions, (r"i18n_Translation-(?P<code>[A-Za-z_]+)$",), ("en",)),),
    "gettext": (_PO,),
    "josm": (Form(catalogues.josm, (r"^(?P<group>.*/)(?P<code>[^/]+)\.lang$",), ("en",)),),
    "mediawiki": (
        Form(catalogues.wiki, (r"/mediawiki/(?P<group>.*i18n(?:/[^/]+)*)/(?P<code>[a-z-]+)\.json$",), ("en",)),
    ),
    # There is no pack of American English.
    "mozilla": (Form(catalogues.language_pack, (r"langpack-(?P<code>[A-Za-z-]+)@[^/]*\.xpi$",), ("en-GB", "en-CA")),),
    "scratch": (
        Form(
            catalogues.json_strings,
            (r"package/(?P<group>(?:editor|www)/[^/]+)/(?P<code>[A-Za-z-]+)\.json$",),
            ("en",),
        ),
    ),
}

Reader = Callable[[Sequence[Path]], Iterator[Pair | Unreadable]]
READERS: Mapping[str, Reader] = MappingProxyType(
    {name: functools.partial(read, forms) for name, forms in _FORMS.items()}
)
