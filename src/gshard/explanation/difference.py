"""Difference: compares two explanations, by line of the source, and by collective."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gshard.core.errors import GShardError
from gshard.core.number_text import format_ms, format_seconds, significant
from gshard.core.program import format_bytes, format_flops
from gshard.device.cost import CallTotals

FORMAT = 3  # of the data that is compared; it is written into it
_ALIKE = 0.3  # files of two names with so much in common are one that was renamed
_LIKE = 0.6  # a line that is similar to this degree was edited


class DifferenceError(GShardError):
    """What is compared is no explanation."""


@dataclasses.dataclass(frozen=True, slots=True)
class Figures:
    """What a line, or a program, takes on each device in one call."""

    sent: int = 0  # bytes
    flops: int = 0  # operations
    seconds: float = 0.0  # of a call, as modelled; 0 without a machine
    peak: int = 0  # bytes that it holds at most; 0 of a line
    messages: int = 0  # how many collectives run; 0 of a line

    @property
    def message(self) -> str:
        """How many collectives run, and what each device sends in them."""
        return f"x{self.messages} {format_bytes(self.sent)}" if self.messages else "none"


def change_text(before: Figures | CallTotals, after: Figures | CallTotals) -> str:
    """What a program takes with a change: bytes sent, memory, and time; without a machine its operations."""
    rows: list[tuple[str, Any, Any, Any]] = [
        ("sent", before.sent, after.sent, format_bytes),
        ("peak", before.peak, after.peak, format_bytes),
    ]
    if before.seconds:
        rows.append(("a call", before.seconds, after.seconds, format_seconds))
    else:
        rows.append(("computed", before.flops, after.flops, format_flops))
    texts = [(what, show(then), show(now)) for what, then, now, show in rows]
    return ", ".join(f"{what} {then} -> {now}" if then != now else f"{what} {then}" for what, then, now in texts)


@dataclasses.dataclass(frozen=True, slots=True)
class LineChange:
    """One line of the source, or the collectives that move one array."""

    place: str  # ``file:line``, after the change; before it, if the line is gone; or ``all_gather of params/up in mlp``
    text: str  # the line
    before: Figures  # before, after: its figures
    after: Figures

    @property
    def more(self) -> int:
        """Bytes that each device sends more."""
        return self.after.sent - self.before.sent


@dataclasses.dataclass(frozen=True)
class Difference:
    """Two explanations, by line and by collective."""

    names: tuple[str, str]  # what they are of, before and after
    before: Figures  # before, after: the totals
    after: Figures
    lines: tuple[LineChange, ...]  # those whose figures changed, the largest changes in bytes first
    # the kinds of collectives whose figures changed, and then what they move; the largest changes in bytes first
    collectives: tuple[LineChange, ...]

    @property
    def worse(self) -> tuple[LineChange, ...]:
        """The lines that send more bytes than before."""
        return tuple(line for line in self.lines if line.more > 0)

    def data(self) -> dict[str, Any]:
        """The same as lists and dictionaries, as the page shows them."""
        return dataclasses.asdict(self)

    def format(self, lines: int = 20) -> str:
        """The totals, and at most so many lines."""
        a, b = self.before, self.after
        rows: list[tuple[str, Any, Any, Any]] = [
            ("sent by each device", a.sent, b.sent, format_bytes),
            ("collectives in one call", a.messages, b.messages, str),
            ("FLOPs of a device", a.flops, b.flops, format_flops),
            ("peak memory of a device", a.peak, b.peak, format_bytes),
        ]
        if a.seconds or b.seconds:
            rows.append(("modelled time of a call", a.seconds, b.seconds, format_ms))
        text = [f"{self.names[0]} -> {self.names[1]}"]
        text += [f"  {what:<24} {show(x):>12} -> {show(y):>12}  {_percent(x, y)}" for what, x, y, show in rows]
        if self.collectives:
            text += ["", "collectives (how many run, and the bytes that each device sends)"]
            text += [f"  {c.before.message:>16} -> {c.after.message:<16} {c.place}" for c in self.collectives[:lines]]
        if len(self.collectives) > lines:
            text.append(f"  ... and {len(self.collectives) - lines} more rows")
        if not self.lines:
            return "\n".join([*text, "", "no line changed"])
        text += ["", "lines (bytes sent, FLOPs, time: after minus before)"]
        for line in self.lines[:lines]:
            flops, seconds = line.after.flops - line.before.flops, line.after.seconds - line.before.seconds
            sent = _signed(line.more, format_bytes)
            text.append(
                f"  {sent:>12} {_signed(flops, format_flops):>12} {_signed(seconds, format_seconds):>11}  {line.place}"
            )
            text[-1] += f"  {line.text.strip()[:60]}" if line.text else ""
        if len(self.lines) > lines:
            text.append(f"  ... and {len(self.lines) - lines} more lines")
        return "\n".join(text)

    def __str__(self) -> str:
        return self.format()


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> Difference:
    """Compares the data of two explanations."""
    for data in (before, after):
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            raise DifferenceError(
                "this is no explanation that can be compared.",
                got="it was written by another version of gshard"
                if isinstance(data, Mapping) and "totals" in data
                else "it has no totals",
                hint="Write it with: gshard explain TARGET --json FILE",
            )
    _check_machines(*(data.get("machine") for data in (before, after)))
    before, after = _timed_alike(before, after)
    moved = dict(_matched(before["files"], after["files"]))
    texts = {f"{f['name']}:{n} (gone)": text for f in before["files"] for n, text in f["lines"]}
    texts |= {f"{f['name']}:{n}": text for f in after["files"] for n, text in f["lines"]}
    earlier: dict[str, Figures] = {}
    for place, row in before["lines"].items():
        name, _, number = place.rpartition(":")
        found = moved.get((name, int(number)), place if (name, int(number)) not in moved else None)
        earlier[found if found is not None else f"{place} (gone)"] = _figures(row)
    later = {place: _figures(row) for place, row in after["lines"].items()}
    sent, sends = ({of: Figures(size, messages=n) for of, (n, size) in d["sent"].items()} for d in (before, after))
    collectives = sorted(_changes(sent, sends, {}), key=lambda change: " of " in change.place)
    names_of = [field.name for field in dataclasses.fields(Figures)]
    was, now = (Figures(*(data["totals"][name] for name in names_of)) for data in (before, after))
    names = str(before["name"]), str(after["name"])
    return Difference(names, was, now, tuple(_changes(earlier, later, texts)), tuple(collectives))


def _changes(
    before: Mapping[str, Figures], after: Mapping[str, Figures], texts: Mapping[str, str]
) -> Sequence[LineChange]:
    """What differs, the largest changes in bytes first."""
    none = Figures()
    every = (LineChange(p, texts.get(p, ""), before.get(p, none), after.get(p, none)) for p in {**before, **after})
    changed = (line for line in every if line.before != line.after)
    return sorted(changed, key=lambda c: (-abs(c.more), -abs(c.after.seconds - c.before.seconds), c.place))


def _timed_alike(*sides: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Both sides, without times if one of them has none."""
    if all(side.get("machine", True) is not None for side in sides):
        return list(sides)
    return [
        {
            **side,
            "totals": {**side["totals"], "seconds": 0.0},
            "lines": {place: [0.0, *row[1:]] for place, row in side["lines"].items()},
        }
        for side in sides
    ]


def _check_machines(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> None:
    """Refuses times of two kinds of machines; more devices of one kind are a change that can be asked about."""
    if not before or not after:
        return
    if before["kind"] != after["kind"]:
        raise DifferenceError(
            "modelled times of two kinds of machines cannot be compared.",
            got=f"before: {before['name']}; after: {after['name']}",
            hint="Explain both for one kind: --machine, in Python machine=.",
        )


def _figures(row: Sequence[float]) -> Figures:
    seconds, sent, flops = row
    return Figures(int(sent), int(flops), seconds)


def _matched(
    before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[tuple[str, int], str | None]]:
    """For each line that was shown before, the place where it is now; None where it is gone."""
    later = {f["name"]: f for f in after}
    free = [f for f in after if f["name"] not in {b["name"] for b in before}]
    for f in before:
        g = later.get(f["name"]) or max(free, key=lambda g: _matcher(f, g).ratio(), default=None)
        if g is None or (g["name"] != f["name"] and _matcher(f, g).ratio() < _ALIKE):
            continue
        if not any(text for side in (f, g) for _, text in side["lines"]):  # files that cannot be read here
            yield from (((f["name"], n), f"{g['name']}:{n}") for n, _ in f["lines"])
            continue
        for kind, i, end, j, stop in _matcher(f, g).get_opcodes():
            pairs = zip(range(i, end), range(j, stop)) if kind == "equal" else _edited(f, g, i, end, j, stop)
            same = dict(pairs)
            for k in range(i, end):
                yield (f["name"], f["lines"][k][0]), f"{g['name']}:{g['lines'][same[k]][0]}" if k in same else None


def _edited(
    f: Mapping[str, Any], g: Mapping[str, Any], i: int, end: int, j: int, stop: int
) -> Iterator[tuple[int, int]]:
    """Of lines that were replaced by others, those that are still much alike, in order."""
    for k in range(i, end):
        kept = {m: _kept(f["lines"][k][1].strip(), g["lines"][m][1].strip()) for m in range(j, stop)}
        best = max(kept, key=lambda m: kept[m], default=None)
        if best is not None and kept[best] > _LIKE:
            yield k, best
            j = best + 1


def _kept(before: str, after: str) -> float:
    """How much of the shorter of two lines is in the longer one: what is wrapped in a mark is all there."""
    blocks = difflib.SequenceMatcher(None, before, after, autojunk=False).get_matching_blocks()
    return sum(block.size for block in blocks if block.size > 1) / max(1, min(len(before), len(after)))


def _matcher(f: Mapping[str, Any], g: Mapping[str, Any]) -> difflib.SequenceMatcher[str]:
    ours, theirs = ([str(text).strip() for _, text in side["lines"]] for side in (f, g))
    return difflib.SequenceMatcher(None, ours, theirs, autojunk=False)


def _signed(n: Any, show: Any) -> str:
    return "=" if not n else f"{'+' if n > 0 else '-'}{show(abs(n))}"


def _percent(before: float, after: float) -> str:
    if before == after:
        return "unchanged"
    if not before:
        return "new"
    return f"x {significant(after / before, 4)}" if after > 10 * before else f"{100 * (after - before) / before:+.1f} %"
