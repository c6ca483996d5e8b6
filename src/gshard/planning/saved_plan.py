"""Stores a plan as plain data, which can be applied to the same program in another process.

A plan refers to the values of one trace. A saved plan has the sharding of each value and the split of each equation in
program order, and the text of the program. gshard refuses a program with another text.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gshard.core.errors import MeshError, PlanError
from gshard.core.mark import Order, Schedule
from gshard.core.mesh import Mesh
from gshard.core.plan import AS_MARKED, Boundary, Plan, Reason, Ring
from gshard.core.program import Equation, Program, Value, format_block
from gshard.core.rule import Split
from gshard.core.sharding import Sharding
from gshard.planning.batched import plan_of_either
from gshard.planning.demands import at_boundary, demands
from gshard.planning.layer_stacks import schedules_of, with_schedules
from gshard.planning.settled import settled

_FORMAT = 7
_WIDE = 160  # characters of a line in an error message


@dataclasses.dataclass(frozen=True)
class SavedPlan:
    """A plan as plain data.

    Attributes:
        program: the text of the program.
        axes: names and sizes of the mesh's axes.
        shardings: for each value, its sharding as text.
        splits: for each equation, pairs of the number of a factor and its atoms.
        rings: numbers of the equations that are collective matmuls, and their rings.
        shared_reshards: numbers of values that several equations read in another sharding, and that sharding as text.
        leaves: numbers of results that leave in another sharding, and that sharding as text.
        finite: whether the plan was made with ``finite=True``.
        name: the name of the function.
        schedules: the arguments, counted without captured arrays, that are stages of a pipeline which the plan adds.
    """

    program: str
    axes: tuple[tuple[str, int], ...]
    shardings: tuple[str, ...]
    splits: tuple[tuple[tuple[int, tuple[str, ...]], ...], ...]
    rings: tuple[tuple[int, Ring], ...] = ()
    shared_reshards: tuple[tuple[int, str], ...] = ()
    leaves: tuple[tuple[int, str], ...] = ()
    finite: bool = False
    name: str = ""
    schedules: tuple[tuple[int, Schedule], ...] = ()

    @staticmethod
    def of(plan: Plan) -> SavedPlan:
        """Saves a plan as plain data."""
        shardings = tuple(plan.format(v) for v in plan.program.block.values())
        splits = (plan.splits.get(e, {}) for e in plan.program.block.walk())
        kept = tuple(tuple((f, atoms) for f, atoms in sorted(split.items()) if atoms) for split in splits)
        rings = tuple((i, plan.rings[e]) for i, e in enumerate(plan.program.block.walk()) if e in plan.rings)

        def as_text(changed: Mapping[Value, Sharding]) -> tuple[tuple[int, str], ...]:
            pairs = [(i, v, changed[v]) for i, v in enumerate(plan.program.block.values()) if v in changed]
            return tuple((i, sharding.format(plan.mesh, v.shape, v.dtype_name)) for i, v, sharding in pairs)

        text = format_block(plan.program.block)
        read, leave = as_text(plan.shared_reshards), as_text(plan.leaves)
        program = plan.program
        of_program = program.finite, program.name, tuple(schedules_of(program).items())
        return SavedPlan(text, plan.mesh.axes, shardings, kept, rings, read, leave, *of_program)

    @staticmethod
    def checked(plan: Any) -> SavedPlan | None:
        """A saved plan from a plan or a saved plan; None from None.

        Raises:
            PlanError: ``plan`` is something else.
        """
        if plan is None or isinstance(plan, SavedPlan):
            return plan
        if isinstance(plan, Plan):
            return SavedPlan.of(plan)
        raise PlanError(
            f"plan= takes a plan, not a {type(plan).__name__}.",
            got=repr(plan)[:_WIDE],
            hint="Give found.plan of gshard.search, or gshard.SavedPlan.load(path) of a file that found.save wrote.",
        )

    def plan(self, program: Program, mesh: Mesh, boundary: Boundary = AS_MARKED) -> Plan:
        """The plan for a traced program that has the same text once it is settled, or once it has batches too.

        ``planning.settled`` settles programs, and ``planning.batched`` batches equal functions.

        Raises:
            ShardingError: a mark does not fit its value or the mesh.
            PlanError: the program is another one; the message has the first lines that differ.
            MeshError: the mesh has other axes.
        """
        if mesh.axes != self.axes:
            raise MeshError(
                "the plan is for another mesh.",
                got=f"the plan's axes: {dict(self.axes)}; the mesh's: {dict(mesh.axes)}",
                hint="Give jit the mesh that the plan was made for, or search again.",
            )
        program = with_schedules(program, dict(self.schedules)) or program
        return plan_of_either(settled(program, mesh).program, mesh, lambda found: self._plan(found, mesh, boundary))

    def _plan(self, program: Program, mesh: Mesh, boundary: Boundary) -> Plan:
        """The plan for a settled program with the same text."""
        if program.finite != self.finite:
            raise PlanError(
                f"the plan was made {'with' if self.finite else 'without'} finite=True.",
                got=f"{program.name} is partitioned with finite={program.finite}",
                hint=f"Give jit finite={self.finite}, or search again.",
            )
        text = format_block(program.block)
        if text != self.program:
            raise PlanError(
                f"{program.name} is not the program that the plan was made for.",
                got=_difference(self.program, text),
                hint="Search again, or give the arguments that it was searched with.",
            )
        values, equations = list(program.block.values()), list(program.block.walk())
        if (len(values), len(equations)) != (len(self.shardings), len(self.splits)):
            raise PlanError(
                f"the plan is not whole: {program.name} has {len(values)} values and {len(equations)} equations.",
                got=f"the plan has {len(self.shardings)} shardings and {len(self.splits)} splits",
                hint="Search again, or save the plan again.",
            )
        shardings = {v: Sharding.parse(t, mesh)[0] for v, t in zip(values, self.shardings, strict=True)}
        splits = {e: dict(split) for e, split in zip(equations, self.splits, strict=True) if e.rule is not None}
        rings = {equations[i]: ring for i, ring in self.rings}
        reshards, leaves = (
            {values[i]: Sharding.parse(text, mesh)[0] for i, text in numbered}
            for numbered in (self.shared_reshards, self.leaves)
        )
        return dataclasses.replace(plan_of(program, mesh, shardings, splits, reshards, leaves, boundary), rings=rings)

    def as_json(self) -> str:
        """The plan as JSON text, for ``SavedPlan.of_json``."""
        return json.dumps({"format": _FORMAT, **dataclasses.asdict(self)}, indent=1) + "\n"

    def save(self, path: str | Path) -> None:
        """Writes the plan to a file as JSON, for ``SavedPlan.load``."""
        Path(path).write_text(self.as_json(), "utf-8")

    @staticmethod
    def load(path: str | Path) -> SavedPlan:
        """Reads a plan from a file that ``save`` wrote.

        Raises:
            PlanError: the file is no plan.
        """
        try:
            text = Path(path).read_text("utf-8")
        except (OSError, ValueError) as error:
            raise _unreadable(str(path), error) from error
        return SavedPlan.of_json(text, str(path))

    @staticmethod
    def of_json(text: str, path: str = "the text") -> SavedPlan:
        """Reads a plan from the text of ``as_json``.

        Raises:
            PlanError: the text is no plan.
        """
        try:
            data: dict[str, Any] = json.loads(text)
            if data["format"] != _FORMAT:
                raise PlanError(f"{path} has format {data['format']}, and {_FORMAT} is known.", hint="Search again.")
            fields = {f.name: _tuples(data[f.name]) for f in dataclasses.fields(SavedPlan)}
            rings = tuple((i, Ring(**ring)) for i, ring in fields["rings"])
            schedules = tuple((i, Schedule(**schedule)) for i, schedule in fields["schedules"])
            return SavedPlan(**{**fields, "rings": rings, "schedules": schedules})
        except KeyError as error:
            raise _unreadable(path, f"it has no {error}") from error
        except TypeError as error:
            raise _unreadable(path, "it is other JSON") from error
        except ValueError as error:
            raise _unreadable(path, error) from error


def _unreadable(path: str, error: Exception | str) -> PlanError:
    return PlanError(f"{path} cannot be read as a plan: {error}.", hint="Give a file that found.save wrote.")


def _tuples(data: Any) -> Any:
    """The data with tuples instead of lists."""
    if isinstance(data, dict):
        return {key: _tuples(value) for key, value in data.items()}
    return tuple(map(_tuples, data)) if isinstance(data, list) else data


def plan_of(
    program: Program,
    mesh: Mesh,
    shardings: Mapping[Value, Sharding],
    splits: Mapping[Equation, Split],
    reshards: Mapping[Value, Sharding],
    leaves: Mapping[Value, Sharding],
    boundary: Boundary = AS_MARKED,
) -> Plan:
    """A plan of chosen shardings and splits. The shardings must obey the program's marks."""
    reasons: dict[tuple[Value, int], Reason] = {}
    orders: dict[Value, Order] = {}
    for v, sharding in shardings.items():
        e = program.producers.get(v)
        because = Reason("searched", e.line if e else "", e.name if e else "")
        reasons.update({(v, d): because for d, atoms in enumerate(sharding.dims) if atoms})
    for v, demand, reason in demands(program, mesh):
        reasons.update({(v, d): reason for d, atoms in enumerate(demand.dims) if atoms})
        if demand.order != mesh.order:
            orders[v] = demand.order
    plan = Plan(program, mesh, shardings, splits, reasons, orders, shared_reshards=reshards, leaves=leaves)
    return at_boundary(plan, boundary)


def _difference(before: str, after: str) -> str:
    """The first lines that differ: that of the plan, then that of the program."""
    pairs = itertools.zip_longest(before.splitlines(), after.splitlines(), fillvalue="")
    old, new = next((pair for pair in pairs if pair[0] != pair[1]), ("", ""))
    same = sum(1 for _ in itertools.takewhile(lambda both: both[0] == both[1], zip(old, new)))
    return f"- {_around(old, same)}\n  + {_around(new, same)}"


def _around(line: str, same: int) -> str:
    """A line; if it is long, only the part around the end of its first ``same`` characters."""
    line = line.replace("   # ", " # ").strip()
    begin = max(0, same - _WIDE // 2) if len(line) > _WIDE else 0
    return f"{'...' if begin else ''}{line[begin : begin + _WIDE]}{'...' if begin + _WIDE < len(line) else ''}"
