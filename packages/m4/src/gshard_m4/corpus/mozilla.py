"""Firefox and Thunderbird: language packs, one Debian package for each language, in three formats of files.

There is no pack of American English; the Canadian one stands for it, and the British one where that lacks a string.
Read by patterns and not by a full parser of Fluent: there are two million messages, and those that choose between
forms are left out anyway.
"""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from gshard_m4.corpus.archive import members
from gshard_m4.corpus.language import language
from gshard_m4.corpus.pair import Pair, Unreadable

_PACKAGE = re.compile(r"-l10n-([a-z-]+)_")
_PACK = re.compile(r"langpack-([A-Za-z-]+)@")
_ENGLISH = ("en-gb", "en-ca")  # the later one counts

_MESSAGE = re.compile(r"^(-?[A-Za-z][\w-]*) *= *(.*)$")
_ATTRIBUTE = re.compile(r"^ +\.([A-Za-z][\w-]*) *= *(.*)$")
_PROPERTY = re.compile(r"^\s*([^#!\s][^=]*?)\s*=\s*(.*)$")
_ENTITY = re.compile(r"<!ENTITY\s+([\w.-]+)\s+(?:\"([^\"]*)\"|'([^']*)')\s*>", re.S)
_CODE = re.compile(r"\\u([0-9a-fA-F]{4})")
_BRAND = re.compile(r"\{ -brand[\w-]*(?:\([^)]*\))? \}|&brandShortName;")
_LITERAL = re.compile(r'\{ "([^"]*)" \}')
_KEYS = ("accesskey", ".key", ".style")


def read(files: Sequence[Path]) -> Iterator[Pair | Unreadable]:
    """Every string that has the same file and key in English."""
    packs: dict[str, list[Path]] = {}
    for file in files:
        if found := _PACKAGE.search(file.name):
            packs.setdefault(found.group(1), []).append(file)
    english: dict[tuple[str, str], str] = {}
    for code in _ENGLISH:
        for file in packs.get(code, []):
            english.update(item for item in _strings(file) if not isinstance(item, Unreadable))
    for code in sorted(packs):
        of_language = language(code)
        for file in packs[code] if of_language else ():
            for item in _strings(file):
                if isinstance(item, Unreadable):
                    yield item
                elif of_language and item[0] in english:
                    yield Pair(of_language, item[1], english[item[0]])


def _strings(file: Path) -> Iterator[tuple[tuple[str, str], str] | Unreadable]:
    """Strings by the file they are in and their key."""
    for name, data in members(file, lambda name: name.endswith(".xpi")):
        found = _PACK.search(name)
        if not found:
            continue
        code = found.group(1)
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as pack:
                for inside in pack.namelist():
                    parse = _PARSERS.get(inside.rpartition(".")[2])
                    if parse:
                        where = inside.replace(f"/{code}/", "/LANGUAGE/")
                        for key, text in parse(pack.read(inside).decode("utf-8", "replace")).items():
                            if not key.lower().endswith(_KEYS) and "accesskey" not in key.lower():
                                yield (where, key), _names(text)
        except (zipfile.BadZipFile, KeyError) as error:
            yield Unreadable(f"{file.name}:{name}", str(error))


def _names(text: str) -> str:
    text = text.replace("{ -vendor-short-name }", "Mozilla")
    return _LITERAL.sub(r"\1", _BRAND.sub("Firefox", text))


def fluent(text: str) -> dict[str, str]:
    r"""Messages and attributes of a Fluent file, those that choose between forms left out.

    >>> fluent("# a comment\nsave = Save\n    the page\n    .label = Save it\nmany = { $n ->\n  *[other] pages\n }\n")
    {'save': 'Save\nthe page', 'save.label': 'Save it'}
    """
    found: dict[str, str] = {}
    key, attribute = "", ""
    for line in text.split("\n"):
        if line.startswith("#"):
            continue
        if begins := _MESSAGE.match(line):
            key, attribute = begins.group(1), ""
            found[key] = begins.group(2)
        elif key and (begins := _ATTRIBUTE.match(line)):
            attribute = "." + begins.group(1)
            found[key + attribute] = begins.group(2)
        elif key and line.startswith(" "):
            found[key + attribute] += "\n" + line.strip()
    return {k: v.strip() for k, v in found.items() if v.strip() and "->" not in v}


def properties(text: str) -> dict[str, str]:
    r"""Strings of a Java properties file.

    >>> properties("# a comment\nsave.label = Save \\\n   the caf\\u00e9\n")
    {'save.label': 'Save the café'}
    """
    found = {}
    for line in re.sub(r"\\\n\s*", "", text).split("\n"):
        if match := _PROPERTY.match(line):
            value = _CODE.sub(lambda code: chr(int(code.group(1), 16)), match.group(2))
            found[match.group(1)] = value.replace("\\n", "\n").replace("\\", "")
    return found


def entities(text: str) -> dict[str, str]:
    """Strings of a DTD.

    >>> entities('<!ENTITY save.label "Save it">')
    {'save.label': 'Save it'}
    """
    return {m.group(1): m.group(2) or m.group(3) or "" for m in _ENTITY.finditer(text)}


_PARSERS = {"ftl": fluent, "properties": properties, "dtd": entities}
