"""Compiled rows: the collectives of a compiled program, one row for what differs in nothing but the layer."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

from gshard.explanation.rows import CollectiveRow
from gshard.naming.short_names import equal_layers
from gshard.xla_programs.compiled_program import CompiledProgram
from gshard.xla_programs.moved_parts import Part, axes_text


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CompiledRow(CollectiveRow):
    """Collectives of one kind over the same devices for the same line."""

    place: str  # the line with the whole path of its file
    parts: tuple[Part, ...] = dataclasses.field(default=(), repr=False)  # what it was made of

    @property
    def is_attributed(self) -> bool:
        """Whether a line or a module is known."""
        return bool(self.line or self.module)


def compiled_rows(
    program: CompiledProgram, parts: Sequence[Part], taken: Mapping[int, tuple[float, float]] | None = None
) -> tuple[CompiledRow, ...]:
    """The collectives of a program, most bytes first."""
    # With the operator inside, so that a scope with a number that holds no other scope may be a layer, too.
    paths = {(*p.origin.module.split("/"), p.origin.operation): None for p in parts if p.origin.module}
    folded = {path[:-1]: alike[:-1] for path, alike in equal_layers(paths, same_inside=False).items()}
    rows: dict[Hashable, list[Part]] = {}
    for part in parts:
        path = tuple(part.origin.module.split("/"))
        module = "/".join(folded.get(path, path))
        read = part.sent.collective
        key = (read.kind, axes_text(program, part.sent), part.line, str(part.type), part.array.alike, module, part.why)
        rows.setdefault(key, []).append(part)
    sharing = Counter(sent for same in rows.values() for sent in {id(part.sent) for part in same})
    made = [
        dataclasses.replace(
            _row(program, same, folded, taken or {}), sharing=max(sharing[id(part.sent)] for part in same)
        )
        for same in rows.values()
    ]
    return tuple(sorted(made, key=lambda row: (-row.bytes, -row.seconds)))


def _row(
    program: CompiledProgram,
    same: Sequence[Part],
    folded: Mapping[tuple[str, ...], tuple[str, ...]],
    taken: Mapping[int, tuple[float, float]],
) -> CompiledRow:
    first = same[0]
    modules = {part.origin.module for part in same}
    path = tuple(first.origin.module.split("/"))
    module = first.origin.module if len(modules) == 1 else "/".join(folded.get(path, path))
    names = {part.array.text for part in same}
    times = {part.sent: part.sent.collective.executions for part in same}
    sent = sum(part.bytes * part.sent.collective.executions for part in same)
    # What one message takes is shared by its arrays as its bytes are.
    shares = [
        (part.bytes / part.sent.collective.bytes_moved * part.sent.collective.executions, id(part.sent.itself))
        for part in same
        if part.sent.collective.bytes_moved
    ]
    seconds, exposed = (sum(share * taken.get(which, (0.0, 0.0))[k] for share, which in shares) for k in (0, 1))
    return CompiledRow(
        kind=first.sent.collective.kind, axes=axes_text(program, first.sent), times=sum(times.values()), bytes=sent,
        shape=str(first.type), line=first.line, why=first.why, module=module, place=first.place, seconds=seconds,
        array=first.array.text if len(names) == 1 else first.array.alike, exposed=exposed, parts=tuple(same),
        arrays=len(names) if first.is_named else len(modules),
        exact=all(part.sent.collective.exact for part in same),
    )  # fmt: skip
