"""Catalogues: the strings of programs in the formats that their translators use.

A format is a function of a file's contents. `po`, `mo` and `qm` give pairs of English and foreign strings; the others
give strings of one language by their keys. What they raise for a broken file tells what is wrong with it.
"""

from __future__ import annotations

import io
import json
import re
import struct
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


_QM_MAGIC = b"\x3c\xb8\x64\x18"
_QM_MESSAGES = 0x69
_QM_END, _QM_TRANSLATION, _QM_HASH, _QM_SOURCE = 1, 3, 5, 6
_QM_NULL = 0xFFFFFFFF


def qm(data: bytes) -> list[tuple[str, str]]:
    """The messages of Qt's compiled catalogue, sections of tagged records; the first form of a plural."""
    if data[:4] != _QM_MAGIC:
        raise ValueError("not a Qt catalogue")
    try:
        return list(_qm_messages(_qm_section(data)))
    except (struct.error, IndexError) as error:
        raise ValueError(f"the catalogue is cut: {error}") from error


def _qm_section(data: bytes) -> bytes:
    at = 16
    while at + 5 <= len(data):
        tag, size = struct.unpack_from(">BI", data, at)
        if at + 5 + size > len(data):
            raise IndexError(f"a section ends at {at + 5 + size} of {len(data)} bytes")
        if tag == _QM_MESSAGES:
            return data[at + 5 : at + 5 + size]
        at += 5 + size
    return b""


def _qm_messages(data: bytes) -> Iterator[tuple[str, str]]:
    at, english, translations = 0, "", list[str]()
    while at < len(data):
        tag, at = data[at], at + 1
        if tag == _QM_END:
            if english and translations:
                yield english, translations[0]
            english, translations = "", []
        elif tag == _QM_HASH:
            at += 4
        else:
            size = struct.unpack_from(">I", data, at)[0]
            text = b"" if size == _QM_NULL else data[at + 4 : at + 4 + size]
            at += 4 + len(text)
            if tag == _QM_TRANSLATION and size != _QM_NULL:
                translations.append(text.decode("utf-16-be", "replace"))
            elif tag == _QM_SOURCE:
                english = text.decode("utf-8", "replace")


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


def josm(data: bytes) -> dict[tuple[str, int], str]:
    r"""JOSM's strings in the order of English, each after its length in two bytes.

    First come the single strings, then those with plural forms, each after the number of its forms. Strings without
    translation, or as in English, are left out.

    >>> josm(b"\0\2No\xff\xfe\xff\xff\2\0\4page\0\5pages")
    {('single', 0): 'No', ('first', 0): 'page', ('last', 0): 'pages'}
    """
    stream = io.BytesIO(data)
    found: dict[tuple[str, int], str] = {}
    number = 0
    while (size := stream.read(2)) not in (b"", b"\xff\xff"):
        if text := _josm_string(stream, size):
            found["single", number] = text
        number += 1
    number = 0
    while count := stream.read(1):
        forms = [_josm_string(stream, stream.read(2)) for _ in range(0 if count == b"\xfe" else count[0])]
        if forms:
            found["first", number] = forms[0]
        if len(forms) > 1:
            found["last", number] = forms[-1]
        number += 1
    return found


def _josm_string(stream: io.BytesIO, size: bytes) -> str:
    length = 0 if size == b"\xff\xfe" else int.from_bytes(size)
    text = stream.read(length)
    if len(size) < 2 or len(text) < length:
        raise ValueError("the catalogue is cut")
    return _CONTEXT.sub("", text.decode("utf-8", "replace"))


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
