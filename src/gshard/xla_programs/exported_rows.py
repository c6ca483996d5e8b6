"""Exported rows: a plan's shardings of arguments in the words of a framework, checked by compiling.

A framework has its own words for shardings: rules for logical axis names, patterns of variable paths, metadata of
initializers. Each is a list of rows. What rows give each array is compared with the plan; if it differs anywhere, the
program is compiled with what the rows give.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from gshard.core.errors import ArgumentError, known_names
from gshard.core.jax_adapter import user_line
from gshard.core.paths import is_below
from gshard.core.program import format_bytes
from gshard.xla_programs.compiled_explanation import CompiledExplanation
from gshard.xla_programs.exported_arguments import ExportedArgument
from gshard.xla_programs.plan_compiler import PlanCompiler, WorseLine, spec_text, worse_text

_SHOWN = 12  # arrays that are printed


@dataclasses.dataclass(frozen=True, slots=True)
class ChangedArgument:
    """An array for which rows give another sharding than the plan.

    Attributes:
        argument: the array, with the plan's sharding.
        spec: what the rows give.
        more: bytes that each device holds of it more than by the plan; below 0 if less.
    """

    argument: ExportedArgument
    spec: PartitionSpec
    more: int

    def __str__(self) -> str:
        held = f"{format_bytes(abs(self.more))} {'less' if self.more < 0 else 'more'} on each device"
        return f"{self.argument}: {spec_text(self.spec)} by these rows, {held}"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ExportedRows:
    """Rows that give arguments their shardings in a framework, and what XLA makes of them.

    Attributes:
        rows: pairs, in the order in which the framework reads them.
        code: the source text that writes them.
        changed: arrays for which the rows give another sharding than the plan.
        unsaid: arrays that the plan splits and that the rows say nothing of.
        compiled: the program that XLA compiles with the shardings that the rows give, results and constraints as
            exported. Arrays that the rows say nothing of have those of the plan.
        worse: the lines at which that sends more than the plan.
        told: what it sends beside the plan.
    """

    rows: tuple[tuple[str, Any], ...]
    code: str
    changed: tuple[ChangedArgument, ...]
    unsaid: tuple[ExportedArgument, ...]
    compiled: CompiledExplanation
    worse: tuple[WorseLine, ...]
    told: str

    def __str__(self) -> str:
        lines = [self.code, f"checked: {self.told}"]
        for title, arrays in (
            ("other shardings than the plan's", self.changed),
            ("split by the plan, without a row", self.unsaid),
        ):
            if arrays:
                lines += [title, *(f"  {a}" for a in arrays[:_SHOWN])]
                lines += [f"  and {len(arrays) - _SHOWN} more"] * (len(arrays) > _SHOWN)
        return "\n".join([*lines, *worse_text(self.worse)])

    __repr__ = __str__


@dataclasses.dataclass(frozen=True, eq=False)
class RowExport:
    """Makes exports of rows, and checks them.

    Attributes:
        made: compiles the program.
        arguments: all arrays, with the plan's shardings.
        function: the program with the constraints that are exported.
        compiled: the same as XLA compiled it with the plan's shardings.
    """

    made: PlanCompiler
    arguments: tuple[ExportedArgument, ...]
    function: Any
    compiled: CompiledExplanation

    def below(self, path: str) -> dict[str, ExportedArgument]:
        """The arrays at a path of arguments and below, by the rest of their path; all for "".

        Raises:
            ArgumentError: there is none.
        """
        if not path:
            return {argument.path: argument for argument in self.arguments}
        depth = len(path.split("/"))
        found = {a.path: a for a in self.arguments if is_below(path, a.path)}
        if not found:
            paths = [argument.path for argument in self.arguments][:_SHOWN]
            raise ArgumentError(
                f"no argument is at {path!r}.", user_line(), hint=known_names(path, paths, "The arguments are at")
            )
        return {"/".join(p.split("/")[depth:]) or p.rpartition("/")[2]: a for p, a in found.items()}

    def checked(
        self,
        rows: Sequence[tuple[str, Any]],
        code: str,
        given: Mapping[ExportedArgument, PartitionSpec],
    ) -> ExportedRows:
        """The rows, compared with the plan and compiled.

        Args:
            rows: what is exported.
            code: its source text.
            given: the sharding that the rows give each array that they are about.
        """
        made, mesh = self.made, self.made.jax_mesh
        ins, outs = list(made.ins), list(made.outs)
        changed = []
        state = {
            i: after for i, after in made.program.state([len(made.program.captured) + d for d in made.found.donated])
        }
        for argument, spec in given.items():
            if spec_text(spec) == spec_text(argument.spec):
                continue
            new, old = made.on_mesh(spec, argument.input), made.ins[argument.input]
            parts = [x.shard_shape(argument.value.shape) for x in (new, old)]
            held = [_bytes(argument, part) for part in parts]
            changed.append(ChangedArgument(argument, spec, held[0] - held[1]))
            ins[argument.input] = new
            for k, v in enumerate(made.program.block.outputs):  # a donated state leaves as it comes
                if v is state.get(argument.input):
                    outs[k] = jax.sharding.NamedSharding(mesh, spec, memory_kind=made.outs[k].memory_kind)
        unsaid = tuple(a for a in self.arguments if a not in given and any(a.axes))
        compiled = made.compiled(self.function, ins, outs) if changed else self.compiled
        changed.sort(key=lambda row: -row.more)
        return ExportedRows(
            tuple(rows), code, tuple(changed), unsaid, compiled, made.worse(compiled), made.told(compiled)
        )


def _bytes(argument: ExportedArgument, part: Sequence[int]) -> int:
    count, size = 1, 1
    for n, whole in zip(part, argument.value.shape, strict=True):
        count, size = count * n, size * whole
    return argument.value.bytes * count // size if size else 0
