"""Translations by key: a file for each language, and a sentence has the same key in all of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gshard_m4.corpus.archive import members
from gshard_m4.corpus.language import language
from gshard_m4.corpus.pair import Pair, Unreadable

_COMPONENT = re.compile(r"^(.*/translations/(?:.*\.)?)([A-Za-z][A-Za-z-]*)\.json$")
_SCRATCH = re.compile(r"package/((?:editor|www)/[^/]+)/([A-Za-z-]+)\.json$")
_WIKI = re.compile(r"/mediawiki/(.*i18n(?:/[^/]+)*)/([a-z-]+)\.json$")

Strings = Mapping[str, str]


def join(groups: Mapping[str, Mapping[str, Strings]]) -> Iterator[Pair]:
    """Pairs of files that belong together: group -> code of the language -> key -> string."""
    for group in groups.values():
        if "en" not in group:
            continue
        ours = group["en"]
        for code, theirs in group.items():
            of_language = language(code)
            if of_language is not None:
                yield from (Pair(of_language, theirs[key], ours[key]) for key in theirs if key in ours)


def read_component(files: Sequence[Path]) -> Iterator[Pair | Unreadable]:
    """Home Assistant: translations/PART.LANGUAGE.json beside translations/PART.en.json."""
    return _read(files, _COMPONENT, _flat_strings)


def read_scratch(files: Sequence[Path]) -> Iterator[Pair | Unreadable]:
    """Scratch: editor/PART/LANGUAGE.json."""
    return _read(files, _SCRATCH, _flat_strings)


def read_mediawiki(files: Sequence[Path]) -> Iterator[Pair | Unreadable]:
    """MediaWiki and its extensions: i18n/PART/LANGUAGE.json, in wiki markup."""
    return _read(files, _WIKI, _unwiki)


def _read(
    files: Sequence[Path], pattern: re.Pattern[str], strings: Callable[[Any], Strings]
) -> Iterator[Pair | Unreadable]:
    for file in files:
        groups: dict[str, dict[str, Strings]] = {}
        for name, data in members(file, lambda name: name.endswith(".json")):
            found = pattern.search(name)
            if not found or (found.group(2) != "en" and language(found.group(2)) is None):
                continue
            try:
                groups.setdefault(found.group(1), {})[found.group(2)] = strings(json.loads(data.decode("utf-8")))
            except ValueError as error:  # not JSON, or not UTF-8
                yield Unreadable(name, str(error))
        yield from join(groups)


def _flat_strings(tree: Any) -> Strings:
    return dict(_flat(tree, ""))


def _flat(tree: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _flat(value, f"{path}/{key}")
    elif isinstance(tree, str):
        yield path, tree


def _unwiki(tree: Any) -> Strings:
    return {key: wiki_text(value) for key, value in tree.items() if isinstance(value, str)}


_FORMS = re.compile(r"\{\{(?:PLURAL|GENDER|GRAMMAR):[^{}|]*\|([^{}|]*)(?:\|[^{}]*)?\}\}")
_LINK = re.compile(r"\[\[(?:[^\]|]*\|)?([^\]|]*)\]\]")
_WEB_LINK = re.compile(r"\[https?://\S+ ([^\]]*)\]")
_BOLD = re.compile(r"'{2,5}")


def wiki_text(text: str) -> str:
    """Wiki markup as plain text.

    >>> wiki_text("'''Read''' {{PLURAL:$1|one page|$1 pages}} of [[Help:Wiki|the help]] on {{SITENAME}}")
    'Read one page of the help on Wikipedia'
    """
    if "{{" in text:
        text = _FORMS.sub(r"\1", text).replace("{{SITENAME}}", "Wikipedia")
    text = _WEB_LINK.sub(r"\1", _LINK.sub(r"\1", text))
    return _BOLD.sub("", text)
