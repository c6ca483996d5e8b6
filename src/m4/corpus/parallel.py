"""The user's own parallel text.

    pairs.tsv        language, foreign sentence, English sentence, separated by tabs
    pairs.jsonl      {"language": "de", "foreign": "...", "english": "..."} on each line
    talk.de talk.en  two text files whose lines belong together, named by the first: talk.de

A line that cannot be read is handed back with the reason, never dropped in silence.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from m4.corpus.language import language
from m4.corpus.pair import Pair
from m4.errors import CorpusError


class BadLine(NamedTuple):
    """A line of a user's file that is no pair: its number from 1, why, and the line."""

    number: int
    reason: str
    text: str


def read(path: Path) -> Iterator[Pair | BadLine]:
    """The pairs of a file, and the lines that are none.

    Raises:
        CorpusError: the file is missing, empty or not UTF-8, or aligned files differ in length.
    """
    lines = _lines(path)
    if path.suffix == ".tsv":
        return (_from_tsv(i, line) for i, line in enumerate(lines, 1))
    if path.suffix == ".jsonl":
        return (_from_json(i, line) for i, line in enumerate(lines, 1))
    return _aligned(path, lines)


def files_of(path: Path) -> tuple[Path, ...]:
    """The file itself, and the one aligned with it."""
    return (path,) if path.suffix in (".tsv", ".jsonl") else (path, path.with_suffix(".en"))


def _lines(path: Path) -> list[str]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CorpusError(f"the corpus file cannot be read: {error.strerror}.", str(path)) from error
    if not data.strip():
        raise CorpusError("the corpus file is empty.", str(path), way_out="Give a file with a pair on each line.")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        raise CorpusError(
            "the corpus file is not UTF-8.",
            f"{path}:{number}",
            f"byte 0x{data[error.start]:02x} at position {error.start}",
            f"Convert it first: iconv -f latin1 -t utf-8 {path.name}",
        ) from error
    # Not splitlines(): it also splits at characters that sentences contain, and aligned files would part there.
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]


def _named(number: int, code: str, foreign: str, english: str, line: str) -> Pair | BadLine:
    name = language(code)
    return BadLine(number, f"unknown language {code!r}", line) if name is None else Pair(name, foreign, english)


def _from_tsv(number: int, line: str) -> Pair | BadLine:
    fields = line.split("\t")
    if len(fields) != 3:
        return BadLine(number, f"{len(fields)} fields instead of 3", line)
    code, foreign, english = fields
    return _named(number, code, foreign, english, line)


def _from_json(number: int, line: str) -> Pair | BadLine:
    try:
        record = json.loads(line)
        return _named(number, str(record["language"]), str(record["foreign"]), str(record["english"]), line)
    except (ValueError, KeyError, TypeError) as error:
        reason = f"no field {error}" if isinstance(error, KeyError) else "not a JSON object"
        return BadLine(number, reason, line)


def _aligned(path: Path, lines: list[str]) -> Iterator[Pair | BadLine]:
    code = path.suffix.lstrip(".")
    other = path.with_suffix(".en")
    if language(code) is None or not other.exists():
        raise CorpusError(
            "this is no parallel text.",
            str(path),
            way_out="Give a .tsv or .jsonl file, or talk.de beside talk.en with as many lines.",
        )
    english = _lines(other)
    if len(english) != len(lines):
        raise CorpusError(
            "aligned files differ in length.",
            str(path),
            f"{len(lines)} lines, and {len(english)} in {other.name}",
            "Line i of one file must be the translation of line i of the other.",
        )
    return (_named(i, code, *both, both[0]) for i, both in enumerate(zip(lines, english, strict=True), 1))
