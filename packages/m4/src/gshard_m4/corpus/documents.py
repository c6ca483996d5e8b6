"""Documents: texts of several paragraphs that are translated as a whole.

A document is a list of blocks, each with its kind and its text, as `gshard_m4.corpus.sentences.align` takes them. The
functions take the contents of a file and give the documents of one language by their keys.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

Blocks = list[tuple[str, str]]

_BLOCKS = set("title p desc para term caption simpara refpurpose subtitle screeninfo".split())
_NO_TEXT = set(
    "credit articleinfo bookinfo legalnotice refentryinfo revision license screen programlisting code synopsis "
    "authorgroup".split()
)
_DOCTYPE = re.compile(rb"<!DOCTYPE[^>\[]*(\[.*?\])?\s*>", re.S)
_ENTITY = re.compile(rb"&([A-Za-z][\w.-]*);")
_STANDARD = (b"lt", b"gt", b"amp", b"quot", b"apos")


def page(data: bytes) -> dict[str, Blocks]:
    """The innermost blocks of a help page in Mallard or DocBook (GNOME, MATE, KDE); nothing if it is none.

    A translation keeps the structure of the original.

    >>> page(b"<page><title>The river</title><section><p>It  flows <em>fast</em>.</p></section></page>")
    {'': [('title', 'The river'), ('p', 'It flows fast.')]}
    """
    # Own entities stand for names of programs; the declaration that says which is a file of another package.
    data = _ENTITY.sub(_named, _DOCTYPE.sub(b"", data, count=1))
    try:
        root = ET.fromstring(data)
    except (ET.ParseError, ValueError):
        return {}
    found: Blocks = []
    _walk(root, found)
    return {"": found} if found else {}


def _named(entity: re.Match[bytes]) -> bytes:
    name = entity.group(1)
    if name in _STANDARD:
        return entity.group()
    return b" " if name == b"nbsp" else name.capitalize() if name.islower() else name.replace(b"kde", b"KDE")


def _walk(element: ET.Element, found: Blocks) -> None:
    name = _name(element)
    if name in _NO_TEXT:
        return
    if name in _BLOCKS and not any(_name(inner) in _BLOCKS for inner in element.iter() if inner is not element):
        found.append((name, " ".join("".join(element.itertext()).split())))
        return
    for inner in element:
        _walk(inner, found)


def _name(element: ET.Element) -> str:
    return element.tag.split("}")[-1] if isinstance(element.tag, str) else ""


_ITEM = re.compile(r"^[*+-] +")


def descriptions(data: bytes) -> dict[str, str | Blocks]:
    """The descriptions of Debian's packages: apt's Translation-LANGUAGE files.

    A description is a line, then paragraphs and lists; it belongs to its translations by the hash of the English text.
    """
    found: dict[str, str | Blocks] = {}
    lines, paragraphs, key = dict[str, str](), dict[str, list[str]](), ""
    parts: list[str] | None = None
    for line in data.decode("utf-8", "replace").split("\n"):
        if line.startswith("Description-md5:"):
            key = line.partition(":")[2].strip()
        elif line.startswith("Description-"):
            lines[key], parts = line.partition(":")[2].strip(), []
            paragraphs[key] = parts
        elif not line:
            parts = None
        elif parts is not None and line.startswith(" "):
            text = line.strip()
            if text == ".":
                parts.append("")
            elif line.startswith("  ") or _ITEM.match(text) or not parts:
                parts.append(text)
            else:
                parts[-1] = f"{parts[-1]} {text}".strip()
    for key, line in lines.items():
        if line:
            found[key] = line
            found[f"{key} paragraphs"] = [("p", _ITEM.sub("", text)) for text in paragraphs[key] if text]
    return found
