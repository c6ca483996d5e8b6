"""Plan: the sharding of every value, the split of every equation, and the reasons.

A plan is plain data. ``propagate`` (or a search) writes it, ``partition`` obeys it, ``explain`` reads it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from gshard.core.device_order import Order
from gshard.core.manual_axes import manual_axes
from gshard.core.mesh import Mesh
from gshard.core.program import Block, Constant, Equation, Program, Value, itemsize
from gshard.core.ring import Ring
from gshard.core.rule import REPLICATE
from gshard.core.sharding import Sharding
from gshard.core.split import Split, operand_sharding, passing, place


@dataclasses.dataclass(frozen=True, slots=True)
class Reason:
    """Why a dimension of a value got its atoms.

    Attributes:
        kind: ``mark``, ``argument`` (the sharding it came with), ``propagated``, ``cost`` (the cheapest of several) or
            ``searched`` (a part of the plan that ``search`` found).
        line: the user's source line of the mark or equation.
        equation: name of the primitive, or the mark.
        source: the value that the atoms came from, None for marks and arguments.
    """

    kind: str
    line: str
    equation: str
    source: Value | None = None

    def __str__(self) -> str:
        at = f" at {self.line}" if self.line else ""
        if self.kind == "mark":
            return f"marked {self.equation}{at}"
        if self.kind == "argument":
            return f"sharding of the argument as passed: {self.equation}"
        if self.kind == "searched":
            return f"chosen by search for {self.equation or 'an argument'}{at}"
        how = "cheapest for" if self.kind == "cost" else "through"
        return f"{how} {self.equation}{at}"


def local_bytes(v: Value, sharding: Sharding, mesh: Mesh) -> int:
    """Bytes of one device's part of a value that is sharded so."""
    return math.prod(sharding.local_shape(mesh, v.shape)) * itemsize(v.dtype)


# What of a plan decides about the per-device program.
_DECIDES = ("mesh", "shardings", "splits", "orders", "rings", "shared_reshards", "leaves", "entry", "leave")


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """Which value is sharded how, and why.

    Attributes:
        program: the program that is planned.
        mesh: the mesh it is planned for.
        shardings: the sharding of every value, bodies included.
        splits: the atoms of the factors of every equation that has a rule.
        reasons: for each value and dimension that is split, why.
        orders: the order of the devices in which a marked value is to be, where that is not the mesh's.
        rings: the collective matmuls: contractions taken part by part, and what of them rotates.
        shared_reshards: the values that several equations read otherwise than they are sharded: moved there once.
        leaves: the results that leave the program otherwise than they are sharded.
        entry: how each input of the program comes.
        leave: how each result leaves.
        spared: what the collective matmuls were chosen for: seconds of a call without them and with them, and on which
            machine; None where it was for something else.
        gap: how much of what the plan costs, as planning counts, a plan that keeps the marks could at most spare, as a
            part of it, of the plans that were compared (``planning.nearby``); None where nothing was to be chosen, or
            that is not known.
        counted: what planning counts: ``bytes sent``, or ``time on h100:1x8``; empty where ``gap`` is None.
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

    def runs_as(self, other: Plan) -> bool:
        """Whether another plan of the same program becomes the same per-device program."""
        return all(getattr(self, field) == getattr(other, field) for field in _DECIDES)

    def sharding(self, value: Value | Constant) -> Sharding:
        """The sharding of a value; constants are replicated."""
        return self.shardings[value] if isinstance(value, Value) else Sharding.replicated(len(value.shape))

    def format(self, value: Value) -> str:
        """A value with its sharding, as text."""
        return self.shardings[value].format(self.mesh, value.shape, value.type_name)

    @property
    def gathered(self) -> tuple[Equation, ...]:
        """Equations whose primitive has no rule, so that operands are gathered and all devices compute the same.

        Those that nothing is known of; where batch dimensions were found, those that have others which are split.
        """
        manual = manual_axes(self.program.block, self.mesh)
        every = (e for e in self.program.block.walk() if self._gathers(e))
        return tuple(e for e in every if manual.mesh_without(manual.at(e)).size > 1)

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

    def reasons_back(self, value: Value, dim: int) -> list[tuple[Value, Reason]]:
        """The reasons for one dimension's atoms, each with the value that it is of, from the value back to a mark."""
        found: list[tuple[Value, Reason]] = []
        seen = set()
        at: Value | None = value
        wanted = set(self.shardings[value].dims[dim])
        while at is not None and at not in seen:
            seen.add(at)
            here = enumerate(self.shardings[at].dims)
            dims = [d for d, atoms in here if wanted & set(atoms) and (at, d) in self.reasons]
            if not dims:
                break
            dim = dim if dim in dims else dims[0]
            reason, wanted = self.reasons[at, dim], set(self.shardings[at].dims[dim])
            found.append((at, reason))
            at = reason.source
        return found

    def chain(self, value: Value, dim: int) -> list[str]:
        """The reasons for one dimension's atoms, as text, from the value back to a mark."""
        return [f"{self.format(v)}: {reason}" for v, reason in self.reasons_back(value, dim)]

    def __str__(self) -> str:
        lines = [f"plan for {self.program.name} on {self.mesh}"]
        lines += self._block(self.program.block, "  ")
        lines += [f"gathered, without a rule: {text}" for text in self.gathered_text()]
        return "\n".join(lines)

    def _ring(self, factor: str, ring: Ring) -> str:
        """A ring as text: ``b in 4 parts, operand 1 around model``."""
        what = [f"operand {i} around {self.mesh.format_atoms(atoms)}" for i, atoms in ring.operands]
        what += [f"sums around {self.mesh.format_atoms(ring.result)}"] if ring.result else []
        what += ["both ways"] if ring.both_ways else []
        what += [f"in the order {' '.join(map(str, ring.order))}"] if ring.order else []
        return f"{factor} in {ring.steps(self.mesh)} parts, {', '.join(what)}"

    def gathered_text(self) -> list[str]:
        """The equations without a rule: primitive, the user's line, operands and their bytes on every device."""
        found = []
        for e in self.gathered:
            operands = [v for v in e.inputs if isinstance(v, Value)]
            text = ", ".join(f"{v.dtype_name}[{','.join(map(str, v.shape))}]" for v in operands)
            why = f"; {e.rule.why}" if e.rule is not None and e.rule.why else ""
            found.append(f"{e.name} at {e.line}: {text} ({self._gathered_bytes(e)} B on every device){why}")
        return found

    def _gathered_bytes(self, e: Equation) -> int:
        """Bytes of the operands as every device gets them: whole but for batch dimensions."""
        assert e.rule is not None
        shardings = [operand_sharding(e.rule, i, self.splits.get(e, {})) for i in range(len(e.inputs))]
        pairs = [(v, s) for v, s in zip(e.inputs, shardings, strict=True) if isinstance(v, Value)]
        return sum(local_bytes(v, s, self.mesh) for v, s in pairs)

    def _block(self, block: Block, indent: str) -> list[str]:
        lines = [f"{indent}({', '.join(f'%{v.index}:{self.format(v)}' for v in block.inputs)}) ->"]
        for e in block.equations:
            results = ", ".join(f"%{v.index}:{self.format(v)}" for v in e.outputs)
            operands = ", ".join(f"%{v.index}" if isinstance(v, Value) else repr(v) for v in e.inputs)
            split = self.splits.get(e)
            note = ""
            if split and e.rule is not None:
                given = [(f, atoms) for f, atoms in sorted(split.items()) if atoms and f >= 0]
                names = [f"{e.rule.names[f]}@{self.mesh.format_atoms(atoms)}" for f, atoms in given]
                names += [
                    f"{monoid} over {self.mesh.format_atoms(a)} unreduced" for monoid, _, a in passing(e.rule, split)
                ]
                if (ring := self.rings.get(e)) is not None:
                    names.append(self._ring(e.rule.names[ring.factor], ring))
                note = f"   # {e.rule}; split {' '.join(names)}" if names else ""
            if e.rule is not None and not e.rule.known:
                note = "   # no rule: gathered" if self._gathers(e) else note and f"{note}; proven by its vmap rule"
            what = f"{e.name}[{e.mark}]" if e.mark else e.name
            lines.append(f"{indent}{results} = {what} {operands}{note}")
            for body in e.blocks:
                lines += self._block(body, indent + "    ")
        results = ", ".join(f"%{v.index}" if isinstance(v, Value) else repr(v) for v in block.outputs)
        return [*lines, f"{indent}return {results}"]
