"""Baselines: compares a program with a limit or with an earlier version (``gshard explain --baseline``).

gshard explain train.py:example --json main.json                               # once, on the main branch
gshard explain train.py:example --fail-above 50MiB --baseline main.json        # exit status 3 if it is more
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gshard.core.program import format_bytes
from gshard.explanation.difference import difference
from gshard.named_target import TargetError
from gshard.remat.rematerialise import MemoryLimitError, bytes_of

_SHOWN = 5  # lines that a failure names
_GROWTH = 1.01  # of FLOPs and memory: less is no change of the plan
SIGNALLED = 128  # exit status after a signal, with its number added, as shells have it


class CheckFailed(Exception):
    """More is sent, computed or held than is allowed; the text says what and where."""


def explanation_in(path: str) -> dict[str, Any]:
    """What ``--json`` wrote."""
    hint = "Write one with: gshard explain TARGET --json FILE"
    try:
        data: dict[str, Any] = json.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise TargetError(f"{path} cannot be read: {error.strerror}.", hint=hint) from error
    except ValueError as error:
        raise TargetError(f"{path} is no explanation: {error}.", hint=hint) from error
    return data


def limit_of(text: str) -> int:
    """A number of bytes: ``50MiB``, or 0."""
    try:
        return 0 if text.strip() in ("0", "0B") else bytes_of(text)
    except MemoryLimitError as error:
        raise TargetError(f"--fail-above {text} is no number of bytes.", hint="Write 50MiB, 1.5GB or 0.") from error


def end_search(stopped: int | None, peak: int, limit: float) -> None:
    """Ends the command that searched: as a signal asks for, if one ended the search; else by what fits."""
    if stopped is not None:
        raise SystemExit(SIGNALLED + stopped)
    check_fits(peak, int(limit))


def check_fits(peak: int, memory: int) -> None:
    """Refuses what does not fit."""
    if peak > memory:
        raise CheckFailed(
            f"this does not fit: a device would hold {format_bytes(peak)}, and may {format_bytes(memory)}."
        )


def check_sent(data: Mapping[str, Any], limit: int | None, baseline: Mapping[str, Any] | None) -> None:
    """Refuses a program that goes beyond ``--fail-above`` or ``--baseline``."""
    failures = [
        "" if limit is None else over_limit(data, limit),
        "" if baseline is None else over_baseline(baseline, data),
    ]
    if any(failures):
        raise CheckFailed("\n\n".join(filter(None, failures)))


def over_limit(data: Mapping[str, Any], limit: int) -> str:
    """The lines that send most, if each device sends more than so many bytes in one call; else nothing."""
    total = data["totals"]["sent"]
    if total <= limit:
        return ""
    most = sorted(data["lines"].items(), key=lambda pair: -pair[1][1])[:_SHOWN]
    texts = {f"{f['name']}:{n}": text.strip() for f in data["files"] for n, text in f["lines"]}
    sent = f"each device sends {format_bytes(total)} in one call of {data['name']}"
    rows = [f"  {format_bytes(row[1]):>10}  {place}  {texts.get(place, '')}" for place, row in most if row[1]]
    return "\n".join([f"{sent}, and --fail-above allows {format_bytes(limit)}. Most is sent by", *rows])


def over_baseline(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """What grew, with its lines, if a program sends more bytes than it did, or computes or holds a percent more."""
    found = difference(before, after)
    grown = []
    if found.after.sent > found.before.sent:
        grown.append("bytes sent")
    if found.after.flops > _GROWTH * found.before.flops:
        grown.append("FLOPs of a device")
    if found.peaks is not None and found.peaks[1] > _GROWTH * found.peaks[0]:
        grown.append("peak memory of a device")
    if not grown:
        return ""
    rows = [line for line in found.lines if line.more > 0 or line.after.flops > _GROWTH * line.before.flops]
    totals = found.format(lines=0).partition("\n\n")[0]
    lines = [f"{' and '.join(grown)} grew since the baseline.", *totals.splitlines(), "", "worse"]
    for line in rows[:_SHOWN]:
        flops = f", {line.before.flops:,} -> {line.after.flops:,} FLOPs" if line.after.flops > line.before.flops else ""
        sent = f"{format_bytes(line.before.sent)} -> {format_bytes(line.after.sent)}"
        lines.append(f"  {line.place}  {sent}{flops}  {line.text.strip()[:70]}")
    if len(rows) > _SHOWN:
        lines.append(f"  and {len(rows) - _SHOWN} more lines")
    return "\n".join(lines if rows else lines[:-2])
