"""Argument marks: writes marks on arguments as statements, one for each parameter.

An array is marked by itself, ``x = gshard.shard(x, P("data"))``; arrays of a pytree by patterns of their paths, which
say the same of equal layers once: ``state = gshard.shard_by_path(state, {"0/blocks/*/up/kernel": P("data")})``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from gshard.core.mesh import Mesh
from gshard.core.paths import is_below
from gshard.core.program import Value
from gshard.core.sharding import Sharding
from gshard.naming.short_names import equal_layers
from gshard.planning.added_marks import spec_of_cut

_WIDE = 100  # columns of a line


def argument_marks(
    marks: Mapping[Value, Sharding], inputs: Sequence[Value], paths: Sequence[str], mesh: Mesh
) -> tuple[dict[str, str], set[Value]]:
    """The statements, by parameter, and the values that none is about: those whose paths patterns cannot tell apart.

    Args:
        marks: how arguments are to be cut.
        inputs: all arguments;
        paths: and where they are.
        mesh: the devices.
    """
    of_parameter: dict[str, dict[str, Value]] = {}
    for v, path in zip(inputs, paths, strict=bool(paths)):
        parameter, _, below = path.partition("/")
        of_parameter.setdefault(parameter, {})[below] = v
    statements, said = {}, set()
    for parameter, values in of_parameter.items():
        specs = {path: spec for path, v in values.items() if v in marks and (spec := _text(marks[v], mesh))}
        if not specs or not parameter.isidentifier():
            continue
        if "" in values:
            statements[parameter] = f"{parameter} = gshard.shard({parameter}, {specs['']})"
        elif (patterns := _patterns(specs, values)) is not None:
            rows = [f"{json.dumps(pattern, ensure_ascii=False)}: {spec}" for pattern, spec in patterns.items()]
            call = f"{parameter} = gshard.shard_by_path({parameter}, {{"
            short = f"{call}{', '.join(rows)}}})"
            wide = "\n".join([call, *(f"    {row}," for row in rows), "})"])
            statements[parameter] = short if len(short) < _WIDE else wide
        else:
            continue
        said |= {values[path] for path in specs}
    return statements, set(marks) - said


def _text(sharding: Sharding, mesh: Mesh) -> str:
    spec = spec_of_cut(sharding, mesh)
    return "" if spec is None else f"P({', '.join(map(repr, spec)) if sharding.atoms else ''})".replace("'", '"')


def _patterns(specs: Mapping[str, str], values: Mapping[str, Value]) -> dict[str, str] | None:
    """Patterns that say of each path what is to be said, and nothing of others; None if there are none."""
    parts = {path: tuple(f"[{w}]" if w.isdecimal() else w for w in path.split("/")) for path in values}
    folded = equal_layers({parts[path]: (v.shape, v.dtype, specs.get(path)) for path, v in values.items()})
    patterns: dict[str, str] = {}
    for path, spec in specs.items():
        words = folded.get(parts[path], parts[path])
        patterns.setdefault("/".join(word.strip("[]") for word in words), spec)
    ends = {path.rpartition("/")[2] for path in values}
    boxed = f"/{next(iter(ends))}" if len(ends) == 1 and len(values) > 1 else ""  # a pattern is for all below it
    shorter = {pattern.removesuffix(boxed): spec for pattern, spec in patterns.items()}
    for found in (shorter, patterns, dict(specs)):
        first = {path: next((p for p in found if is_below(p, path)), None) for path in values}
        if all((None if p is None else found[p]) == specs.get(path) for path, p in first.items()):
            return found
    return None
