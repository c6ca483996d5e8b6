"""Help pages in Mallard and DocBook (GNOME, MATE, KDE).

They are translated paragraph by paragraph and keep the structure of the original, so the blocks of a page and of its
translation belong together in order; a page whose structure has changed is left out.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

PAGE = re.compile(r"/share/help/([^/]+)/(.*)$|/doc/(?:kde/)?HTML/([^/]+)/(.*)$")
_BLOCKS = set("title p desc para term caption simpara refpurpose subtitle screeninfo".split())
_NO_TEXT = set(
    "credit articleinfo bookinfo legalnotice refentryinfo revision license screen programlisting code synopsis "
    "authorgroup".split()
)
_DOCTYPE = re.compile(rb"<!DOCTYPE[^>\[]*(\[.*?\])?\s*>", re.S)
_ENTITY = re.compile(rb"&([A-Za-z][\w.-]*);")
_STANDARD = (b"lt", b"gt", b"amp", b"quot", b"apos")


def blocks(data: bytes) -> list[tuple[str, str]] | None:
    """The innermost blocks of a page in order: element and text; None if this is no such page.

    >>> blocks(b"<page><title>The river</title><section><p>It  flows <em>fast</em>.</p></section></page>")
    [('title', 'The river'), ('p', 'It flows fast.')]
    """
    # Own entities stand for names of programs; the declaration that says which is a file of another package.
    data = _ENTITY.sub(_named, _DOCTYPE.sub(b"", data, count=1))
    try:
        root = ET.fromstring(data)
    except (ET.ParseError, ValueError):
        return None
    found: list[tuple[str, str]] = []
    _walk(root, found)
    return found


def _named(entity: re.Match[bytes]) -> bytes:
    name = entity.group(1)
    if name in _STANDARD:
        return entity.group()
    return b" " if name == b"nbsp" else name.capitalize() if name.islower() else name.replace(b"kde", b"KDE")


def _walk(element: ET.Element, found: list[tuple[str, str]]) -> None:
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
