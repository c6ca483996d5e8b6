"""Pair: one sentence in some language, and the same in English; and how files of them are read and written."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TextIO


class Pair(NamedTuple):
    """A translation by a human.

    Attributes:
        language: its name, such as ``pt`` or ``zh_Hans``.
        foreign: the sentence in that language.
        english: the same in English.
    """

    language: str
    foreign: str
    english: str


class Unreadable(NamedTuple):
    """A file inside a package's archive that should hold pairs and cannot be read: its name, and why."""

    name: str
    problem: str


def rows(path: Path) -> Iterator[list[str]]:
    """The cells of each line of a file, which tabs part; only a line feed ends a line."""
    with path.open(encoding="utf-8", newline="\n") as lines:
        for line in lines:
            yield line.rstrip("\n").split("\t")


def writing(path: Path) -> TextIO:
    """A new file of such lines; compressed if its name says so."""
    if path.suffix == ".gz":
        return gzip.open(path, "wt", compresslevel=1, encoding="utf-8", newline="\n")
    return path.open("w", encoding="utf-8", newline="\n")
