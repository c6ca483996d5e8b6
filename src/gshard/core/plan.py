"""Defines the plan of a program: the sharding of each value, the split of each equation, and what restricts them.

A collective matmul is part of a plan (``Ring``); axes that are manual in a ``shard_map`` cannot split values inside.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Container, Iterable, Mapping, Sequence

from gshard.core.errors import ShardingError
from gshard.core.mark import Order
from gshard.core.mesh import Atoms, Mesh
from gshard.core.planning_tables import tabulated
from gshard.core.program import Block, Constant, Equation, Program, Value, format_block, itemsize, type_text
from gshard.core.rule import REPLICATE, Rule, Split, operand_sharding, passing, place, result_sharding
from gshard.core.sharding import Sharding

# Defines the plan of a collective matmul: a contraction whose parts rotate around a ring of devices.


@dataclasses.dataclass(frozen=True, slots=True)
class Ring:
    """A factor of a contraction that is computed part by part, while an operand or the sums rotate."""

    factor: int  # the factor. In each step, a device uses the current part of the arrays that do not rotate.
    operand: int | None  # the number of the operand that rotates; None if the sums rotate
    atoms: Atoms  # the atoms of the ring, over which the dimension of the factor of what rotates is also split
    both_ways: bool = False  # whether half of every part rotates in each direction
    # whether an iteration of the loop performs two steps. A part arrives while the device uses the previous one, so it
    # needs a second buffer. After two steps the parts are in the first buffer again, and no copy is needed. This takes
    # the memory of another part and of its product.
    two_steps: bool = False
    # the order of the parts around the ring; () for the order of their numbers. A ring of the network may differ from
    # the order of the devices.
    order: tuple[int, ...] = ()

    def steps(self, mesh: Mesh) -> int:
        """The number of parts of the factor."""
        return mesh.count(self.atoms)


def entering(rule: Rule, split: Split, ring: Ring | None, i: int) -> Sharding:
    """The sharding with which operand ``i`` enters an equation, with or without a ring."""
    sharding = operand_sharding(rule, i, split)
    return sharding if ring is None or ring.operand != i else _split_further(sharding, rule.operands[i], ring)


def leaving(rule: Rule, split: Split, ring: Ring | None, i: int) -> Sharding:
    """The sharding with which result ``i`` leaves an equation, with or without a ring."""
    sharding = result_sharding(rule, i, split)
    if ring is None or ring.operand is not None:
        return sharding
    finished = sharding.with_unreduced({a: m for a, m in sharding.unreduced if a not in ring.atoms})
    return _split_further(finished, rule.results[i], ring)


def _split_further(sharding: Sharding, dims: Sequence[tuple[int, ...]], ring: Ring) -> Sharding:
    split_dims = tuple(
        atoms_of_dim + (ring.atoms if factors_of_dim == (ring.factor,) else ())
        for factors_of_dim, atoms_of_dim in zip(dims, sharding.dims, strict=True)
    )
    return Sharding(split_dims, sharding.unreduced)


# Determines the atoms that cannot split a value inside a partly manual ``shard_map``.

_Atoms = frozenset[str]
_NONE: _Atoms = frozenset()


@dataclasses.dataclass(frozen=True, eq=False)
class ManualAxes:
    """The manual atoms of the values and equations of a program."""

    mesh: Mesh  # the mesh of the program
    inside: Mapping[Value, _Atoms]  # for each value of a partly manual region, the atoms that cannot split it

    def of(self, value: Value | Constant) -> _Atoms:
        """The atoms that cannot split a value."""
        return self.inside.get(value, _NONE) if isinstance(value, Value) and self.inside else _NONE

    def at(self, e: Equation) -> _Atoms:
        """The atoms that cannot split factors of an equation, except the pinned factors."""
        manual = None if e.rule is None else e.rule.manual
        if not self.inside and manual is None:
            return _NONE
        of_values = _NONE.union(*map(self.of, (*e.inputs, *e.outputs)))
        return of_values if manual is None else of_values | manual.atoms(self.mesh)

    def of_any(self, values: Iterable[Value | Constant]) -> _Atoms:
        """The atoms that cannot split at least one of some values."""
        return _NONE.union(*map(self.of, values)) if self.inside else _NONE

    def pinned(self, e: Equation) -> Split:
        """The split of the factors that the boundary of a region fixes, if the equation is at a boundary."""
        return {} if e.rule is None or e.rule.manual is None else e.rule.manual.pinned(self.mesh)

    def mesh_without(self, atoms: _Atoms) -> Mesh:
        """The mesh of the devices with one position along these atoms."""
        return self.mesh.without(atoms) if atoms else self.mesh


def before_any(cut: Atoms, atoms: _Atoms) -> Atoms:
    """The atoms of ``cut`` before the first one that is in ``atoms``.

    >>> before_any(("x", "y", "z"), frozenset({"y"}))
    ('x',)
    """
    return cut[: next((i for i, a in enumerate(cut) if a in atoms), len(cut))] if atoms else cut


def axes_without(axes: tuple[Atoms, ...], atoms: _Atoms) -> tuple[Atoms, ...]:
    """The axes without some atoms; axes that have no other atoms are omitted.

    >>> axes_without((("x.0", "x.1"), ("y",)), frozenset({"x.0", "y"}))
    (('x.1',),)
    """
    if not atoms:
        return axes
    return tuple(rest for axis in axes if (rest := tuple(a for a in axis if a not in atoms)))


@tabulated(64)
def manual_axes(block: Block, mesh: Mesh) -> ManualAxes:
    """Determines the manual atoms by following values from the entries of partly manual regions to the exits."""
    inside: dict[Value, _Atoms] = {}
    if any(e.rule is not None and e.rule.manual is not None for e in block.walk()):
        _follow(block, inside, mesh)
    return ManualAxes(mesh, inside)


def _follow(block: Block, inside: dict[Value, _Atoms], mesh: Mesh) -> None:
    for e in block.equations:
        manual = _NONE.union(*(inside.get(x, _NONE) for x in e.inputs if isinstance(x, Value)))
        if e.blocks:
            manual = _region(e, manual, inside, mesh)
        elif e.rule is not None and e.rule.manual is not None:
            atoms_of_boundary = _atoms_of_boundary(e, mesh)
            if e.rule.manual.step == "leave":
                manual = manual - atoms_of_boundary
            else:
                manual = manual | atoms_of_boundary
        for v in e.outputs:
            if manual:
                inside[v] = manual


def _atoms_of_boundary(e: Equation, mesh: Mesh) -> _Atoms:
    assert e.operator_rule.manual is not None
    try:
        return e.operator_rule.manual.atoms(mesh)
    except ShardingError as reason:  # the shard_map has another mesh
        raise ShardingError(reason.what, e.line or None, reason.got, reason.hint) from None


def _region(e: Equation, manual: _Atoms, inside: dict[Value, _Atoms], mesh: Mesh) -> _Atoms:
    """The manual atoms of a loop or branch: the union over all its operands and results, to a fixed point."""
    while True:
        for block in e.blocks:
            if manual:
                inside.update(dict.fromkeys(block.inputs, manual))
            _follow(block, inside, mesh)
        results = (inside.get(x, _NONE) for block in e.blocks for x in block.outputs if isinstance(x, Value))
        with_results = manual.union(*results)
        if with_results == manual:
            return manual
        manual = with_results


SplitDim = tuple[Value, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Reason:
    """The reason why a dimension of a value has its atoms."""

    # ``mark``, ``argument`` (the sharding of the argument as passed), ``propagated``, ``cost`` (the cheapest choice) or
    # ``searched`` (a part of a plan that ``search`` found)
    kind: str
    line: str  # the user's source line of the mark or equation
    equation: str  # the name of the primitive, or the mark as text
    source: Value | None = None  # the value from which the atoms were propagated; None for marks and arguments

    def __str__(self) -> str:
        location = f" at {self.line}" if self.line else ""
        if self.kind == "mark":
            return f"marked {self.equation}{location}"
        if self.kind == "argument":
            return f"sharding of the argument as passed: {self.equation}"
        if self.kind == "searched":
            return f"chosen by search for {self.equation or 'an argument'}{location}"
        verb = "cheapest for" if self.kind == "cost" else "through"
        return f"{verb} {self.equation}{location}"


def local_bytes(v: Value | Constant, sharding: Sharding, mesh: Mesh) -> int:
    """Bytes of one device's part of a value with this sharding; of a constant, of all of it."""
    return math.prod(sharding.local_shape(mesh, v.shape)) * itemsize(v.dtype) if isinstance(v, Value) else v.bytes


# The attributes of a plan that determine the per-device program.
_PROGRAM_FIELDS = ("mesh", "shardings", "splits", "orders", "rings", "shared_reshards", "leaves", "entry", "leave")


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """The plan of a program on a mesh.

    Attributes:
        program: the planned program.
        mesh: the mesh.
        shardings: the sharding of each value, including values in bodies.
        splits: the split of each equation that has a rule: the atoms of its factors.
        reasons: the reason for each split dimension of each value.
        orders: the device orders of marked values whose order is not the order of the mesh.
        rings: the collective matmuls: for each contraction that runs part by part, the arrays that rotate.
        shared_reshards: for each value that several equations read with one other sharding, this sharding. The
            value is resharded once.
        leaves: for each result that is resharded at the end of the program, the sharding with which it leaves.
        entry: the sharding of each input at the entry of the program.
        leave: the sharding of each result at the exit of the program.
        spared: seconds of a call without and with the collective matmuls, and the name of the machine; None if they
            were not chosen by time.
        gap: the fraction of the plan's cost that the best of the compared plans (``planning.strategies``) could save at
            most. None if there was no choice, or if the fraction is unknown.
        counted: the unit of the cost: ``bytes sent``, or ``time on h100:1x8``; empty if ``gap`` is None.
        is_limited: whether there are plans over whole axes that were not compared: ``gap`` says nothing of them.
    """

    program: Program
    mesh: Mesh
    shardings: Mapping[Value, Sharding]
    splits: Mapping[Equation, Split]
    reasons: Mapping[tuple[Value, int], Reason]
    orders: Mapping[Value, Order] = dataclasses.field(default_factory=dict)
    rings: Mapping[Equation, Ring] = dataclasses.field(default_factory=dict)
    shared_reshards: Mapping[Value, Sharding] = dataclasses.field(default_factory=dict)
    leaves: Mapping[Value, Sharding] = dataclasses.field(default_factory=dict)
    entry: tuple[Sharding, ...] = ()
    leave: tuple[Sharding, ...] = ()
    spared: tuple[float, float, str] | None = None
    gap: float | None = None
    counted: str = ""
    is_limited: bool = False

    def runs_as(self, other: Plan) -> bool:
        """Whether another plan of the same program results in the same per-device program."""
        return all(getattr(self, field) == getattr(other, field) for field in _PROGRAM_FIELDS)

    def sharding(self, value: Value | Constant) -> Sharding:
        """The sharding of a value; constants are replicated."""
        return self.shardings[value] if isinstance(value, Value) else Sharding.replicated(len(value.shape))

    def format(self, value: Value) -> str:
        """The text of a value with its sharding."""
        return self.shardings[value].format(self.mesh, value.shape, value.type_name)

    @property
    def gathered(self) -> tuple[Equation, ...]:
        """Equations without a rule, for which gshard gathers operands and every device repeats the work.

        An equation whose batch dimensions are known is included only if other dimensions of an operand are split.
        """
        manual = manual_axes(self.program.block, self.mesh)
        gathering = (e for e in self.program.block.walk(self.mesh.devices) if self._gathers(e))
        return tuple(e for e in gathering if manual.mesh_without(manual.at(e)).size > 1)

    def _gathers(self, e: Equation) -> bool:
        if e.rule is None or e.rule.known:
            return False
        if all(factor.kind == REPLICATE for factor in e.rule.factors):
            return True
        split = self.splits.get(e, {})
        for v, dims in zip(e.inputs, e.rule.operands, strict=True):
            kept = {a for atoms in place(dims, split) for a in atoms}
            if not {a for atoms in self.sharding(v).dims for a in atoms} <= kept:
                return True
        return False

    @functools.cached_property
    def sources(self) -> dict[SplitDim, SplitDim | None]:
        """For each split dimension the dimension from which its atoms came; None for marks and arguments."""
        sources: dict[SplitDim, SplitDim | None] = {}
        for (v, d), reason in self.reasons.items():
            atoms, source = set(self.shardings[v].dims[d]), reason.source
            dims = () if source is None else enumerate(self.shardings[source].dims)
            shared = [i for i, own in dims if atoms & set(own) and (source, i) in self.reasons]
            if atoms:
                sources[v, d] = None if source is None or not shared else (source, d if d in shared else shared[0])
        return sources

    @functools.cached_property
    def roots(self) -> dict[SplitDim, Reason]:
        """For each split dimension the mark or argument at the end of its reasons."""
        roots: dict[SplitDim, Reason] = {}
        for at in self.sources:
            if path := self._path(at, roots):
                before, own = self.sources[path[-1]], self.reasons[path[-1]]
                roots.update(dict.fromkeys(path, own if before is None else roots.get(before, own)))
        return roots

    def _path(self, at: SplitDim | None, known: Container[SplitDim] = ()) -> list[SplitDim]:
        """The split dimensions from one back to a mark, or to a known one, which is left out."""
        path: dict[SplitDim, None] = {}
        while at is not None and at not in path and at not in known:
            path[at] = None
            at = self.sources[at]
        return list(path)

    def chain(self, value: Value, dim: int) -> list[str]:
        """The reasons for the atoms of a split dimension as texts, from the value back to a mark."""
        return [f"{self.format(v)}: {self.reasons[v, d]}" for v, d in self._path((value, dim))]

    def __str__(self) -> str:
        block = format_block(self.program.block, "  ", lambda v: f"%{v.index}:{self.format(v)}", self._note)
        lines = [f"plan for {self.program.name} on {self.mesh}", block]
        lines += [f"gathered, without a rule: {text}" for text in self.gathered_text()]
        return "\n".join(lines)

    def _ring(self, factor: str, ring: Ring) -> str:
        """A ring as text: ``b in 4 parts, operand 1 around model``."""
        what = "sums" if ring.operand is None else f"operand {ring.operand}"
        details = [f"{what} around {self.mesh.format_atoms(ring.atoms)}"]
        if ring.both_ways:
            details.append("both ways")
        if ring.order:
            details.append(f"in the order {' '.join(map(str, ring.order))}")
        return f"{factor} in {ring.steps(self.mesh)} parts, {', '.join(details)}"

    def gathered_text(self) -> list[str]:
        """Texts of the gathered equations: primitive, user's line, operands and their bytes on every device."""
        lines = []
        for e in self.gathered:
            split = self.splits.get(e, {})
            operands = [
                (v, operand_sharding(e.operator_rule, i, split)) for i, v in enumerate(e.inputs) if isinstance(v, Value)
            ]
            text = ", ".join(type_text(v) for v, _ in operands)
            size = sum(local_bytes(v, s, self.mesh) for v, s in operands)
            why = f"; {e.rule.why}" if e.rule is not None and e.rule.why else ""
            lines.append(f"{e.name} at {e.line}: {text} ({size} B on every device){why}")
        return lines

    def _note(self, e: Equation) -> str:
        """The rule and the split of an equation, as a comment; empty for an equation without a split."""
        split = self.splits.get(e)
        note = ""
        if split and e.rule is not None:
            split_factors = [(f, atoms) for f, atoms in sorted(split.items()) if atoms and f >= 0]
            entries = [f"{e.rule.names[f]}@{self.mesh.format_atoms(atoms)}" for f, atoms in split_factors]
            for monoid, _, atoms in passing(e.rule, split):
                entries.append(f"{monoid} over {self.mesh.format_atoms(atoms)} unreduced")
            ring = self.rings.get(e)
            if ring is not None:
                entries.append(self._ring(e.rule.names[ring.factor], ring))
            note = f"   # {e.rule}; split {' '.join(entries)}" if entries else ""
        if e.rule is not None and not e.rule.known:
            return "   # no rule: gathered" if self._gathers(e) else note and f"{note}; proven by its vmap rule"
        return note


# Defines constraints on the arguments and results of a program other than marks.


@dataclasses.dataclass(frozen=True)
class Boundary:
    """Constraints on the arguments and results of a program other than marks."""

    # the numbers of the inputs (including captured arrays) whose memory results may reuse
    donated: tuple[int, ...] = ()


# No constraints other than marks.
AS_MARKED = Boundary()
