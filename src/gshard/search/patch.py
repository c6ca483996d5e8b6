"""The diff of a plan: writes the marks of arguments into the user's source file, for ``git apply``.

They stand in front of a function's first statement, by paths for a pytree. Others are printed with their line in front
of the diff, in lines that begin with ``#``.
"""

from __future__ import annotations

import ast
import difflib
import json
import os
from collections.abc import Mapping, Sequence
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
    inputs, left = program.block.inputs[len(program.captured) :], [*notes]
    cuts = {v: s for mark in marks for v, s in mark.shardings.items() if v in inputs}
    specs = {v: spec_of_cut(s, mesh) if s.atoms else PartitionSpec() for v, s in cuts.items()}
    texts = {v: f"shard(x, jax.{text_of_spec(spec)})" for v, spec in specs.items() if spec is not None}
    stages = {inputs[i]: str(schedule) for i, schedule in schedules_of(program).items()}
    (staged, by_hand), (marked, unsaid) = (argument_statements(of, inputs, paths) for of in (stages, texts))
    rows = [row for name in {**staged, **marked} for of in (staged, marked) for row in of.get(name, ())]
    diff = _diff(*defined, {*staged, *marked}, rows) if rows and defined else None
    if rows and diff is None:
        left.append(f"{program.name} is in no file, or not in this form: write in front of its first statement")
        left += [f"  {row}" for row in rows]
    names = dict(zip(program.block.inputs, program.names, strict=True))
    left += [f"gshard.{stages[v]} with x = {names[v]}: not written, do it by hand" for v in stages if v in by_hand]
    for mark in marks:
        if any(v not in texts or v in unsaid for v in mark.shardings):
            left.append(f"{mark.text} {mark.at}: not written, do it by hand")
    return "\n".join([*(f"# {line}" for line in left), *(diff or ())]) + "\n"


def _diff(path: str, line: int, parameters: set[str], rows: Sequence[str]) -> list[str] | None:
    """The diff of a file: statements in front of the first of the function at a line; None if it is in another form."""
    text = Path(path).read_text("utf-8") if Path(path).is_file() else ""
    lines, tree = text.splitlines(), ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and _first_line(node) == line:
            arguments = {a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
            first = node.body[1 if ast.get_docstring(node) is not None and len(node.body) > 1 else 0]
            number, indent = _first_line(first) - 1, first.col_offset
            if parameters <= arguments and not lines[number].encode()[:indent].strip():
                break
    else:
        return None
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    bound = {a.asname or a.name.partition(".")[0] for node in imports for a in node.names}
    needed = [f"import {name}" for name in ("gshard", "jax") if f"{name}." in str(rows) and name not in bound]
    before = [*(tree.body[:1] if ast.get_docstring(tree) else ()), *imports]
    place = max((node.end_lineno or 0 for node in before if node.lineno <= number), default=0)
    added = [" " * indent + row for row in rows]
    changed = [*lines[:place], *needed, *lines[place:number], *added, *lines[number:]]
    shown = path.lstrip("/") if (near := os.path.relpath(path)).startswith("..") else near
    return list(difflib.unified_diff(lines, changed, f"a/{shown}", f"b/{shown}", lineterm=""))


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
