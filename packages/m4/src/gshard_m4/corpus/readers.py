"""Readers: how the pairs of a source are found in its packages, by the name that sources.tsv gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from gshard_m4.corpus import debian, descriptions, gettext, josm, keyed, mozilla, udhr
from gshard_m4.corpus.pair import Pair, Unreadable

Reader = Callable[[Sequence[Path]], Iterator[Pair | Unreadable]]

READERS: Mapping[str, Reader] = MappingProxyType(
    {
        "component": keyed.read_component,
        "debian": debian.read,
        "descriptions": descriptions.read,
        "gettext": gettext.read,
        "josm": josm.read,
        "mediawiki": keyed.read_mediawiki,
        "mozilla": mozilla.read,
        "po_folders": gettext.read_folders,
        "po_named": gettext.read_named,
        "scratch": keyed.read_scratch,
        "udhr": udhr.read,
    }
)
