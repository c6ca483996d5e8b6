"""Qt's compiled catalogues (.qm): sections of tagged records; those with messages keep the source text."""

from __future__ import annotations

import struct
from collections.abc import Iterator

_MAGIC = b"\x3c\xb8\x64\x18"
_MESSAGES = 0x69
_END, _TRANSLATION, _OBSOLETE, _HASH, _SOURCE = 1, 3, 4, 5, 6
_NULL = 0xFFFFFFFF


def messages(data: bytes) -> Iterator[tuple[str, str]]:
    """English and translation of every message; the first form of a plural.

    Raises:
        ValueError: this is no such catalogue, or it is cut.
    """
    if data[:4] != _MAGIC:
        raise ValueError("not a Qt catalogue")
    try:
        yield from _messages(_section(data))
    except (struct.error, IndexError) as error:
        raise ValueError(f"the catalogue is cut: {error}") from error


def _section(data: bytes) -> bytes:
    at = 16
    while at + 5 <= len(data):
        tag, size = data[at], struct.unpack_from(">I", data, at + 1)[0]
        if at + 5 + size > len(data):
            raise IndexError(f"a section ends at {at + 5 + size} of {len(data)} bytes")
        if tag == _MESSAGES:
            return data[at + 5 : at + 5 + size]
        at += 5 + size
    return b""


def _messages(data: bytes) -> Iterator[tuple[str, str]]:
    at, english, translations = 0, "", list[str]()
    while at < len(data):
        tag, at = data[at], at + 1
        if tag == _END:
            if english and translations:
                yield english, translations[0]
            english, translations = "", []
        elif tag == _HASH:
            at += 4
        else:
            size = struct.unpack_from(">I", data, at)[0]
            at += 4
            if size == _NULL:
                continue
            text = data[at : at + size]
            at += size
            if tag == _TRANSLATION:
                translations.append(text.decode("utf-16-be", "replace"))
            elif tag == _SOURCE:
                english = text.decode("utf-8", "replace")
