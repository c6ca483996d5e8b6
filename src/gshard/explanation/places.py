"""Places: lines of the user's source, with short names and the text around them."""

from __future__ import annotations

import linecache
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Place(NamedTuple):
    """A line of the user's source."""

    path: str  # the whole path of the file
    line: int
    file: str = ""  # what the program calls the file; empty if its own name is enough


class Places:
    """Source lines by number; the text around them is read at the end."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, int], None] = {}
        self.short: dict[str, str] = {}

    def of(self, place: Place | None) -> str:
        """``path:line``, as the page names it; empty if unknown."""
        if place is None:
            return ""
        self.known[place.path, place.line] = None
        return f"{self._name(place.path, place.file)}:{place.line}"

    def _name(self, path: str, file: str = "") -> str:
        """The shortest end of a path that names one file, as lines of the program call it."""
        if path not in self.short:
            parts = path.split("/")
            count = file.count("/") + 1
            while "/".join(parts[-count:]) in self.short.values() and count < len(parts):
                count += 1
            self.short[path] = "/".join(parts[-count:])
        return self.short[path]

    def files(self, costs: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
        """For each file its lines that are worth showing: number and text. The files that send most come first.

        Of a file that cannot be read here, such as one of a program that was compiled elsewhere, the lines that make
        something, without text.
        """
        wanted: dict[str, set[int]] = {}
        for path, line in self.known:
            wanted.setdefault(path, set()).update(range(line - 3, line + 4))
        shown = []
        for path, numbers in wanted.items():
            # A cell of a notebook is no file, but its text is known.
            texts = linecache.getlines(path) if os.path.exists(path) or path in linecache.cache else []
            lines = [[n, texts[n - 1].rstrip("\n")] for n in sorted(numbers) if 0 < n <= len(texts)]
            lines = lines or [[n, ""] for n in sorted(n for known, n in self.known if known == path)]
            shown.append({"name": self._name(path), "lines": lines})
        sent: Counter[str] = Counter()
        for place, row in costs.items():
            sent[place.rpartition(":")[0]] += int(row[1])
        return sorted(shown, key=lambda f: -sent[f["name"]])
