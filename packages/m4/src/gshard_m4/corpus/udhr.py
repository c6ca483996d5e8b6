"""The Universal Declaration of Human Rights in four hundred languages, paragraph by paragraph.

It stays out of training: real prose about something else than programs is the test of what a model makes of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from gshard_m4.corpus.archive import members
from gshard_m4.corpus.language import language
from gshard_m4.corpus.pair import Pair, Unreadable
from gshard_m4.corpus.sentences import align

_FILE = re.compile(r"package/declaration/([^/]+)\.html$")
_LANGUAGE = re.compile(r' lang="([^"]+)"')
_ISO = re.compile(r'data-iso6393="([^"]+)"')
_PREAMBLE = re.compile(r"<header>(.*?)</header>", re.S)
_ARTICLE = re.compile(r'<article data-number="(\d+)">(.*?)</article>', re.S)
_BLOCK = re.compile(r"<(h\d|p|li)[^>]*>(.*?)</\1>", re.S)
_TAG = re.compile(r"</?[A-Za-z][^<>]*>")

Articles = dict[str, list[tuple[str, str]]]


def read(files: Sequence[Path]) -> Iterator[Pair | Unreadable]:
    """Articles whose paragraphs are as many as the English ones."""
    for file in files:
        texts = dict(_texts(file))
        if "eng" not in texts:
            continue
        english = texts["eng"][1]
        for name, (code, articles) in sorted(texts.items()):
            of_language = language(code)
            if of_language is not None and name != "eng":
                for number, blocks in articles.items():
                    found = align(english.get(number, []), blocks)
                    yield from (Pair(of_language, theirs, ours) for ours, theirs in found)


def _texts(file: Path) -> Iterator[tuple[str, tuple[str, Articles]]]:
    for name, data in members(file, lambda name: _FILE.search(name) is not None):
        found = _FILE.search(name)
        text = data.decode("utf-8", "replace")
        code = _LANGUAGE.search(text) or _ISO.search(text)
        if found and code:
            parts = dict(_ARTICLE.findall(text))
            if preamble := _PREAMBLE.search(text):
                parts["0"] = preamble.group(1)
            yield found.group(1), (code.group(1), {number: _blocks(part) for number, part in parts.items()})


def _blocks(part: str) -> list[tuple[str, str]]:
    found = [(kind, " ".join(_TAG.sub("", text).split())) for kind, text in _BLOCK.findall(part)]
    return [(kind, text) for kind, text in found if kind != "h2"]  # "Article 1"
