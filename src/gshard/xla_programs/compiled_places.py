"""Compiled places: the user's lines of the instructions of a compiled program, and what the instructions are called.

Files have the names that gshard gives those of a program that it traces, so that two explanations are compared by line.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any

from gshard.explanation.report.places import Places
from gshard.naming.short_names import equal_layers
from gshard.tracing.files import names_of_files
from gshard.xla.dataflow import Array
from gshard.xla.hlo_parser import Instruction
from gshard.xla.op_names import Origin, origin_of
from gshard.xla_programs.compiled_program import CompiledProgram


class CompiledPlaces:
    """The lines of one program; those that were named are what the page shows of its files."""

    def __init__(self, program: CompiledProgram) -> None:
        self.program = program
        self._named = Places()
        self._origins: dict[str, Origin] = {}

    def files(self) -> list[dict[str, Any]]:
        """Of each file the lines that were named, with the text around them."""
        return self._named.files()

    def short(self, place: str) -> str:
        """A line, given with the whole path of its file, as the page names it; empty if none is given."""
        path, _, line = place.rpartition(":")
        return self._named.at(path, int(line), self._names.get(path, "")) if path and line.isdigit() else ""

    def line(self, made: Instruction) -> str:
        """The line of an instruction, as the page names it."""
        return self.short(self.program.module.place_of(self.told(made)))

    def line_near(self, computation: str, made: Instruction) -> str:
        """The same; of a copy that the compiler made, the line of what is copied, or else of what reads the copy."""
        if line := self.line(made):
            return line
        array, flow = Array(computation, made.name), self.program.flow
        copied = flow.made(flow.source(array))
        if copied is not None and (line := self.line(copied)):
            return line
        reader = next(flow.readers(array), None)
        return "" if reader is None else self.line(reader[1])

    def origin(self, made: Instruction) -> Origin:
        """The operator that an instruction comes from."""
        name = self.told(made).op_name
        if name not in self._origins:
            self._origins[name] = origin_of(name)
        return self._origins[name]

    def called(self, made: Instruction) -> str:
        """What an instruction computes: the operator, or what XLA calls it."""
        return self.origin(made).operation or self.told(made).opcode

    def described(self, computation: str, name: str, folded: Mapping[str, str] | None = None) -> tuple[str, str]:
        """What an instruction computes, with its module; and its line."""
        made = self.program.module.computations[computation].instructions[name]
        what, module = self.called(made), self.origin(made).module
        module = (folded or {}).get(module, module)
        return f"{what} in {module}" if module else what, self.line(made)

    def folded(self, arrays: Iterable[Array]) -> dict[str, str]:
        """The modules of what makes arrays, those of equal layers under one name: ``layers_*/mlp``."""
        computations = self.program.module.computations
        modules = (self.origin(computations[a.computation].instructions[a.name]).module for a in arrays)
        # A layer is one if something is inside: here the array.
        paths = {(*module.split("/"), "array"): None for module in modules if module}
        return {"/".join(own[:-1]): "/".join(one[:-1]) for own, one in equal_layers(paths, same_inside=False).items()}

    def told(self, made: Instruction) -> Instruction:
        """The instruction whose metadata tell of one: of a fusion without any the first inside that has some."""
        if self.program.module.place_of(made) or not made.opcode.startswith("fusion"):
            return made
        inside = (
            part
            for name in made.called("calls")
            for part in self.program.module.computations[name].instructions.values()
            if self.program.module.place_of(part)
        )
        return next(inside, made)

    @functools.cached_property
    def _names(self) -> Mapping[str, str]:
        """What each file is called."""
        numbers = {
            int(found[1])
            for computation in self.program.module.computations.values()
            for made in computation.instructions.values()
            if (found := re.search(r"\bstack_frame_id=(\d+)", made.attributes)) is not None
        }
        places = {self.program.module.places.get(number, "") for number in numbers}
        return names_of_files(place.rpartition(":")[0] for place in sorted(places))
