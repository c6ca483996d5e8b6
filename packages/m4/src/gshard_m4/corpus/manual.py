"""Manual pages: translated paragraph by paragraph, so a page and its translation have the same structure.

A page is cut into sections, and those into paragraphs with the macro that began each; the paragraphs of a section
belong together if their macros are the same in both languages.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from gshard_m4.corpus.archive import members
from gshard_m4.corpus.language import language
from gshard_m4.corpus.pair import Pair, Unreadable
from gshard_m4.corpus.sentences import split

_PAGE = re.compile(r"/share/man/(?:([a-zA-Z_]+)/)?man(\w+)/([^/]+)\.gz$")
_OTHER_MACROS = re.compile(r"^\.(Dd|Sh)\b", re.M)
_MACRO = re.compile(r"[.']\s*([A-Za-z]+)\s*(.*)")
_ARGUMENT = re.compile(r'"((?:[^"]|"")*)"|(\S+)')
_LITERAL_ENDS = re.compile(r"[.'](fi|EE|TE|ju)\b")

_FONTS = set("B I BR BI IB IR RB RI SM SB R".split())
_JOINED_BY_BLANKS = set("B I SM SB R".split())
_LITERAL = {"nf", "EX", "TS"}
_BREAKS = {"br", "sp", "TH"}
_IGNORED = _BREAKS | set(
    "UR MT UE ME ft hy ad na ne ns ta ti in PD if ie el ds de nh so lf nop cs OP SY YS AT UC DT IX rm nr ig pc mk rt "
    "ce ps vs ll".split()
)
_PARAGRAPHS = {
    "TP": "TP",
    "TQ": "TP",
    "HP": "TP",
    "IP": "IP",
    "PP": "PP",
    "P": "PP",
    "LP": "PP",
    "RS": "PP",
    "RE": "PP",
}
_ESCAPES = [
    (re.compile(pattern), text)
    for pattern, text in (
        (r"\\f(?:\[[A-Z]*\]|\([A-Z]{2}|.)", ""),
        (r"\\s[-+]?\d", ""),
        (r"\\[,/&|^:%!{}c]|\\\)", ""),
        (r"\\-", "-"),
        (r"\\\((?:aq|oq|cq)|\\\[(?:aq|oq|cq)\]", "'"),
        (r"\\\((?:dq|lq|rq)|\\\*\(?[lr]?q|\\\[(?:dq|lq|rq)\]", '"'),
        (r"\\\((?:em|en|hy|mi)|\\\[(?:em|en|hy)\]", "-"),
        (r"\\(?:e|\(rs|\[rs\])", r"\\"),
        (r"\\[ ~0]", " "),
        (r"\\\(bu|\\\[bu\]", "*"),
        (r"\\\((?:co|rg|tm)", ""),
        (r'\\".*', ""),
        (r"\\\(.{2}|\\\[[^\]]*\]|\\[hvmdu]'[^']*'|\\\*\(..|\\\*\[[^\]]*\]", " "),
        (r"\\$", ""),
        (r"\\'", "'"),
    )
]

Section = tuple[str, list[tuple[str, str]]]


def read(files: Sequence[Path]) -> Iterator[Pair | Unreadable]:
    """Paragraphs of every page that is there in English too."""
    english: dict[str, str] = {}
    translated: list[tuple[str, str, str]] = []
    for file in files:
        for name, data in members(file, lambda name: "/share/man/" in name and name.endswith(".gz")):
            found = _PAGE.search(name)
            if not found or (found.group(1) or "").startswith("man"):
                continue
            try:
                text = gzip.decompress(data).decode("utf-8")
            except (ValueError, OSError, EOFError) as error:
                yield Unreadable(f"{file.name}:{name}", str(error))
                continue
            if found.group(1) is None:
                english[found.group(3)] = text
            elif (of_language := language(found.group(1))) is not None:
                translated.append((of_language, found.group(3), text))
    known: dict[str, list[Section] | None] = {}
    for of_language, page, text in translated:
        if page not in english:
            continue
        if page not in known:
            known[page] = sections(english[page])
        yield from (Pair(of_language, b, a) for a, b in _aligned(known[page] or [], sections(text) or []))


def _aligned(english: list[Section], foreign: list[Section]) -> Iterator[tuple[str, str]]:
    for (heading, ours), (_, theirs) in zip(english, foreign):
        if heading == "SYNOPSIS" or [macro for macro, _ in ours] != [macro for macro, _ in theirs]:
            continue
        for (macro, one), (_, two) in zip(ours, theirs):
            if macro in ("tag", "literal") or not one or not two:
                continue
            if heading == "NAME":
                one, two = one.split(" - ", 1)[-1], two.split(" - ", 1)[-1]
            yield from split(one, two)


def plain(text: str) -> str:
    r"""Text without escapes.

    >>> plain(r"the \fBgrep\fR command\(aqs \-\-help")
    "the grep command's --help"
    """
    for pattern, instead in _ESCAPES:
        text = pattern.sub(instead, text)
    return text


def sections(text: str) -> list[Section] | None:
    r"""Heading, and macro and text of each paragraph; None for pages in the macros of BSD, which few translate.

    >>> sections(".SH NAME\ngrep \\- print lines\n.SH OPTIONS\n.TP\n.B \\-i\nIgnore case.\n")
    [('', []), ('NAME', [('PP', 'grep - print lines')]), ('OPTIONS', [('tag', '-i'), ('body', 'Ignore case.')])]
    """
    if _OTHER_MACROS.search(text):
        return None
    page = _Page()
    for line in text.split("\n"):
        page.add(line)
    page.flush()
    return page.sections


class _Page:
    """A page while it is read line by line."""

    def __init__(self) -> None:
        self.sections: list[Section] = [("", [])]
        self.lines: list[str] = []
        self.macro = "PP"
        self.tag_follows = self.literal = False

    def flush(self) -> None:
        if self.lines:
            self.sections[-1][1].append((self.macro, plain(" ".join(self.lines)).strip()))
            self.lines = []

    def add(self, line: str) -> None:
        if self.literal:
            self.literal = not _LITERAL_ENDS.match(line)
        elif line.startswith((".", "'")):
            if found := _MACRO.match(line):
                self._call(found.group(1), found.group(2))
        elif not line.strip():
            self.flush()
        else:
            self._text(line.strip())

    def _text(self, text: str) -> None:
        self.lines.append(text)
        if self.tag_follows:
            self.macro = "tag"
            self.flush()
            self.macro, self.tag_follows = "body", False

    def _call(self, macro: str, rest: str) -> None:
        words = [quoted or bare for quoted, bare in _ARGUMENT.findall(rest)]
        if macro in _FONTS:
            text = (" " if macro in _JOINED_BY_BLANKS else "").join(words)
            if text:
                self._text(text)
        elif macro in _IGNORED:
            if macro in _BREAKS:
                self.flush()
        else:
            self.flush()
            if macro in _LITERAL:
                self.literal = True
                self.sections[-1][1].append(("literal", ""))
            elif macro == "SH":
                self.sections.append((plain(" ".join(words)), []))
                self.macro = "PP"
            elif macro == "SS":
                self.sections[-1][1].append(("SS", plain(" ".join(words))))
                self.macro = "PP"
            elif macro in _PARAGRAPHS:
                self.macro = _PARAGRAPHS[macro]
                self.tag_follows = self.macro == "TP"
