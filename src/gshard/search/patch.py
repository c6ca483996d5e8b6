"""Patch: writes the marks of a plan into the user's source files as a unified diff.

A mark on what a statement assigns (``h = x @ w``) becomes a statement after it (``h = gshard.shard(h, P("x"))``), one
on what is returned is put around it. Marks of arguments are statements in front of the function's first
(``search.argument_marks``). Other marks (of parts of expressions), and the call of ``gshard.jit`` under which
marks have an effect, are listed in front of the diff, where ``git apply`` and ``patch`` pass over them.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from gshard.core.mesh import Mesh
from gshard.core.program import Program, Value
from gshard.planning.layer_stacks import schedules_of
from gshard.search.argument_marks import argument_marks, pipeline_statements
from gshard.search.as_marks import FoundMark
from gshard.search.source_file import SourceFile
from gshard.search.statement_results import StatementResults


def patch_of(
    marks: Sequence[FoundMark],
    program: Program,
    paths: Sequence[str] = (),
    defined: tuple[str, int] | None = None,
    mesh: Mesh | None = None,
    notes: Sequence[str] = (),
    keywords: Mapping[str, str] | None = None,
) -> str:
    """The diff; in front of it, in lines that begin with ``#``, notes and the marks that it leaves out."""
    patch = Patch(program)
    left: list[str] = []
    inputs = program.block.inputs[len(program.captured) :]
    of_arguments = {v: s for mark in marks for v, s in mark.shardings.items() if v in inputs}
    statements, unsaid = ({}, set(of_arguments)) if mesh is None else argument_marks(of_arguments, inputs, paths, mesh)
    stages, by_hand = pipeline_statements({inputs[i]: s for i, s in schedules_of(program).items()}, inputs, paths)
    both = {name: "\n".join(of[name] for of in (stages, statements) if name in of) for name in {**stages, **statements}}
    left += [*patch.begin(defined, both), *(f"{call}: not written, do it by hand" for call in by_hand)]
    for mark in marks:
        others = [v for v in mark.shardings if v not in of_arguments or v in unsaid]
        if others and not patch.mark(others, mark.text):
            left.append(f"{mark.text} {mark.at}: not written, do it by hand")
    if keywords:
        given = ", ".join(f"{name}={value}" for name, value in keywords.items())
        left.append(f"run it by gshard.jit({program.name}, {given})")
    return patch.text([*notes, *left])


class Patch:
    """Changes of the source files of a program."""

    def __init__(self, program: Program):
        self._name = program.name
        self._inputs = {*program.block.inputs}
        self._results = StatementResults(program)
        self._files: dict[str, SourceFile] = {}

    def can_mark(self, values: Collection[Value]) -> bool:
        """Whether statements can mark exactly these values; marks on arguments are in front of a function's first."""
        return self._statements([v for v in values if v not in self._inputs]) is not None

    def mark(self, values: Collection[Value], text: str) -> bool:
        """Writes a mark on values, whose source text has ``x`` in their place; False where statements cannot."""
        statements = self._statements(values)
        for file, statement in statements or ():
            file.mark(statement, text)
        return statements is not None

    def _statements(self, values: Collection[Value]) -> list[tuple[SourceFile, ast.stmt]] | None:
        """The statements whose results are exactly these values; None if there are none."""
        computed: dict[tuple[str, ast.stmt], set[Value]] = {}
        for v in values:
            place = self._results.place(v)
            file = None if place is None else self._file(place[0])
            statement = None if file is None or place is None else file.statement(place[1])
            if file is None or statement is None or not file.can_mark(statement):
                return None
            computed.setdefault((file.path, statement), set()).add(v)
        if not all(self._results.are_results(of, path, at) for (path, at), of in computed.items()):
            return None
        return [(self._files[path], statement) for path, statement in computed]

    def begin(self, defined: tuple[str, int] | None, statements: Mapping[str, str]) -> list[str]:
        """Puts statements for parameters in front of a function's first; else these, as lines of text."""
        if not statements:
            return []
        file = None if defined is None else self._file(defined[0])
        if file is not None and defined is not None and file.begin(defined[1], statements):
            return []
        of = f"the function {self._name} is in no file, or not in this form: write in front of its first statement"
        return [of, *(f"  {line}" for text in statements.values() for line in text.splitlines())]

    def text(self, notes: Sequence[str]) -> str:
        """The diff of all files, behind notes in lines that begin with ``#``."""
        return (
            "\n".join([*(f"# {n}" for n in notes), *(line for f in self._files.values() for line in f.diff())]) + "\n"
        )

    def _file(self, path: str) -> SourceFile | None:
        if path not in self._files and Path(path).is_file():
            self._files[path] = SourceFile(path)
        return self._files.get(path)
