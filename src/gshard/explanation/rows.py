"""Rows: one row for each array and for each kind of collective of an explanation, and their text."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from gshard.core.errors import ArgumentError, known_names
from gshard.core.jax_adapter import scan_counts
from gshard.core.mesh import Atoms, Mesh
from gshard.core.number_text import format_ms, format_seconds, significant
from gshard.core.plan import Plan, local_bytes
from gshard.core.program import Block, Value, format_bytes
from gshard.core.spmd import Collective, SpmdProgram
from gshard.device.cost import Cost, origins, place_of
from gshard.naming.argument_names import without_numbers
from gshard.naming.array_names import ArrayNames

_NAMED = 24  # names of arguments in a message


@dataclasses.dataclass(frozen=True, slots=True)
class TensorRow:
    """One array of the program."""

    name: str  # ``params['up']`` of an argument, or ``%12`` with the primitive and line that made it
    sharding: str  # text form
    bytes: int  # of the whole array
    local_bytes: int  # of one device's part
    is_argument: bool  # whether the caller hands it in
    plan: Plan = dataclasses.field(repr=False)  # the plan
    value: Value = dataclasses.field(repr=False)  # the value in the plan
    note: str = ""  # what to know of a value that no mark can split: one device's part, or what becomes of parts
    short: str = ""  # the path of an argument: ``params/blocks/3/up``
    alike: str = ""  # the same with ``*`` for the number of a layer, where there are several

    @property
    def why(self) -> tuple[tuple[str, ...], ...]:
        """For each dimension that is split, the reasons from here back to a mark."""
        return tuple((nearest, *self.plan.chain(self.value, d)[1:]) for d, nearest in self._nearest().items())

    def _nearest(self) -> dict[int, str]:
        """The nearest reason for each dimension that is split."""
        split = [d for d in range(len(self.value.shape)) if (self.value, d) in self.plan.sources]
        return {d: f"dimension {d}: {self.plan.reasons[self.value, d]}" for d in split}

    @property
    def reason(self) -> str:
        """For each dimension the nearest reason and the mark where the chain ends, in one line."""
        texts = []
        for d, nearest in self._nearest().items():
            root = str(self.plan.roots[self.value, d])
            texts.append(nearest if root in nearest else f"{nearest} <- {root}")
        return "; ".join(texts) or self.note or "replicated: no mark splits it"


def row_called(rows: Sequence[TensorRow], name: str, names: ArrayNames, collectives: Sequence[Collective]) -> TensorRow:
    """The first row with a printed name."""

    def is_called(row: TensorRow) -> bool:
        if row.is_argument:
            return name in (row.name, row.short)
        return row.name == name or row.name.startswith(f"{name} ") or f" at {name} (" in row.name

    moved = {
        c.value for c in collectives if c.value and name in (names.array(c.value).text, names.array(c.value).alike)
    }
    if row := next(filter(is_called, rows), None) or next((row for row in rows if row.value in moved), None):
        return row
    arguments = [row.short for row in rows if row.is_argument][:_NAMED]
    raise ArgumentError(
        f"no tensor is called {name!r}.",
        hint=known_names(name, arguments, "Arguments are")
        + " The printed tables have the others: %2, train.py:9 for a line, or the array of a collective.",
    )


def rows_of_tensors(plan: Plan, names: ArrayNames, notes: Mapping[Value, str]) -> tuple[TensorRow, ...]:
    """All arrays of a plan, largest first."""
    program = plan.program
    called = dict(zip(program.block.inputs, program.names, strict=True))
    for e in program.block.walk():
        for v in e.outputs:
            called.setdefault(v, f"%{v.index} {e.name}{f' at {e.line}' if e.line else ''}")
        for block in e.blocks:
            for v in block.inputs:
                called.setdefault(v, f"%{v.index} in {e.name}")
    notes = {**notes, **notes_of_parts(program.block)}

    def row(v: Value) -> TensorRow:
        part, own = local_bytes(v, plan.shardings[v], plan.mesh), names.arguments.get(v)
        short, alike = ("", "") if own is None else (own.text, own.alike)
        sharding, note = plan.format(v), notes.get(v, "")
        return TensorRow(called[v], sharding, v.bytes, part, own is not None, plan, v, note, short, alike)

    return tuple(map(row, sorted(plan.shardings, key=lambda v: (-v.bytes, v.index))))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRow:
    """Collectives of one kind over the same axes for the same line."""

    kind: str  # all_gather, all_reduce, reduce_scatter, all_to_all or collective_permute; of XLA also a rarer one
    axes: str  # names of mesh axes, or of their parts; of XLA also the devices of one group
    times: int  # how many run in one call of the program
    bytes: int  # what each device sends in all of them
    shape: str  # the local operand of the largest
    line: str  # the user's source line; empty if the program does not tell
    why: str  # what needed it
    array: str  # what is moved: a weight by its path, ``gradient of`` one, or the operation that makes it
    module: str  # of what caused it, ``decoder/layers_0/mlp``; empty if nothing names it
    arrays: int = 1  # how many rows this one stands for: those of equal layers
    exact: bool = True  # whether ``times`` is certain; False in a branch, and in a loop whose length depends on data
    seconds: float = 0.0  # of the network, for all of them; 0 where they are not modelled
    exposed: float = 0.0  # of these, what a call waits for
    # how many rows have arrays in one of its messages, if XLA combined collectives; 1 if no other row has
    sharing: int = 1


def rows_of_collectives(collectives: Sequence[Collective], mesh: Mesh, names: ArrayNames) -> tuple[CollectiveRow, ...]:
    """The collectives in a row for each array and module, most bytes first."""
    rows = together(collectives, names, each=True)
    return tuple(sorted((_row(same, mesh, names) for same in rows), key=lambda r: -r.bytes))


def rows_of_equal_layers(collectives: Sequence[Collective], mesh: Mesh, names: ArrayNames) -> tuple[CollectiveRow, ...]:
    """The same with one row for what equal layers have alike."""
    rows = []
    for same in together(collectives, names):
        arrays = len({(names.moved(c).text, names.module(c.cause).text) for c in same})
        rows.append(dataclasses.replace(_row(same, mesh, names), arrays=arrays))
    return tuple(sorted(rows, key=lambda r: -r.bytes))


def together(collectives: Sequence[Collective], names: ArrayNames, *, each: bool = False) -> list[list[Collective]]:
    """Collectives that differ in nothing but the layer, together; with ``each``, only what does not differ at all."""
    rows: dict[Hashable, list[Collective]] = {}
    for c in collectives:
        array, module = names.moved(c), names.module(c.cause)
        in_layer = names.is_named(c.value) and array.alike != array.text  # else only its position tells it apart
        any_layer = re.sub(r"\d+", "*", module.text)
        alike = (any_layer, _without_position(c, c.why)) if in_layer else (module.alike, c.why)
        which = (array.text, module.text, c.why) if each else (array.alike, *alike)
        rows.setdefault((c.kind, c.atoms, c.line, c.shape, *which), []).append(c)
    return list(rows.values())


def called(same: Sequence[Collective], names: ArrayNames) -> tuple[str, str, str]:
    """What collectives that stand together move, in which module, and why: with ``*`` where they differ."""
    arrays, modules = [names.moved(c) for c in same], [names.module(c.cause) for c in same]
    array = arrays[0].text if len({x.text for x in arrays}) == 1 else arrays[0].alike
    words = zip(*(x.text.split("/") for x in modules), strict=True)
    module = "/".join(map(without_numbers, words))
    why = same[0].why if len({c.why for c in same}) == 1 else _without_position(same[0], same[0].why)
    return (
        array,
        module,
        f"{why}, which loops over the split dimension: split another" if all(map(_is_looped, same)) else why,
    )


def _is_looped(c: Collective) -> bool:
    """Whether it moves what a scan reads a slice of in each iteration, because the dimension of the slices is split."""
    position = re.match(r"operand (\d+) of scan$", c.why)
    if position is None or c.cause is None or c.before is None:
        return False
    is_sliced = int(position[1]) >= sum(scan_counts(c.cause.params))
    return is_sliced and not set(c.atoms).isdisjoint(c.before.dims[0])


def _without_position(c: Collective, why: str) -> str:
    """``operand 38 of scan`` as ``operand of scan``: equal layers have different ones."""
    return re.sub(r"^(operand|result) \d+ of", r"\1 of", why) if c.cause is not None and c.cause.blocks else why


def _row(same: Sequence[Collective], mesh: Mesh, names: ArrayNames) -> CollectiveRow:
    c = same[0]
    array, module, why = called(same, names)
    times, sent = sum(c.times for c in same), sum(c.total_bytes for c in same)
    return CollectiveRow(
        kind=c.kind, axes=mesh.format_atoms(c.atoms), times=times, bytes=sent, shape=c.shape, line=c.line, why=why,
        array=array, module=module,
    )  # fmt: skip


def text_of_rings(plan: Plan, without: float, taken: float, machine: str) -> str:
    """What collective matmuls were chosen for: seconds of a call without them and with them, on a machine."""
    what = f"{len(plan.rings)} product{'s' if len(plan.rings) > 1 else ''}"
    return (
        f"{what} computed as collective matmul, part by part while other parts are sent: a call on {machine} takes "
        f"{significant(taken * 1e3, 4)} instead of {format_ms(without)}; collective_matmul=False prevents that"
    )


def notes_of_parts(block: Block) -> dict[Value, str]:
    """What to know of values that an equation without a choice reads or makes."""
    notes = {}
    for e in block.walk():
        if e.rule is not None and e.rule.fixed is not None:
            note = f"{e.name}{f' at {e.line}' if e.line else ''} says how it is sharded there"
            notes.update({v: note for v in (*e.inputs, *e.outputs) if isinstance(v, Value)})
    return notes


# Row text: prints the rows of an explanation, with one line for equal layers.


class ArrayLine(NamedTuple):
    """The parts of the line of an array."""

    key: str  # arrays with the same key, sharding and note have one line
    alike: str  # the name of several of them
    name: str  # the name of one of them
    sharding: str  # as text
    bytes: int  # of one device's part
    note: str  # the end of the line


def array_lines(title: str, arrays: Sequence[ArrayLine], most: int) -> list[str]:
    """At most so many lines, with a title; those of equal arrays as one."""
    together: dict[tuple[str, str, str], list[ArrayLine]] = {}
    for array in arrays:
        together.setdefault((array.key, array.sharding, array.note), []).append(array)
    shown = [(same[0], len(same)) for same in together.values()][:most]
    names = [f"{first.alike}  x{n}" if n > 1 else first.name for first, n in shown]
    wide, across = (max(map(len, texts), default=0) for texts in (names, [first.sharding for first, _ in shown]))
    lines = [
        f"  {name:<{wide}}  {first.sharding:<{across}}  {format_bytes(first.bytes):>10}  {first.note}"
        for name, (first, _) in zip(names, shown, strict=True)
    ]
    title = f"{title} (the largest {sum(n for _, n in shown)} of {len(arrays)}; bytes of one device's part)"
    return ["", title, *lines] if shown else []


def tensor_lines(title: str, rows: Sequence[TensorRow], most: int) -> list[str]:
    """At most so many lines; what equal layers have alike, in the same sharding for the same reason, in one.

    Of values inside the line has the number of the first, with which ``why`` finds it.
    """
    arrays = [
        ArrayLine(
            row.alike or re.sub(r"^%\d+ ", "", row.name), row.alike or row.short or row.name, row.short or row.name,
            row.sharding, row.local_bytes, row.reason,
        )
        for row in rows
    ]  # fmt: skip
    return array_lines(title, arrays, most)


def collective_lines(
    rows: Sequence[CollectiveRow], most: int, columns: tuple[int, int] = (12, 24), no_line: str = ""
) -> list[str]:
    """At most so many lines: bytes, axes, array, module, source line, reason, and where it is modelled the time."""
    shown, is_timed = rows[:most], any(row.seconds for row in rows)
    names = [f"{row.array}  x{row.arrays}" if row.arrays > 1 else row.array for row in shown]
    wide, modules = (max(map(len, texts), default=0) for texts in (names, [row.module for row in shown]))
    across, shape = columns
    lines = []
    for row, name in zip(shown, names, strict=True):
        times = f"x{'' if row.exact else '~'}{row.times}{f'/{row.sharing}' if row.sharing > 1 else ''}"
        sent = f"{row.kind:<18} {times:<5} {format_bytes(row.bytes):>10}"
        where = f"over {row.axes:<{across}} {row.shape:<{shape}}"
        taken = f"{format_seconds(row.seconds):>8}{_exposed(row):<13}  " if is_timed else ""
        module = f"{row.module:<{modules}}  " if modules else ""
        lines.append(f"  {sent}  {where} {taken}{name:<{wide}}  {module}{row.line or no_line}  ({row.why})")
    if rest := rows[most:]:
        lines.append(f"  ... and {len(rest)} more rows with {format_bytes(sum(row.bytes for row in rest))}")
    return lines


def _exposed(row: CollectiveRow) -> str:
    if not row.seconds:
        return ""
    hidden = 1 - row.exposed / row.seconds
    return f" {100 * hidden:.0f} % hidden" if hidden > 0.005 else " exposed"


def lines_of_parts(rows: Sequence[CollectiveRow], mesh: Mesh) -> list[str]:
    """What the parts of axes are that collectives are over, such as ``data.0``; one line for each axis."""
    over = {name for row in rows for name in row.axes.split(",")}
    return [
        f"  {', '.join(atoms)}: parts of axis {name}, {' x '.join(str(mesh.atom_sizes[a]) for a in atoms)} devices"
        for name, atoms in mesh.atoms_of.items()
        if len(atoms) > 1 and not over.isdisjoint(atoms)
    ]


# Merged collectives: those that differ in nothing but the array (or the layer) are one row, with its modelled time.


@dataclasses.dataclass(frozen=True, slots=True)
class MergedCollective:
    """Collectives that differ in nothing but the array, as one."""

    collective: Collective  # one of them, with the times of all
    # of all runs, as modelled. Of equal ones in one place the compiler keeps one, and so does the model.
    seconds: float
    kernels: tuple[int, ...]  # their numbers among the costed kernels
    # of permutations, which position of a group sends to which, in one of them or another
    pairs: tuple[tuple[int, int], ...] = ()
    over: Atoms = ()  # the atoms that these groups are over
    every: tuple[Collective, ...] = dataclasses.field(default=(), repr=False)  # all of them


def merged(spmd: SpmdProgram, found: Cost, names: ArrayNames | None = None) -> tuple[MergedCollective, ...]:
    """The collectives of a program, those that send most first."""
    kernels: dict[int, list[int]] = {}
    for i, c in enumerate(origins(spmd, found)):
        if c is not None:
            kernels.setdefault(id(c), []).append(i)
    rows = rows_of(spmd.collectives, names)
    return tuple(_merge(same, [i for c in same for i in kernels.get(id(c), ())], found) for same in rows)


def rows_of(collectives: Sequence[Collective], names: ArrayNames | None = None) -> list[list[Collective]]:
    """The collectives that differ in nothing but the array, together; those that send most in all first."""
    rows: dict[Hashable, list[Collective]] = {}
    for i, alike in enumerate([collectives] if names is None else together(collectives, names)):
        for c in alike:
            places = (place_of(c.cause), place_of(c.emitted))
            why = c.why if names is None else ""
            rows.setdefault((i, c.kind, c.atoms, c.bytes, c.shape, c.line, why, places), []).append(c)
    return sorted(rows.values(), key=lambda same: -sum(c.total_bytes for c in same))


def _merge(same: list[Collective], kernels: list[int], found: Cost) -> MergedCollective:
    times = sum(c.times for c in same)
    costed = [found.kernels[i] for i in kernels]
    seconds = sum(k.total_seconds for k in costed)
    one = dataclasses.replace(same[0], times=times)
    over = costed[0].axes if costed else one.atoms
    pairs = {(int(a), int(b)) for k in costed if k.axes == over for a, b in k.equation.params.get("perm", ())}
    return MergedCollective(one, seconds, tuple(kernels), tuple(sorted(pairs)), over, tuple(same))
