"""Prepared: what `gshard-m4 prepare` made, and what there is to know about it before training on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gshard_m4.corpus.hold_out import DEV, TEST, TRAIN
from gshard_m4.corpus.known_english import KNOWN_DEV, KNOWN_TEST
from gshard_m4.prepare_config import FORMAT

ENOUGH = 100
"""Held-out pairs below which a score says little."""

_SAID = 12  # sources that are printed one by one


@dataclasses.dataclass(frozen=True)
class Prepared:
    """What came of it; print it.

    Attributes:
        manifest: the contents of manifest.json.
        was_there: whether the folder had been prepared already.
    """

    manifest: dict[str, Any]
    was_there: bool

    def __str__(self) -> str:
        m = self.manifest
        lines = [f"corpus in {m['folder']}{' (prepared before)' if self.was_there else ''}"]
        lines += _about_sources(m["sources"])
        for f in m["files"]:
            lines.append(f"  {f['path']}: {f['pairs']:,} pairs, {f['rejected']:,} lines rejected (rejected.tsv)")
        lines += [f"    {n:,} lines with {reason}" for reason, n in list(m["rejected"].items())[:10]]
        left_out = ", ".join(f"{n:,} {reason}" for reason, n in m["left_out"].items())
        lines.append(f"  left out: {left_out}")
        largest = ", ".join(f"{name} {n:,}" for name, n in list(m["languages"].items())[:8])
        found = f" of {m['found']['languages']} found" if m["found"]["languages"] > len(m["languages"]) else ""
        lines.append(f"  {len(m['languages'])} languages{found}; the largest: {largest}")
        parts = ", ".join(f"{p} {m['pairs'][p]:,}" for p in (TRAIN, DEV, TEST))
        lines.append(f"  pairs: {parts}; {m['english']:,} different English sentences, no one in two of these parts")
        lines += _about_known(m)
        lines.append(f"  vocabularies: {m['source_vocabulary']:,} and {m['target_vocabulary']:,} pieces")
        lines += _about_lengths(m)
        return "\n".join([*lines, *_warnings(m), *_about_twins(m)])


def _about_known(m: Mapping[str, Any]) -> Iterator[str]:
    if m.get("format") != FORMAT:
        yield (
            "  another version prepared this corpus: it stays as it is, with the runs that belong to it.\n"
            "  To have one of this version, prepare into another folder with --output"
        )
    elif m["pairs"][KNOWN_TEST]:
        yield (
            f"  known English: {m['pairs'][KNOWN_TEST]:,} pairs for a second test and {m['pairs'][KNOWN_DEV]:,} for "
            "dev, kept out of their language while others keep their English"
        )
    elif m["settings"]["known"]:
        yield "  known English: no second test, since too few English sentences are in three languages or more"


def _about_lengths(m: Mapping[str, Any]) -> Iterator[str]:
    length = m["settings"]["length"]
    yield f"  rows of {length} tokens"
    if m["too_long"]:
        share = 100 * m["too_long"] / m["pairs"][TRAIN]
        told = (
            f"  {m['too_long']:,} training pairs ({share:.1f} %) are longer than {length} tokens and will not be used"
        )
        needed = m.get("length_of_nearly_all", length)
        yield told + (f"; --length {needed} holds 99 % of the pairs" if needed > length else "")


def _warnings(m: Mapping[str, Any]) -> Iterator[str]:
    for part, option in ((DEV, "--dev"), (TEST, "--test")):
        count = m["pairs"][part]
        if count < ENOUGH:
            yield (
                f"warning: {part} has {count:,} pairs, too few to tell one model from another (100 or more can): "
                f"hold out a larger share with {option}, or give more text"
            )


def _about_twins(m: Mapping[str, Any]) -> Iterator[str]:
    if count := m.get("near_twins"):
        yield (
            f"warning: {count:,} English sentences of the test have a near twin in training, for this text has few "
            "without:\n  scores show in part what was learnt by heart; --test-files takes a test of your own"
        )


def _about_sources(sources: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    missing = [s for s in sources if s["problem"]]
    there = sorted((s for s in sources if not s["problem"]), key=lambda s: -s["pairs"])
    for s in missing:
        yield f"  {_title(s)}: not to be had, going on without it ({s['problem']})"
    for s in there[:_SAID]:
        counts = f"{s['pairs']:,} pairs in {s['languages']} languages"
        broken = f", {s['unreadable']:,} files cannot be read (rejected.tsv)" if s["unreadable"] else ""
        yield f"  {_title(s)} ({s['licence']}): {counts}{broken}"
    rest = there[_SAID:]
    if rest:
        yield f"  {len(rest)} more sources: {sum(s['pairs'] for s in rest):,} pairs (manifest.json)"


def _title(source: Mapping[str, Any]) -> str:
    return f"{source['name']} {source['version']}".strip()
