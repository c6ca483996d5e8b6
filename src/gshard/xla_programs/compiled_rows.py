"""Compiled rows: the collectives of a compiled program, one row for what differs in nothing but the layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence

from gshard.naming.short_names import equal_layers
from gshard.xla_programs.compiled_program import CompiledProgram
from gshard.xla_programs.moved_parts import Part, axes_text


@dataclasses.dataclass(frozen=True, slots=True)
class CompiledRow:
    """Collectives of one kind over the same devices for the same line.

    Attributes:
        kind: all_gather, all_reduce, reduce_scatter, all_to_all, collective_permute, or a rarer one.
        axes: the axes of the mesh, or the devices of one group.
        times: how many run in one call of the program.
        bytes: what each device sends in all of them.
        shape: the operand on one device.
        line: the user's source line; empty if the program does not tell.
        why: which operator needed it.
        array: what is moved: an argument, its gradient, or the operator that makes it.
        module: the named scopes of what caused it, ``decoder/layers_0/mlp``.
        arrays: how many arrays this row stands for.
        place: the line with the whole path of its file.
        exact: whether ``times`` is certain; False in a branch, and in a loop whose length depends on data.
        seconds: of the network, for all of them; 0 without a machine.
        exposed: of these, what a call waits for.
        parts: what it was made of.
    """

    kind: str
    axes: str
    times: int
    bytes: int
    shape: str
    line: str
    why: str
    array: str
    module: str
    arrays: int
    place: str
    exact: bool
    seconds: float = 0.0
    exposed: float = 0.0
    parts: tuple[Part, ...] = dataclasses.field(default=(), repr=False)

    @property
    def is_attributed(self) -> bool:
        """Whether a line or a module is known."""
        return bool(self.line or self.module)


def compiled_rows(
    program: CompiledProgram, parts: Sequence[Part], taken: Mapping[int, tuple[float, float]] | None = None
) -> tuple[CompiledRow, ...]:
    """The collectives of a program, most bytes first.

    Args:
        program: a compiled program.
        parts: what its collectives move, ``parts_of(program)``.
        taken: seconds of one run of each collective, and the exposed ones, as ``CompiledCost.by_collective``.
    """
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
    made = [_row(program, same, folded, taken or {}) for same in rows.values()]
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
        first.sent.collective.kind, axes_text(program, first.sent), sum(times.values()), sent, str(first.type),
        first.line, first.why, first.array.text if len(names) == 1 else first.array.alike, module,
        len(names) if first.is_named else len(modules), first.place,
        all(part.sent.collective.exact for part in same), seconds, exposed, tuple(same),
    )  # fmt: skip
