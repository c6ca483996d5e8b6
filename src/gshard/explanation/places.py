"""Places: lines of the user's source, with short names and the text around them.

The place of an operation is the innermost line outside of libraries and of the user's own helpers.
"""

from __future__ import annotations

import linecache
import os
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from gshard.core.jax_adapter import Frame

_Function = tuple[str, str]  # its file and its name


class Place(NamedTuple):
    """A line of the user's source."""

    path: str  # the whole path of the file
    line: int
    file: str = ""  # what the program calls the file; empty if its own name is enough
    via: tuple[str, int] | None = None  # path and line of the helper that is called there; None without a helper

    @property
    def text(self) -> str:
        """``model.py:88``, or ``model.py:88 via linears.py:110``."""
        own = f"{self.file or self.path.rpartition('/')[2]}:{self.line}"
        return own if self.via is None else f"{own} via {self.via[0].rpartition('/')[2]}:{self.via[1]}"


def place_in(frames: Sequence[Frame], helpers: Collection[_Function], file: str = "") -> Place | None:
    """The place of an operation with these frames: the first one that is not in a helper, or called by one."""
    if not frames:
        return None
    chain = _once(frames) if helpers else frames
    outermost = max((i for i, (path, _, name) in enumerate(chain) if (path, name) in helpers), default=-1)
    (path, line, _), inner = chain[min(outermost + 1, len(chain) - 1)], frames[0][:2]
    return Place(path, line, file if path == inner[0] else "", None if (path, line) == inner else inner)


def helpers_of(products: Iterable[Sequence[Frame]], others: Iterable[Sequence[Frame]] = ()) -> frozenset[_Function]:
    """The helpers among the functions of a program, each with the path of its file.

    A helper is a function that is called from more lines than it shows: ``dense``, whose one product is that of all
    layers. A loss of several lines that is called twice is no helper. In a function with products their lines count.

    Args:
        products, others: the frames of operations, innermost first.

    >>> calls = [[("m.py", 3, "dense"), ("m.py", line, "loss")] for line in (8, 9)]
    >>> place_in(calls[1], helpers_of(calls)).text
    'm.py:9 via m.py:3'
    """
    chains = dict.fromkeys(map(_once, products))
    multiply = {(path, name) for chain in chains for path, _, name in chain}
    chains |= dict.fromkeys(c for c in map(_once, others) if not {(path, name) for path, _, name in c[:1]} & multiply)
    inside: dict[_Function, list[tuple[int, tuple[Frame, ...]]]] = defaultdict(list)
    for chain in chains:
        for i, (path, _, name) in enumerate(chain):
            inside[path, name].append((i, chain))
    helpers = set[_Function]()
    for function, calls in sorted(inside.items(), key=lambda pair: max(i for i, _ in pair[1])):  # the inner ones first
        callers = {chain[i + 1][:2] for i, chain in calls if i + 1 < len(chain)}
        places = (place_in(chain, helpers) for _, chain in calls) if len(callers) > 1 else ()
        if len(callers) > max(1, len({place and place[:2] for place in places})):
            helpers.add(function)
    return frozenset(helpers)


def _once(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """The innermost frame of each function: what JAX traced once for several calls has the frames of both."""
    chain: dict[_Function, Frame] = {}
    for frame in frames:
        chain.setdefault((frame[0], frame[2]), frame)
    return tuple(chain.values())


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
