"""Exported patch: writes a plan for ``jax.jit`` into the user's source files as a unified diff.

    -@jax.jit
    +@jax.jit(in_shardings=(P(None, "model"), P("data")), out_shardings=P("data"))
     def step(w, x):
         h = x @ w
    +    h = jax.lax.with_sharding_constraint(h, P("data", "model"))

What is written is what was compiled: the program is compiled with the constraints and shardings of results that the
patch has, and what it leaves out is listed in front.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from gshard.core.memory_kinds import DEVICE
from gshard.core.paths import path_inside
from gshard.search.as_marks import FoundMark
from gshard.search.patch import Patch
from gshard.xla_programs.exported_arguments import ExportedArgument
from gshard.xla_programs.marks_as_constraints import constrained, constraint_text
from gshard.xla_programs.plan_compiler import PlanCompiler, mesh_text, spec_text, worse_text

_WIDE = 80  # columns of a literal in one line


def exported_patch(
    made: PlanCompiler,
    arguments: Sequence[ExportedArgument],
    in_shardings: Any,
    out_shardings: Any,
    constraints: Sequence[FoundMark],
) -> str:
    """The diff, behind notes in lines that begin with ``#``.

    Args:
        made: compiles the program.
        arguments: the arrays that it takes.
        in_shardings, out_shardings: specs in the structure of positional arguments and of results.
        constraints: on values inside.
    """
    program, function = made.program, made.found.function
    defined = None if function is None else function.defined
    positional = in_shardings if isinstance(in_shardings, tuple) else tuple(in_shardings)
    parameters = _by_parameter(made, arguments)
    kinds = [program.output_memory(i) for i in range(len(program.block.outputs))]
    # jax.jit takes no in_shardings where an argument is given by keyword.
    by_keyword = any(a.input - len(program.captured) >= len(_specs(positional)) for a in arguments)
    texts: list[str | None] = []
    statements: dict[str, str] = {}
    notes: list[str] = []
    for (parameter, rows), spec in zip(parameters.items(), [*positional, *[None] * len(parameters)], strict=False):
        literal = None if by_keyword or any(a.memory != DEVICE for a in rows) else _literal(spec)
        if literal is None:
            if any(a.memory == DEVICE for a in rows):
                statements[parameter] = _constrained(made, parameter, rows)
            notes.append(f"place the arrays of {parameter} before a call: in_shardings cannot describe them")
        texts.append(literal)
    if by_keyword:
        notes.append("jax.jit takes no in_shardings for a call with arguments by keyword: constraints are inside")
    keywords = {} if not any(texts) else {"in_shardings": _row([text or "None" for text in texts])}
    outs, unsaid = _results(out_shardings, kinds)
    if outs is not None:
        keywords["out_shardings"] = outs
    if unsaid:
        notes.append(f"out_shardings leave {', '.join(unsaid)} to XLA: no Python literal describes them")
    patch = Patch(program)
    left = patch.jit(defined, keywords) if keywords else []
    left += patch.begin(defined, statements)
    written: list[FoundMark] = []
    for mark in constraints:
        if patch.mark(mark.shardings, constraint_text(mark)):
            written.append(mark)
        else:
            left.append(f"{constraint_text(mark)} {mark.at}: not written, do it by hand")
    return patch.text([*_checked(made, written, unsaid, out_shardings), *notes, *left])


def _checked(
    made: PlanCompiler, written: Sequence[FoundMark], unsaid: Sequence[str], out_shardings: Any
) -> Iterator[str]:
    """What XLA sends with what is written, after compiling it."""
    function = constrained(made, written)
    assert function is not None, "all of them were compiled together"
    paths = [path for path, _ in _paths(out_shardings)]
    outs = [None if _is_under(path, unsaid) else s for path, s in zip(paths, made.outs, strict=True)]
    found = made.compiled(function, outs=outs)
    yield f"call it under: with jax.set_mesh({mesh_text(made.mesh.axes)}):"
    yield f"with arguments placed so, {made.told(found)}"
    yield from made.rewritten
    yield from worse_text(made.worse(found))


def _by_parameter(made: PlanCompiler, arguments: Sequence[ExportedArgument]) -> dict[str, list[ExportedArgument]]:
    """The arrays of each parameter, those without arrays too, in the order of ``in_shardings``."""
    positional, _ = jax.tree.unflatten(made.found.in_tree, range(made.found.in_tree.num_leaves))
    found: dict[str, list[ExportedArgument]] = {}
    first = len(made.program.captured)
    own = {a.input - first: a for a in arguments}
    for number, part in enumerate(positional):
        rows = [own.pop(i) for i in jax.tree.leaves(part)]
        found[rows[0].path.partition("/")[0] if rows else f"args[{number}]"] = rows
    for a in own.values():
        found.setdefault(a.path.partition("/")[0], []).append(a)
    return found


def _constrained(made: PlanCompiler, parameter: str, rows: Sequence[ExportedArgument]) -> str:
    """A statement that constrains all arrays of a parameter; those in the memory of the host stay as they come."""
    call = "jax.lax.with_sharding_constraint"
    on_device = {a: spec_text(a.spec) for a in rows if a.memory == DEVICE}
    keys = _keys(made)
    if len(rows) == 1 and keys[rows[0].input] == "":
        return f"{parameter} = {call}({parameter}, {on_device[rows[0]]})"
    specs = {json.dumps(keys[a.input], ensure_ascii=False): text for a, text in on_device.items()}
    table = "".join(f"\n    {key}: {text}," for key, text in specs.items())
    path = 'jax.tree_util.keystr(path, simple=True, separator="/")'
    if len(on_device) == len(rows):
        place = f"lambda path, x: {call}(x, {parameter}_specs[{path}])"
    else:
        place = f"lambda path, x: {call}(x, {parameter}_specs[{path}]) if {path} in {parameter}_specs else x"
    return (
        f"{parameter}_specs = {{{table}\n}}\n{parameter} = jax.tree_util.tree_map_with_path(\n    {place},\n"
        f"    {parameter},\n)"
    )


def _keys(made: PlanCompiler) -> dict[int, str]:
    """The path of each input below its parameter, as ``keystr(path, simple=True, separator="/")`` writes it."""
    tree, first = made.found.in_tree, len(made.program.captured)
    paths, _ = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(tree, range(tree.num_leaves)))
    return {first + i: jax.tree_util.keystr(keys[2:], simple=True, separator="/") for keys, i in paths}


def _results(out_shardings: Any, kinds: Sequence[str]) -> tuple[str | None, list[str]]:
    """``out_shardings`` as source text, and the paths of results that it leaves open."""
    whole = _literal(out_shardings) if all(kind == DEVICE for kind in kinds) else None
    if whole is not None:
        return whole, []
    if type(out_shardings) is not tuple:
        return None, [path for path, _ in _paths(out_shardings)]
    texts, unsaid, i = [], [], 0
    for number, part in enumerate(out_shardings):
        size = len(_specs(part))
        text = _literal(part) if all(kind == DEVICE for kind in kinds[i : i + size]) else None
        texts.append(text or "None")
        unsaid += [] if text else [f"result {number}"] * bool(size)
        i += size
    return (_row(texts) if any(text != "None" for text in texts) else None), unsaid


def _is_under(path: str, unsaid: Sequence[str]) -> bool:
    return any(path == one or path.startswith(f"{one}/") for one in unsaid)


def _paths(out_shardings: Any) -> list[tuple[str, Any]]:
    found, _ = jax.tree_util.tree_flatten_with_path(out_shardings, is_leaf=_is_spec)
    return [(f"result {path_inside(keys)}".strip(), spec) for keys, spec in found]


def _literal(tree: Any) -> str | None:
    """Specs as source text, one for a part that is split alike; None if a node is none of Python's own containers."""
    flat = {spec_text(spec) for spec in _specs(tree)}
    if len(flat) == 1:
        return flat.pop()
    if not flat:
        return "None"
    made: list[str | None]
    if type(tree) is dict and all(isinstance(key, str | int) for key in tree):
        made = [_literal(part) for part in tree.values()]
        rows = [
            f"{json.dumps(k, ensure_ascii=False) if isinstance(k, str) else k}: {t}"
            for k, t in zip(tree, made, strict=True)
        ]
        return None if None in made else _joined("{", rows, "}")
    if type(tree) in (list, tuple):
        made = [_literal(part) for part in tree]
        texts = [text for text in made if text is not None]
        if len(texts) < len(made):
            return None
        return _joined("[", texts, "]") if type(tree) is list else _row(texts)
    return None


def _row(texts: Sequence[str]) -> str:
    return f"({texts[0]},)" if len(texts) == 1 else _joined("(", texts, ")")


def _joined(begin: str, rows: Sequence[str], end: str) -> str:
    short = f"{begin}{', '.join(rows)}{end}"
    if len(short) <= _WIDE and "\n" not in short:
        return short
    inner = "".join(f"    {line}\n" for row in rows for line in f"{row},".splitlines())
    return f"{begin}\n{inner}{end}"


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def _specs(tree: Any) -> list[PartitionSpec]:
    return jax.tree.leaves(tree, is_leaf=_is_spec)
