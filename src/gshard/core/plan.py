"""Plan: the sharding of every value, the split of every equation, and why.

A plan is plain data. ``propagate`` (or a search) writes it, ``partition`` obeys it, ``explain`` reads it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from gshard.core.mesh import Mesh
from gshard.core.program import Block, Constant, Equation, Program, Value
from gshard.core.sharding import Sharding
from gshard.core.split import Split, passing


@dataclasses.dataclass(frozen=True, slots=True)
class Reason:
    """Why a dimension of a value got its atoms.

    Attributes:
        kind: ``mark``, ``argument`` (the sharding it came with), ``propagated`` or ``cost`` (the cheapest of several).
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
            return f"argument came so: {self.equation}"
        how = "cheapest for" if self.kind == "cost" else "through"
        return f"{how} {self.equation}{at}"


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """Who lies how, and why.

    Attributes:
        program: the program that is planned.
        mesh: the mesh it is planned for.
        shardings: the sharding of every value, bodies included.
        splits: the atoms of the factors of every equation that has a rule.
        reasons: for each value and dimension that is split, why.
    """

    program: Program
    mesh: Mesh
    shardings: Mapping[Value, Sharding]
    splits: Mapping[Equation, Split]
    reasons: Mapping[tuple[Value, int], Reason]

    def sharding(self, value: Value | Constant) -> Sharding:
        """The sharding of a value; constants are replicated."""
        return self.shardings[value] if isinstance(value, Value) else Sharding.replicated(len(value.shape))

    def format(self, value: Value) -> str:
        """A value with its sharding, as text."""
        return self.shardings[value].format(self.mesh, value.shape, value.dtype_name)

    @property
    def gathered(self) -> tuple[Equation, ...]:
        """Equations whose primitive has no rule: their operands are gathered and all devices compute the same."""
        return tuple(
            e for e in self.program.block.walk() if e.rule is not None and not e.rule.known and self.mesh.size > 1
        )

    def chain(self, value: Value, dim: int) -> list[str]:
        """The reasons for one dimension's atoms, from the value back to a mark."""
        lines, seen = [], set()
        at: Value | None = value
        while at is not None and at not in seen:
            seen.add(at)
            wanted = set(self.shardings[value].dims[dim])
            here = enumerate(self.shardings[at].dims)
            dims = [d for d, atoms in here if wanted & set(atoms) and (at, d) in self.reasons]
            reason = self.reasons[at, dim if dim in dims else dims[0]] if dims else None
            if reason is None:
                break
            lines.append(f"{self.format(at)}: {reason}")
            at = reason.source
        return lines

    def __str__(self) -> str:
        lines = [f"plan for {self.program.name} on {self.mesh}"]
        lines += self._block(self.program.block, "  ")
        lines += [f"gathered, for want of a rule: {text}" for text in self.gathered_text()]
        return "\n".join(lines)

    def gathered_text(self) -> list[str]:
        """The equations without a rule: primitive, the user's line, operands and their bytes on every device."""
        found = []
        for e in self.gathered:
            operands = [v for v in e.inputs if isinstance(v, Value)]
            text = ", ".join(f"{v.dtype_name}[{','.join(map(str, v.shape))}]" for v in operands)
            found.append(f"{e.name} at {e.line}: {text} ({sum(v.bytes for v in operands)} B on every device)")
        return found

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
                names += [f"{monoid} over {self.mesh.format_atoms(a)} waits" for monoid, _, a in passing(e.rule, split)]
                note = f"   # {e.rule}; split {' '.join(names)}" if names else ""
            if e.rule is not None and not e.rule.known:
                note = "   # no rule: gathered"
            what = f"{e.name}[{e.mark}]" if e.mark else e.name
            lines.append(f"{indent}{results} = {what} {operands}{note}")
            for body in e.blocks:
                lines += self._block(body, indent + "    ")
        results = ", ".join(f"%{v.index}" if isinstance(v, Value) else repr(v) for v in block.outputs)
        return [*lines, f"{indent}return {results}"]
