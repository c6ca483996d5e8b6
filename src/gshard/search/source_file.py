"""Source file: a file of the user's that is being changed, and the change as a unified diff.

Statements are put after others and in front of a function's first, and expressions around what is returned.
"""

from __future__ import annotations

import ast
import difflib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

_SPEC = "from jax.sharding import PartitionSpec as P"


class SourceFile:
    """A source file that is being changed."""

    def __init__(self, path: str):
        self.path = path
        self.text = Path(path).read_text("utf-8")
        self.lines = self.text.splitlines()
        self.tree = ast.parse(self.text)
        self.after: dict[int, str] = {}
        self.before: dict[int, str] = {}
        self.edits: dict[
            int, list[tuple[int, int, str]]
        ] = {}  # by line: from which byte to which, and what is there instead
        self.written: list[str] = []
        is_spec = self._imports("jax.sharding", "PartitionSpec", "P")
        self.spec = "jax.P" if self._binds("P") and not is_spec else "P"
        self.lacks_spec = self.spec == "P" and not is_spec

    def statement(self, line: int) -> ast.stmt | None:
        """The innermost statement at a line that has none inside."""
        found = [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Return)
            and node.lineno <= line <= (node.end_lineno or node.lineno)
        ]
        return max(found, key=lambda node: node.lineno, default=None)

    def begin(self, line: int, statements: Mapping[str, str]) -> bool:
        """Puts statements in front of the first of a function; False where it has other parameters, or but one line."""
        node = self._function(line)
        if node is None:
            return False
        parameters = {a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
        if not parameters >= set(statements):
            return False
        is_text = isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant)
        body = node.body[1:] if is_text and len(node.body) > 1 else node.body
        begin = min((body[0].lineno, *(d.lineno for d in getattr(body[0], "decorator_list", ()))))
        if self.lines[begin - 1][: body[0].col_offset].strip():
            return False
        indent = " " * body[0].col_offset
        texts = [self._spelled(text) for text in statements.values()]
        self.before[begin] = "\n".join(indent + part for text in texts for part in text.splitlines())
        return True

    def can_mark(self, statement: ast.stmt) -> bool:
        """Whether a mark can stand after or around a statement: it has one result, and lines of its own."""
        value, end = getattr(statement, "value", None), statement.end_lineno or statement.lineno
        before = self.lines[statement.lineno - 1].encode()[: statement.col_offset]
        after = self.lines[end - 1].encode()[statement.end_col_offset :].decode().strip()
        later = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
        several = (ast.Tuple, ast.List, ast.Set, ast.Dict)
        if value is None or isinstance(value, several) or any(isinstance(node, later) for node in ast.walk(value)):
            return False
        if before.strip() or (after and not after.startswith("#")):
            return False
        if isinstance(statement, ast.Return):
            return value.lineno not in self.edits
        return self._target(statement) is not None and end not in self.after

    def mark(self, statement: ast.stmt, text: str) -> None:
        """Puts a mark after or around a statement that ``can_mark``."""
        before, after = self._spelled(text).split("(x", 1)
        if isinstance(statement, ast.Return):
            value = statement.value
            assert value is not None
            self._edit(value.lineno, value.col_offset, value.col_offset, f"{before}(")
            self._edit(value.end_lineno or 0, value.end_col_offset or 0, value.end_col_offset or 0, after)
            return
        name = self._target(statement)
        self.after[statement.end_lineno or 0] = f"{' ' * statement.col_offset}{name} = {before}({name}{after}"

    def _target(self, statement: ast.stmt) -> str | None:
        """The one name that a statement assigns to."""
        targets = getattr(statement, "targets", None) or [getattr(statement, "target", None)]
        return targets[0].id if len(targets) == 1 and isinstance(targets[0], ast.Name) else None

    def _edit(self, line: int, begin: int, end: int, text: str) -> None:
        self.edits.setdefault(line, []).append((begin, end, text))

    def _function(self, line: int) -> ast.FunctionDef | None:
        """The function that is defined, or whose first decorator is, at a line."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef):
                if min((node.lineno, *(decorator.lineno for decorator in node.decorator_list))) == line:
                    return node
        return None

    def diff(self) -> Iterator[str]:
        """The change as lines of a unified diff."""
        changed = [*self.after, *self.before, *self.edits]
        needed = [f"import {name}" for name in ("gshard", "jax") if self._lacks(name)]
        needed += [_SPEC] * (self.lacks_spec and any(re.search(r"\bP[(.]", text) for text in self.written))
        new: list[str] = []
        place = self._place_of_imports(min(changed, default=0)) if needed else 0
        for number, line in enumerate(self.lines, 1):
            new += self.before[number].splitlines() if number in self.before else []
            for begin, end, text in sorted(self.edits.get(number, ()), reverse=True):
                line = line.encode()[:begin].decode() + text + line.encode()[end:].decode()
            new += line.split("\n")
            new += [self.after[number]] if number in self.after else []
            new += needed if number == place else []
        new = [*needed, *new] if not place else new
        shown = os.path.relpath(self.path)
        shown = self.path.lstrip("/") if shown.startswith("..") else shown
        return difflib.unified_diff(self.lines, new, f"a/{shown}", f"b/{shown}", lineterm="")

    def _place_of_imports(self, before: int) -> int:
        """The line after which imports are added: the last import, or the file's text, in front of a changed line."""
        ends = [
            node.end_lineno or 0
            for i, node in enumerate(self.tree.body)
            if isinstance(node, ast.Import | ast.ImportFrom)
            or (i == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        ]
        return max((end for end in ends if end < before), default=0)

    def _spelled(self, text: str) -> str:
        """What is written, with the file's name for ``PartitionSpec`` in place of ``P``."""
        text = text if self.spec == "P" else re.sub(r"(?<![\w.])P(?=[(.])", self.spec, text)
        self.written.append(text)
        return text

    def _lacks(self, module: str) -> bool:
        """Whether what is written reads a module that the file does not import."""
        reads = any(re.search(rf"\b{module}\.", text) for text in self.written)
        return reads and not any(
            isinstance(node, ast.Import)
            and any((a.asname or a.name.partition(".")[0]) == module == a.name.partition(".")[0] for a in node.names)
            for node in self.tree.body
        )

    def _imports(self, module: str, name: str, called: str) -> bool:
        """Whether the file imports a name from a module, or from jax itself, under this name."""
        return any(
            isinstance(node, ast.ImportFrom)
            and ((node.module, a.name) == (module, name) or (node.module, a.name) == ("jax", called))
            and (a.asname or a.name) == called
            for node in self.tree.body
            for a in getattr(node, "names", ())
        ) or (called == "P" and any(map(self._is_alias_of_spec, self.tree.body)))

    def _is_alias_of_spec(self, node: ast.stmt) -> bool:
        """``P = jax.sharding.PartitionSpec``, or ``P = jax.P``."""
        return ast.unparse(node) in ("P = jax.sharding.PartitionSpec", "P = jax.P", "P = PartitionSpec")

    def _binds(self, name: str) -> bool:
        """Whether the file gives a name a meaning anywhere."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import | ast.ImportFrom) and any((a.asname or a.name) == name for a in node.names):
                return True
            if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store):
                return True
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
                return True
            if isinstance(node, ast.arg) and node.arg == name:
                return True
        return False
