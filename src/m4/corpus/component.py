"""Translations in JSON: a file for each language with the same keys, as Home Assistant's components have them."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from m4.corpus.language import language
from m4.corpus.pair import Pair, Unreadable

_FILE = re.compile(r"^(.*/translations)/(?:(.*)\.)?([A-Za-z][A-Za-z-]*)\.json$")


def read(archive: Path) -> Iterator[Pair | Unreadable]:
    """Every string that has the same key in ``en.json`` and in another language's file beside it."""
    with zipfile.ZipFile(archive) as wheel:
        groups: dict[tuple[str, str], dict[str, str]] = {}
        for name in sorted(wheel.namelist()):
            found = _FILE.match(name)
            if found:
                folder, part, code = found.groups()
                groups.setdefault((folder, part or ""), {})[code] = name
        for files in groups.values():
            if "en" not in files:
                continue
            english = _strings(wheel, files["en"])
            if isinstance(english, Unreadable):
                yield english
                continue
            for code, name in files.items():
                name_of_language = language(code)
                if name_of_language is None:
                    continue
                foreign = _strings(wheel, name)
                if isinstance(foreign, Unreadable):
                    yield foreign
                    continue
                for key in (k for k in foreign if k in english):
                    yield Pair(name_of_language, foreign[key], english[key])


def _strings(wheel: zipfile.ZipFile, name: str) -> dict[str, str] | Unreadable:
    try:
        return dict(_flat(json.loads(wheel.read(name).decode("utf-8")), ""))
    except ValueError as error:  # not JSON, or not UTF-8
        return Unreadable(name, str(error))


def _flat(tree: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _flat(value, f"{path}/{key}")
    elif isinstance(tree, str):
        yield path, tree
