"""The user's own parallel text.

    pairs.tsv        language, foreign sentence, English sentence, separated by tabs
    pairs.jsonl      {"language": "de", "foreign": "...", "english": "..."} on each line
    de.po            a catalogue of GNU gettext; its language is named in its header, or by the file
    talk.de talk.en  two text files whose lines belong together, named by the first: talk.de

A line that cannot be read is handed back with the reason, never dropped in silence. Files are read line by line,
whatever their size.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import polib

from gshard_m4.corpus.gettext import parse
from gshard_m4.corpus.language import language
from gshard_m4.corpus.pair import Pair
from gshard_m4.errors import CorpusError

LONGEST_LINE = 100_000
"""Bytes."""

_SHOWN = 200


class BadLine(NamedTuple):
    """A line of a user's file that is no pair: its number from 1, why, and its beginning."""

    number: int
    reason: str
    text: str


class _TooLong(NamedTuple):
    beginning: str


def read(path: Path) -> Iterator[Pair | BadLine]:
    """The pairs of a file, and the lines that are none.

    Raises:
        CorpusError: the file is missing, empty or not UTF-8, aligned files differ in length, or a catalogue is broken.
    """
    count = _check(path)
    if path.suffix == ".tsv":
        return (_from_tsv(i, line) for i, line in enumerate(_lines(path), 1))
    if path.suffix == ".jsonl":
        return (_from_json(i, line) for i, line in enumerate(_lines(path), 1))
    if path.suffix == ".po":
        return _catalogue(path)
    return _aligned(path, count)


def files_of(path: Path) -> tuple[Path, ...]:
    """The file itself, and the one aligned with it."""
    return (path,) if path.suffix in (".tsv", ".jsonl", ".po") else (path, path.with_suffix(".en"))


def _lines(path: Path) -> Iterator[str | _TooLong]:
    # Not splitlines(): it also splits at characters that sentences contain, and aligned files would part there.
    with path.open("rb") as file:
        while line := file.readline(LONGEST_LINE + 1):
            if len(line) > LONGEST_LINE and not line.endswith(b"\n"):
                rest = line
                while rest and not rest.endswith(b"\n"):
                    rest = file.readline(1 << 20)
                yield _TooLong(line[:_SHOWN].decode("utf-8", "replace"))
            else:
                if file.tell() == len(line):
                    line = line.removeprefix(b"\xef\xbb\xbf")
                yield line.decode("utf-8").removesuffix("\n").removesuffix("\r")


def _check(path: Path) -> int:
    """Reads the file once to see that it can be read; the number of its lines."""
    number, empty = 0, True
    try:
        for line in _lines(path):
            number += 1
            empty = empty and not isinstance(line, _TooLong) and not line.strip()
    except OSError as error:
        raise CorpusError(f"the corpus file cannot be read: {error.strerror}.", str(path)) from error
    except UnicodeDecodeError as error:
        raise CorpusError(
            "the corpus file is not UTF-8.",
            f"{path}:{number + 1}",
            f"byte 0x{error.object[error.start]:02x} at position {error.start} of the line",
            f"Convert it first: iconv -f latin1 -t utf-8 {path.name}",
        ) from error
    if empty:
        raise CorpusError("the corpus file is empty.", str(path), hint="Give a file with a pair on each line.")
    return number


def _named(number: int, code: str, foreign: str, english: str, line: str) -> Pair | BadLine:
    name = language(code)
    if name is None:
        return BadLine(number, f"unknown language {code[:20]!r}", line[:_SHOWN])
    return Pair(name, foreign, english)


def _too_long(number: int, line: _TooLong) -> BadLine:
    return BadLine(number, f"more than {LONGEST_LINE:,} bytes", line.beginning)


def _from_tsv(number: int, line: str | _TooLong) -> Pair | BadLine:
    if isinstance(line, _TooLong):
        return _too_long(number, line)
    fields = line.split("\t")
    if len(fields) != 3:
        return BadLine(number, f"{len(fields)} fields instead of 3", line[:_SHOWN])
    code, foreign, english = fields
    return _named(number, code, foreign, english, line)


def _from_json(number: int, line: str | _TooLong) -> Pair | BadLine:
    if isinstance(line, _TooLong):
        return _too_long(number, line)
    try:
        record = json.loads(line)
        code, foreign, english = (record[name] for name in ("language", "foreign", "english"))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        reason = f"no field {error}" if isinstance(error, KeyError) else "not a JSON object"
        return BadLine(number, reason, line[:_SHOWN])
    if not all(isinstance(value, str) for value in (code, foreign, english)):
        return BadLine(number, "a field that is not text", line[:_SHOWN])
    return _named(number, code, foreign, english, line)


def _catalogue(path: Path) -> Iterator[Pair | BadLine]:
    text = "\n".join(line.beginning if isinstance(line, _TooLong) else line for line in _lines(path))
    try:
        found = parse(text + "\n")
    except (OSError, ValueError) as error:
        raise CorpusError(
            "the catalogue cannot be read.", str(path), str(error), f"See what msgfmt --check {path.name} says."
        ) from error
    code = found.metadata.get("Language") or path.stem
    if language(code) is None:
        raise CorpusError(
            "the catalogue does not say of which language it is.",
            str(path),
            code,
            "Name the language in its header (Language: de), or call the file de.po.",
        )
    return _entries(found, code)


def _entries(found: polib.POFile, code: str) -> Iterator[Pair | BadLine]:
    for entry in found:
        if entry.obsolete:
            continue
        if not entry.translated():
            reason = "fuzzy translation" if entry.fuzzy else "no translation"
            yield BadLine(entry.linenum, reason, entry.msgid[:_SHOWN])
        elif entry.msgid_plural:
            forms = [entry.msgstr_plural[i] for i in sorted(entry.msgstr_plural)]
            yield _named(entry.linenum, code, forms[0], entry.msgid, entry.msgid)
            yield _named(entry.linenum, code, forms[-1], entry.msgid_plural, entry.msgid_plural)
        else:
            yield _named(entry.linenum, code, entry.msgstr, entry.msgid, entry.msgid)


def _aligned(path: Path, count: int) -> Iterator[Pair | BadLine]:
    code = path.suffix.lstrip(".")
    other = path.with_suffix(".en")
    if language(code) is None or not other.exists():
        raise CorpusError(
            "this is no parallel text.",
            str(path),
            hint="Give a .tsv, .jsonl or .po file, or talk.de beside talk.en with as many lines.",
        )
    english = _check(other)
    if english != count:
        raise CorpusError(
            "aligned files differ in length.",
            str(path),
            f"{count} lines, and {english} in {other.name}",
            "Line i of one file must be the translation of line i of the other.",
        )
    both = zip(itertools.count(1), _lines(path), _lines(other))
    return (_from_both(number, code, ours, theirs) for number, ours, theirs in both)


def _from_both(number: int, code: str, foreign: str | _TooLong, english: str | _TooLong) -> Pair | BadLine:
    for line in (foreign, english):
        if isinstance(line, _TooLong):
            return _too_long(number, line)
    return _named(number, code, str(foreign), str(english), str(foreign))
