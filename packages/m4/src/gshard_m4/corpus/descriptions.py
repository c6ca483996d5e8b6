"""Descriptions of Debian's packages, translated by its users: apt's Translation-LANGUAGE files.

A description is a line, then paragraphs and lists; it belongs to its translations by the hash of the English text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from gshard_m4.corpus.language import language
from gshard_m4.corpus.pair import Pair, Unreadable
from gshard_m4.corpus.sentences import split

_FILE = re.compile(r"i18n_Translation-([A-Za-z_]+)$")
_ITEM = re.compile(r"^[*+-] +")


def read(files: Sequence[Path]) -> Iterator[Pair | Unreadable]:
    """The first lines, and sentences of the paragraphs where there are as many."""
    by_code = {found.group(1): file for file in files if (found := _FILE.search(file.name))}
    if "en" not in by_code:
        return
    english = _descriptions(by_code.pop("en"))
    for code, file in sorted(by_code.items()):
        of_language = language(code)
        if of_language is None:
            continue
        for key, (theirs, *their_paragraphs) in _descriptions(file).items():
            if key not in english:
                continue
            ours, *our_paragraphs = english[key]
            yield Pair(of_language, theirs, ours)
            if len(our_paragraphs) == len(their_paragraphs):
                for one, two in zip(our_paragraphs, their_paragraphs):
                    sentences = split(_ITEM.sub("", one), _ITEM.sub("", two))
                    yield from (Pair(of_language, b, a) for a, b in sentences)


def _descriptions(file: Path) -> dict[str, list[str]]:
    """Hash -> the line, and all paragraphs and items."""
    found: dict[str, list[str]] = {}
    parts: list[str] | None = None
    key = ""
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            line = line.rstrip("\n")
            if line.startswith("Description-md5:"):
                key = line.partition(":")[2].strip()
            elif line.startswith("Description-"):
                parts = found[key] = [line.partition(":")[2].strip()]
            elif not line:
                parts = None
            elif parts is not None and line.startswith(" "):
                text = line.strip()
                if text == ".":
                    parts.append("")
                elif line.startswith("  ") or _ITEM.match(text) or len(parts) == 1:
                    parts.append(text)
                else:
                    parts[-1] = f"{parts[-1]} {text}".strip()
    return {k: [p for p in v if p] for k, v in found.items() if v[0]}
