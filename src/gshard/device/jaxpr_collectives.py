"""Counts the collectives of a per-device program in its jaxpr, independently of the partitioner's notes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from gshard.comm.collectives import collectives_of
from gshard.core.spmd import Collective


def emitted(jaxpr: Any, sizes: Mapping[str, int]) -> Counter[str]:
    """Bytes that each device sends in one call, by kind. The body of a loop of unknown length counts once."""
    found: Counter[str] = Counter()
    for kind, _, sent, _ in collectives_of(jaxpr, sizes):
        found[kind] += sent
    return +found


def reported(collectives: Iterable[Collective]) -> Counter[str]:
    """The bytes that a program reports, in the same form."""
    found: Counter[str] = Counter()
    for c in collectives:
        found[c.kind] += c.total_bytes
    return +found
