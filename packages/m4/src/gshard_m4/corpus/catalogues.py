"""Catalogues: the strings of programs in the formats that their translators use.

A format is a function of a file's contents. `po`, `mo` and `qm` give pairs of English and foreign strings; the others
give strings of one language by their keys. What they raise for a broken file tells what is wrong with it.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import polib

_CHARSET = re.compile(rb'"Content-Type:[^"\n]*charset=([A-Za-z0-9][\w.-]*)')
_SEPARATORS = re.compile("[\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")


def parse_po(text: str) -> polib.POFile:
    """A catalogue of GNU gettext in text form.

    Raises:
        OSError: it is broken.
    """
    # polib takes all of these for ends of lines; one of them would cost the whole catalogue.
    return polib.pofile(_SEPARATORS.sub(" ", text), wrapwidth=0)


def po(data: bytes) -> list[tuple[str, str]]:
    """The translated entries of GNU gettext's .po; fuzzy and obsolete ones are left out."""
    charset = _CHARSET.search(data)
    found = parse_po(data.decode(charset.group(1).decode() if charset else "utf-8"))
    return [pair for entry in found.translated_entries() for pair in both_sides(entry)]


def mo(data: bytes) -> list[tuple[str, str]]:
    """The translated entries of GNU gettext's .mo."""
    return [pair for entry in polib.mofile(data).translated_entries() for pair in both_sides(entry)]


def both_sides(entry: Any) -> list[tuple[str, str]]:
    """Pairs of an entry; of plural forms, the first goes with the singular and the last with the plural."""
    if not entry.msgid_plural:
        return [(entry.msgid, entry.msgstr)]
    forms = [entry.msgstr_plural[i] for i in sorted(entry.msgstr_plural)]
    return [(entry.msgid, forms[0]), (entry.msgid_plural, forms[-1])]


_QM_MAGIC, _QM_HEADER = b"\x3c\xb8\x64\x18", 16
_QM_MESSAGES = b"\x69"
_QM_END, _QM_TRANSLATION, _QM_HASH, _QM_SOURCE = b"\1", b"\3", b"\5", b"\6"
_QM_NULL = 0xFFFFFFFF


def qm(data: bytes) -> list[tuple[str, str]]:
    """The messages of Qt's compiled catalogue, sections of tagged records; the first form of a plural."""
    if not data.startswith(_QM_MAGIC):
        raise ValueError("not a Qt catalogue")
    stream = io.BytesIO(data[_QM_HEADER:])
    while section := stream.read(1):
        contents = _exactly(stream, _number(stream, 4))
        if section == _QM_MESSAGES:
            return list(_qm_messages(io.BytesIO(contents)))
    return []


def _qm_messages(stream: io.BytesIO) -> Iterator[tuple[str, str]]:
    english, translations = "", list[str]()
    while tag := stream.read(1):
        if tag == _QM_END:
            if english and translations:
                yield english, translations[0]
            english, translations = "", []
        elif tag == _QM_HASH:
            _exactly(stream, 4)
        elif (size := _number(stream, 4)) != _QM_NULL:
            text = _exactly(stream, size)
            if tag == _QM_TRANSLATION:
                translations.append(text.decode("utf-16-be", "replace"))
            elif tag == _QM_SOURCE:
                english = text.decode("utf-8", "replace")


def _exactly(stream: io.BytesIO, size: int) -> bytes:
    found = stream.read(size)
    if len(found) < size:
        raise ValueError("the catalogue is cut")
    return found


def _number(stream: io.BytesIO, size: int) -> int:
    return int.from_bytes(_exactly(stream, size))


def json_strings(data: bytes) -> dict[str, str]:
    """All strings of a JSON tree, by their paths."""
    return dict(_leaves(json.loads(data.decode("utf-8")), ""))


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _leaves(value, f"{path}/{key}")
    elif isinstance(tree, str):
        yield path, tree


def wiki(data: bytes) -> dict[str, str]:
    """MediaWiki's messages: JSON with strings in wiki markup."""
    return {key: wiki_text(value) for key, value in json_strings(data).items()}


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


_CONTEXT = re.compile(r"^___.*?___")
_PLURALS_FOLLOW, _AS_ENGLISH, _FORMS_AS_ENGLISH = 0xFFFF, 0xFFFE, 0xFE


def josm(data: bytes) -> dict[tuple[str, int], str]:
    r"""JOSM's strings in the order of English, each after its length in two bytes.

    First come the single strings, then those with plural forms, each after the number of its forms. Strings without
    translation, or as in English, are left out.

    >>> josm(b"\0\2No\xff\xfe\xff\xff\2\0\4page\0\5pages")
    {('single', 0): 'No', ('first', 0): 'page', ('last', 0): 'pages'}
    """
    stream = io.BytesIO(data)

    def string(size: int) -> str:
        text = _exactly(stream, 0 if size == _AS_ENGLISH else size)
        return _CONTEXT.sub("", text.decode("utf-8", "replace"))

    found: dict[tuple[str, int], str] = {}
    number = 0
    while stream.tell() < len(data) and (size := _number(stream, 2)) != _PLURALS_FOLLOW:
        if text := string(size):
            found["single", number] = text
        number += 1
    number = 0
    while stream.tell() < len(data):
        count = _number(stream, 1)
        forms = [string(_number(stream, 2)) for _ in range(0 if count == _FORMS_AS_ENGLISH else count)]
        if forms:
            found["first", number] = forms[0]
        if len(forms) > 1:
            found["last", number] = forms[-1]
        number += 1
    return found


_BRAND = re.compile(r"\{ -brand[\w-]*(?:\([^)]*\))? \}|&brandShortName;")
_LITERAL = re.compile(r'\{ "([^"]*)" \}')
_KEYS = ("accesskey", ".key", ".style")


def language_pack(data: bytes) -> dict[tuple[str, str], str]:
    """The strings of a language pack of Firefox or Thunderbird, by the file they are in and their key.

    Read by patterns and not by a full parser of Fluent: there are two million messages, and those that choose between
    forms are left out anyway.
    """
    found = {}
    with zipfile.ZipFile(io.BytesIO(data)) as pack:
        code = json.loads(pack.read("manifest.json"))["langpack_id"]
        for inside in pack.namelist():
            if parse := _PACK_FORMATS.get(inside.rpartition(".")[2]):
                where = inside.replace(f"/{code}/", "/LANGUAGE/")
                for key, text in parse(pack.read(inside).decode("utf-8", "replace")).items():
                    if not key.lower().endswith(_KEYS) and "accesskey" not in key.lower():
                        text = _BRAND.sub("Firefox", text.replace("{ -vendor-short-name }", "Mozilla"))
                        found[where, key] = _LITERAL.sub(r"\1", text)
    return found


_MESSAGE = re.compile(r"^(-?[A-Za-z][\w-]*) *= *(.*)$")
_ATTRIBUTE = re.compile(r"^ +\.([A-Za-z][\w-]*) *= *(.*)$")
_PROPERTY = re.compile(r"^\s*([^#!\s][^=]*?)\s*=\s*(.*)$")
_ENTITY = re.compile(r"<!ENTITY\s+([\w.-]+)\s+(?:\"([^\"]*)\"|'([^']*)')\s*>", re.S)
_CODE = re.compile(r"\\u([0-9a-fA-F]{4})")


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


_PACK_FORMATS: Mapping[str, Callable[[str], dict[str, str]]] = {
    "ftl": fluent,
    "properties": properties,
    "dtd": entities,
}
