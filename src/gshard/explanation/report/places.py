"""Places: short names and surrounding text of the user's source lines."""

from __future__ import annotations

import linecache
import os
from typing import Any

from gshard.core.jax_adapter import user_place
from gshard.core.program import Equation

CONTEXT = 3  # source lines shown around one that makes something


class Places:
    """Source lines by number; the text around them is read at the end."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, int], None] = {}
        self.short: dict[str, str] = {}

    def of(self, e: Equation | None) -> str:
        """``path:line`` of an equation, as the page names it; empty if unknown."""
        place = None if e is None else user_place(e.source_info)
        return "" if e is None or place is None else self.at(*place, e.file)

    def at(self, path: str, line: int, file: str = "") -> str:
        """The same of a line of a file, which the program calls ``file`` where its own name is not enough."""
        self.known[path, line] = None
        return f"{self._name(path, file)}:{line}"

    def _name(self, path: str, file: str = "") -> str:
        """The shortest end of a path that names one file, as lines of the program call it."""
        if path not in self.short:
            parts = path.split("/")
            count = file.count("/") + 1
            while "/".join(parts[-count:]) in self.short.values() and count < len(parts):
                count += 1
            self.short[path] = "/".join(parts[-count:])
        return self.short[path]

    def files(self) -> list[dict[str, Any]]:
        """For each file its lines that are worth showing: number and text.

        Of a file that cannot be read here, such as one of a program that was compiled elsewhere, the lines that make
        something, without text.
        """
        wanted: dict[str, set[int]] = {}
        for path, line in self.known:
            wanted.setdefault(path, set()).update(range(line - CONTEXT, line + CONTEXT + 1))
        shown = []
        for path, numbers in wanted.items():
            # A cell of a notebook is no file, but its text is known.
            texts = linecache.getlines(path) if os.path.exists(path) or path in linecache.cache else []
            lines = [[n, texts[n - 1].rstrip("\n")] for n in sorted(numbers) if 0 < n <= len(texts)]
            lines = lines or [[n, ""] for n in sorted(n for known, n in self.known if known == path)]
            shown.append({"name": self._name(path), "lines": lines})
        return shown
