"""Patch: writes the marks of a plan into the user's source files as a unified diff.

A mark on what a statement assigns (``h = x @ w``) becomes a statement after it (``h = gshard.shard(h, P("x"))``), one
on what is returned is put around it. Marks of arguments are statements in front of the function's first
(``search.argument_marks``). Other marks (of parts of expressions) are told in front of the diff, where ``git apply``
and ``patch`` pass over them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from gshard.core.jax_adapter import is_transposed, user_place
from gshard.core.mesh import Mesh
from gshard.core.program import Equation, Program, Value
from gshard.search.argument_marks import argument_marks
from gshard.search.as_marks import FoundMark
from gshard.search.source_file import SourceFile


def patch_of(
    marks: Sequence[FoundMark],
    program: Program,
    paths: Sequence[str] = (),
    defined: tuple[str, int] | None = None,
    mesh: Mesh | None = None,
    notes: Sequence[str] = (),
) -> str:
    """The diff; in front of it, in lines that begin with ``#``, notes and the marks that it leaves out.

    Args:
        marks: of values of the program.
        program: as it was traced; its files must be as they were then.
        paths: of its arguments.
        defined: file and first line of the function's definition.
        mesh: the devices.
        notes: what to say of the marks.
    """
    patch = Patch(program)
    left: list[str] = []
    inputs = program.block.inputs[len(program.captured) :]
    of_arguments = {v: s for mark in marks for v, s in mark.shardings.items() if v in inputs}
    statements, unsaid = ({}, set(of_arguments)) if mesh is None else argument_marks(of_arguments, inputs, paths, mesh)
    left += patch.begin(defined, statements)
    for mark in marks:
        others = [v for v in mark.shardings if v not in of_arguments or v in unsaid]
        done = [v not in of_arguments and patch.mark(v, mark.text) for v in others]
        if not all(done):
            left.append(f"{mark.text} {mark.at}: not written, do it by hand")
    return patch.text([*notes, *left])


class Patch:
    """Changes of the source files of a program.

    Args:
        program: as it was traced; its files must be as they were then.
    """

    def __init__(self, program: Program):
        self._name = program.name
        self._producers = {v: e for e in program.block.walk() for v in e.outputs}
        self._at: dict[tuple[str, int], list[tuple[int, Equation]]] = {}
        for i, e in enumerate(program.block.walk()):
            place = user_place(e.source_info)
            if place is not None and not is_transposed(e.source_info):
                self._at.setdefault(place, []).append((i, e))
        self._files: dict[str, SourceFile] = {}

    def mark(self, v: Value, text: str) -> bool:
        """Writes a mark on a value, whose source text has ``x`` in its place; False where that cannot be said."""
        e = self._producers.get(v)
        place = None if e is None else user_place(e.source_info)
        if place is None or not Path(place[0]).is_file():
            return False
        path, line = place
        file = self._file(path)
        statement = file.statement(line)
        if statement is None:
            return False
        lines = range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
        made = [pair for n in lines for pair in self._at.get((path, n), ())]
        # What a statement assigns or returns is what its last equation makes.
        return bool(made) and max(made, key=lambda pair: pair[0])[1] is e and file.mark(statement, text)

    def begin(self, defined: tuple[str, int] | None, statements: Mapping[str, str]) -> list[str]:
        """Puts statements for parameters in front of a function's first; else these, as lines of text.

        Args:
            defined: file and first line of the function.
            statements: by the parameter that each is about.
        """
        if not statements:
            return []
        if defined is not None and Path(defined[0]).is_file() and self._file(defined[0]).begin(defined[1], statements):
            return []
        of = f"the function {self._name} is in no file, or not in this form: write in front of its first statement"
        return [of, *(f"  {line}" for text in statements.values() for line in text.splitlines())]

    def jit(self, defined: tuple[str, int] | None, keywords: Mapping[str, str]) -> list[str]:
        """Adds keywords where a function is jitted by ``jax.jit``; else these, as lines of text.

        Args:
            defined: file and first line of the function.
            keywords: by name, as source text.
        """
        reason = f"the function {self._name} is in no file"
        if defined is not None and Path(defined[0]).is_file():
            reason = self._file(defined[0]).jit(defined[1], keywords)
        if not reason:
            return []
        rows = [f"  {line}" for name, value in keywords.items() for line in f"{name}={value},".splitlines()]
        return [f"{reason}: give jax.jit", *rows]

    def text(self, notes: Sequence[str]) -> str:
        """The diff of all files, behind notes in lines that begin with ``#``."""
        return (
            "\n".join([*(f"# {n}" for n in notes), *(line for f in self._files.values() for line in f.diff())]) + "\n"
        )

    def _file(self, path: str) -> SourceFile:
        if path not in self._files:
            self._files[path] = SourceFile(path)
        return self._files[path]
