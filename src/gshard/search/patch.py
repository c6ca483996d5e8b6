"""Writes the marks of a plan into the user's source files, as a unified diff.

A mark on a value that a statement assigns (``h = x @ w``) becomes a statement after it (``h = gshard.shard(h,
P("x"))``). A mark on a returned value goes around it. Marks of arguments become statements before the function's first
statement (``search.argument_marks``). Other marks, for example of parts of expressions, are listed before the diff,
where ``git apply`` and ``patch`` ignore them.
"""

from __future__ import annotations

import ast
import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from gshard.core.jax_adapter import is_transposed, user_place
from gshard.core.mesh import Mesh
from gshard.core.program import Equation, Program
from gshard.search.argument_marks import argument_marks
from gshard.search.as_marks import FoundMark

_SPEC = "from jax.sharding import PartitionSpec as P"


def patch_of(
    marks: Sequence[FoundMark],
    program: Program,
    paths: Sequence[str] = (),
    defined: tuple[str, int] | None = None,
    mesh: Mesh | None = None,
    notes: Sequence[str] = (),
) -> str:
    """The diff. Before it, lines that begin with ``#`` contain notes and the marks that it leaves out.

    Args:
        marks: marks on values of the program.
        program: the traced program; its source files must not have changed since.
        paths: the paths of its arguments.
        defined: the file and first line of the function's definition.
        mesh: the devices.
        notes: lines to print before the diff.
    """
    producers = {v: e for e in program.block.walk() for v in e.outputs}
    equations_at: dict[tuple[str, int], list[tuple[int, Equation]]] = {}
    for i, e in enumerate(program.block.walk()):
        place = user_place(e.source_info)
        if place is not None and not is_transposed(e.source_info):
            equations_at.setdefault(place, []).append((i, e))
    files: dict[str, _File] = {}
    comments: list[str] = []
    inputs = program.block.inputs[len(program.captured) :]
    argument_shardings = {v: s for mark in marks for v, s in mark.shardings.items() if v in inputs}
    statements, unwritten = (
        ({}, set(argument_shardings)) if mesh is None else argument_marks(argument_shardings, inputs, paths, mesh)
    )
    if statements and not _write_at_the_top(statements, defined, files):
        reason = (
            f"the function {program.name} is in no file, or not in this form: write in front of its first statement"
        )
        comments += [f"# {reason}", *(f"#   {line}" for text in statements.values() for line in text.splitlines())]
    for mark in marks:
        others = [v for v in mark.shardings if v not in argument_shardings or v in unwritten]
        written = [
            v not in argument_shardings and _write(mark.text, producers.get(v), equations_at, files) for v in others
        ]
        if not all(written):
            comments.append(f"# {mark.text} {mark.at}: not written, do it by hand")
    comments = [*(f"# {note}" for note in notes), *comments]
    return "\n".join([*comments, *(line for file in files.values() for line in file.diff())]) + "\n"


def _write(
    text: str,
    e: Equation | None,
    at: Mapping[tuple[str, int], Sequence[tuple[int, Equation]]],
    files: dict[str, _File],
) -> bool:
    place = None if e is None else user_place(e.source_info)
    if place is None or not Path(place[0]).is_file():
        return False
    path, line = place
    file = files.get(path) or _File(path)
    statement = file.statement(line)
    if statement is None:
        return False
    lines = range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
    equations = [pair for n in lines for pair in at.get((path, n), ())]
    # A statement assigns or returns the result of its last equation.
    if not equations or max(equations, key=lambda pair: pair[0])[1] is not e:
        return False
    files[path] = file
    return file.mark(statement, text)


def _write_at_the_top(statements: Mapping[str, str], defined: tuple[str, int] | None, files: dict[str, _File]) -> bool:
    """Inserts statements for parameters before a function's first statement. False if that is not possible."""
    if defined is None or not Path(defined[0]).is_file():
        return False
    path, line = defined
    file = files.get(path) or _File(path)
    if not file.begin(line, statements):
        return False
    files[path] = file
    return True


class _File:
    """A source file with its changes.

    Attributes:
        path: the path of the file.
        text: its text.
        lines: its lines.
        tree: its syntax tree.
        after: for line numbers, text to insert after the line.
        instead: for line numbers, text that replaces the line.
        before: for line numbers, text to insert before the line.
    """

    def __init__(self, path: str):
        self.path = path
        self.text = Path(path).read_text("utf-8")
        self.lines = self.text.splitlines()
        self.tree = ast.parse(self.text)
        self.after: dict[int, str] = {}
        self.instead: dict[int, str] = {}
        self.before: dict[int, str] = {}

    def statement(self, line: int) -> ast.stmt | None:
        """The innermost assignment or return statement at a line; None if there is none."""
        found = [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Return)
            and node.lineno <= line <= (node.end_lineno or node.lineno)
        ]
        return max(found, key=lambda node: node.lineno, default=None)

    def begin(self, line: int, statements: Mapping[str, str]) -> bool:
        """Inserts statements before the first one of a function. False if parameters are missing, or it is one line."""
        for node in ast.walk(self.tree):
            if not isinstance(node, ast.FunctionDef):
                continue
            parameters = {a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
            first = min((node.lineno, *(decorator.lineno for decorator in node.decorator_list)))
            if first != line or not parameters >= set(statements):
                continue
            has_docstring = isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant)
            body = node.body[1:] if has_docstring and len(node.body) > 1 else node.body
            begin_line = min((body[0].lineno, *(d.lineno for d in getattr(body[0], "decorator_list", ()))))
            if self.lines[begin_line - 1][: body[0].col_offset].strip():
                return False
            indent = " " * body[0].col_offset
            self.before[begin_line] = "\n".join(
                indent + part for text in statements.values() for part in text.splitlines()
            )
            return True
        return False

    def mark(self, statement: ast.stmt, text: str) -> bool:
        """Inserts a mark after or around a statement. False if that is not possible."""
        indent = " " * statement.col_offset
        if isinstance(statement, ast.Return):
            value = statement.value
            if value is None or statement.lineno != statement.end_lineno:
                return False
            source = ast.get_source_segment(self.text, value)
            self.instead[statement.lineno] = f"{indent}return {text.replace('(x', f'({source}', 1)}"
            return True
        targets: list[ast.expr] = getattr(statement, "targets", None) or [statement.target]  # type: ignore[attr-defined]
        if len(targets) != 1 or not isinstance(targets[0], ast.Name) or not statement.end_lineno:
            return False
        name = targets[0].id
        self.after[statement.end_lineno] = f"{indent}{name} = {text.replace('(x', f'({name}', 1)}"
        return True

    def diff(self) -> Iterator[str]:
        """The change as lines of a unified diff."""
        new_imports = [] if self._imports("gshard", None) else ["import gshard"]
        written = [*self.after.values(), *self.instead.values(), *self.before.values()]
        if any(" P(" in text for text in written) and not self._imports("jax.sharding", "P"):
            new_imports.append(_SPEC)
        new_lines: list[str] = []
        last_import = max(
            (n.end_lineno or 0 for n in self.tree.body if isinstance(n, ast.Import | ast.ImportFrom)), default=0
        )
        for number, line in enumerate(self.lines, 1):
            new_lines += self.before[number].splitlines() if number in self.before else []
            new_lines.append(self.instead.get(number, line))
            new_lines += [self.after[number]] if number in self.after else []
            new_lines += new_imports if number == last_import else []
        new_lines = [*new_imports, *new_lines] if not last_import else new_lines
        shown_path = os.path.relpath(self.path)
        shown_path = self.path.lstrip("/") if shown_path.startswith("..") else shown_path
        return difflib.unified_diff(self.lines, new_lines, f"a/{shown_path}", f"b/{shown_path}", lineterm="")

    def _imports(self, module: str, name: str | None) -> bool:
        for node in self.tree.body:
            if isinstance(node, ast.Import) and name is None and any(a.name == module for a in node.names):
                return True
            if isinstance(node, ast.ImportFrom) and name is not None:
                if any((a.asname or a.name) == name for a in node.names):
                    return True
        return False
