"""The user's own parallel text.

    pairs.tsv        language, foreign sentence, English sentence, separated by tabs
    pairs.jsonl      {"language": "de", "foreign": "...", "english": "..."} on each line
    de.po            a catalogue of GNU gettext; its language is named in its header, or by the file
    talk.de talk.en  two text files whose lines belong together, named by the first: talk.de

A line that cannot be read is handed back with the reason, never dropped in silence. Files are read line by line,
whatever their size.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import polib

from gshard_m4.corpus.catalogues import both_sides, parse_po
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


class _TooLong(str):
    """The beginning of a line that is too long."""


class _NoPairError(Exception):
    """Why a line is no pair."""


def read(path: Path) -> Iterator[Pair | BadLine]:
    """The pairs of a file, and the lines that are none.

    Raises:
        CorpusError: the file is missing, empty or not UTF-8, aligned files differ in length, or a catalogue is broken.
    """
    count = _check(path)
    if path.suffix == ".tsv":
        return _pairs(zip(_lines(path)), _from_tsv)
    if path.suffix == ".jsonl":
        return _pairs(zip(_lines(path)), _from_json)
    if path.suffix == ".po":
        return _catalogue(path)
    return _aligned(path, count)


def files_of(path: Path) -> tuple[Path, ...]:
    """The file itself, and the one aligned with it."""
    return (path,) if path.suffix in (".tsv", ".jsonl", ".po") else (path, path.with_suffix(".en"))


def _lines(path: Path) -> Iterator[str]:
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
            empty = empty and not line.strip()
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


def _pairs(rows: Iterable[tuple[str, ...]], parse: Callable[..., tuple[str, str, str]]) -> Iterator[Pair | BadLine]:
    """The pairs of rows of lines that belong together, each parsed into language, foreign and English."""
    for number, lines in enumerate(rows, 1):
        if long := next((line for line in lines if isinstance(line, _TooLong)), None):
            yield BadLine(number, f"more than {LONGEST_LINE:,} bytes", long)
            continue
        try:
            yield _pair(*parse(*lines))
        except _NoPairError as error:
            yield BadLine(number, str(error), lines[0][:_SHOWN])


def _pair(code: str, foreign: str, english: str) -> Pair:
    name = language(code)
    if name is None:
        raise _NoPairError(f"unknown language {code[:20]!r}")
    return Pair(name, foreign, english)


def _from_tsv(line: str) -> tuple[str, str, str]:
    fields = line.split("\t")
    if len(fields) != 3:
        raise _NoPairError(f"{len(fields)} fields instead of 3")
    return fields[0], fields[1], fields[2]


def _from_json(line: str) -> tuple[str, str, str]:
    try:
        record = json.loads(line)
        code, foreign, english = (record[name] for name in ("language", "foreign", "english"))
    except KeyError as error:
        raise _NoPairError(f"no field {error}") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise _NoPairError("not a JSON object") from error
    if not all(isinstance(value, str) for value in (code, foreign, english)):
        raise _NoPairError("a field that is not text")
    return code, foreign, english


def _catalogue(path: Path) -> Iterator[Pair | BadLine]:
    try:
        found = parse_po("\n".join(_lines(path)) + "\n")
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
        if entry.translated():
            yield from (_pair(code, foreign, english) for english, foreign in both_sides(entry))
        elif not entry.obsolete:
            reason = "fuzzy translation" if entry.fuzzy else "no translation"
            yield BadLine(entry.linenum, reason, entry.msgid[:_SHOWN])


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
    return _pairs(zip(_lines(path), _lines(other)), lambda foreign, english: (code, foreign, english))
