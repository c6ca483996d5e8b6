"""The diff of a plan: writes the marks of arguments into the user's source file, for ``git apply``.

They stand in front of a function's first statement, by paths for a pytree. Others are printed with their line in front
of the diff, in lines that begin with ``#``.
"""

from __future__ import annotations

import ast
import difflib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from jax.sharding import PartitionSpec

from gshard.core.mark import text_of_spec
from gshard.core.mesh import Mesh
from gshard.core.paths import is_below
from gshard.core.program import Program, Value
from gshard.naming.argument_names import equal_layers
from gshard.planning.added_marks import spec_of_cut
from gshard.planning.layer_stacks import schedules_of
from gshard.search.as_marks import FoundMark


def patch_of(
    marks: Sequence[FoundMark],
    program: Program,
    mesh: Mesh,
    paths: Sequence[str] = (),
    defined: tuple[str, int] | None = None,
    notes: Sequence[str] = (),
) -> str:
    """The diff; in front of it, in lines that begin with ``#``, notes and the marks that it leaves out."""
    patch, inputs, left = Patch(), program.block.inputs[len(program.captured) :], [*notes]
    cuts = {v: s for mark in marks for v, s in mark.shardings.items() if v in inputs}
    specs = {v: spec_of_cut(s, mesh) if s.atoms else PartitionSpec() for v, s in cuts.items()}
    texts = {v: f"shard(x, jax.{text_of_spec(spec)})" for v, spec in specs.items() if spec is not None}
    stages = {inputs[i]: str(schedule) for i, schedule in schedules_of(program).items()}
    (staged, by_hand), (marked, unsaid) = (argument_statements(of, inputs, paths) for of in (stages, texts))
    rows = [row for name in {**staged, **marked} for of in (staged, marked) for row in of.get(name, ())]
    if rows and not (defined and patch.begin(*defined, {*staged, *marked}, rows)):
        left.append(f"{program.name} is in no file, or not in this form: write in front of its first statement")
        left += [f"  {row}" for row in rows]
    names = dict(zip(program.block.inputs, program.names, strict=True))
    left += [f"gshard.{stages[v]} with x = {names[v]}: not written, do it by hand" for v in stages if v in by_hand]
    for mark in marks:
        if any(v not in texts or v in unsaid for v in mark.shardings):
            left.append(f"{mark.text} {mark.at}: not written, do it by hand")
    return "\n".join([*(f"# {line}" for line in left), *patch.diff()]) + "\n"


class Patch:
    """Lines that are added to the source files of a program."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[list[str], ast.Module, dict[int, list[str]]]] = {}  # lines, tree, lines to add

    def begin(self, path: str, line: int, parameters: set[str], rows: Sequence[str]) -> bool:
        """Adds statements in front of the first of the function at a line; False if it is in another form."""
        lines, tree, _ = self._file(path)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and _first_line(node) == line:
                arguments = {a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
                first = node.body[1 if ast.get_docstring(node) is not None and len(node.body) > 1 else 0]
                number, indent = _first_line(first) - 1, first.col_offset
                if parameters <= arguments and not lines[number].encode()[:indent].strip():
                    self._add(path, number, indent, rows)
                    return True
        return False

    def diff(self) -> Iterator[str]:
        """The added lines of all files as a unified diff."""
        for path, (lines, tree, added) in self._files.items():
            imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
            bound = {a.asname or a.name.partition(".")[0] for node in imports for a in node.names}
            needed = [f"import {name}" for name in ("gshard", "jax") if f"{name}." in str(added) and name not in bound]
            before = [*(tree.body[:1] if ast.get_docstring(tree) else ()), *imports]
            place = max((node.end_lineno or 0 for node in before if node.lineno <= min(added, default=0)), default=0)
            rows = [*lines[:place], *needed, *added.get(place, ())]
            rows += [row for i, line in enumerate(lines[place:], place + 1) for row in (line, *added.get(i, ()))]
            shown = path.lstrip("/") if (near := os.path.relpath(path)).startswith("..") else near
            yield from difflib.unified_diff(lines, rows, f"a/{shown}", f"b/{shown}", lineterm="")

    def _add(self, path: str, line: int, indent: int, rows: Sequence[str]) -> None:
        self._file(path)[2].setdefault(line, []).extend(" " * indent + row for row in rows)

    def _file(self, path: str) -> tuple[list[str], ast.Module, dict[int, list[str]]]:
        if path not in self._files:
            text = Path(path).read_text("utf-8") if Path(path).is_file() else ""
            self._files[path] = text.splitlines(), ast.parse(text), {}
        return self._files[path]


def _first_line(node: ast.stmt) -> int:
    return min((node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))))


def argument_statements(
    calls: Mapping[Value, str], inputs: Sequence[Value], paths: Sequence[str]
) -> tuple[dict[str, list[str]], set[Value]]:
    """The lines that call a function of gshard with arguments, by parameter; and the arguments without such a line."""
    statements, left, parameters = dict[str, list[str]](), {*calls}, dict[str, dict[str, Value]]()
    for v, path in zip(inputs, paths, strict=bool(paths)):
        parameters.setdefault(path.partition("/")[0], {})[path.partition("/")[2]] = v
    for name, values in parameters.items():
        own = {path: calls[v].replace("'", '"') for path, v in values.items() if v in calls}
        patterns = own if "" in own else _patterns(own, values)
        if not patterns or not name.isidentifier():
            continue
        call = next(iter(own.values())).replace("(x,", f"({name},", 1)
        if "" in own:
            statements[name] = [f"{name} = gshard.{call}"]
        elif call.startswith("shard("):
            rows = [f"{json.dumps(pattern, ensure_ascii=False)}: {text[9:-1]}" for pattern, text in patterns.items()]
            call = f"{name} = gshard.shard_by_path({name}, {{"
            statements[name] = [call, *(f"    {row}," for row in rows), "})"] if rows[1:] else [f"{call}{rows[0]}}})"]
        elif len({*own.values()}) == 1:
            statements[name] = [f"{name} = gshard.{call[:-1]}, paths={json.dumps([*patterns], ensure_ascii=False)})"]
        left -= {values[path] for path in own} if name in statements else set()
    return statements, left


def _patterns(texts: Mapping[str, str], values: Mapping[str, Value]) -> dict[str, str] | None:
    """Patterns that give each path its text and match no other path; None if there are none."""
    words = {path: tuple(path.split("/")) for path in values}
    folded = equal_layers({words[path]: (v.shape, v.dtype, texts.get(path)) for path, v in values.items()})
    alike = {"/".join(folded.get(words[path], words[path])): text for path, text in texts.items()}
    for candidate in (alike, dict(texts)):
        first_match = {path: next((p for p in candidate if is_below(p, path)), "") for path in values}
        if all(candidate.get(p) == texts.get(path) for path, p in first_match.items()):
            return candidate
    return None
