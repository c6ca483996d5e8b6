"""Pair: one sentence in some language, and the same in English."""

from __future__ import annotations

from typing import NamedTuple


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
