"""Writes marks on arguments as statements, one for each parameter.

An array gets a mark of its own, ``x = gshard.shard(x, P("data"))``. Arrays of a pytree get patterns of their paths, so
that equal layers need one pattern, and a weight and its moments in Adam too:
``state = gshard.shard_by_path(state, {"**/blocks/*/up/kernel": P("data")})``. So do stages of a pipeline:
``state = gshard.pipeline(state, "stage", micro_batches=8, paths=["params/layers"])``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from gshard.core.mark import text_of_spec
from gshard.core.mesh import Mesh
from gshard.core.paths import is_below
from gshard.core.pipeline_schedule import Schedule
from gshard.core.program import Value
from gshard.core.sharding import Sharding
from gshard.naming.short_names import equal_layers
from gshard.planning.added_marks import spec_of_cut

_WIDE = 100  # columns; a longer statement is written on several lines
_END = 2  # the last words of patterns that become one: a layer and its weight


def argument_marks(
    marks: Mapping[Value, Sharding], inputs: Sequence[Value], paths: Sequence[str], mesh: Mesh
) -> tuple[dict[str, str], set[Value]]:
    """Writes the statements."""
    statements, written = {}, set()
    for parameter, values in _by_parameter(inputs, paths).items():
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
        written |= {values[path] for path in specs}
    return statements, set(marks) - written


def pipeline_statements(
    schedules: Mapping[Value, Schedule], inputs: Sequence[Value], paths: Sequence[str]
) -> tuple[dict[str, str], list[str]]:
    """Writes the statements that make arguments stages of pipelines."""
    statements, by_hand = dict[str, str](), list[str]()
    for parameter, values in _by_parameter(inputs, paths).items():
        calls = {path: str(schedules[v]) for path, v in values.items() if v in schedules}
        if not calls:
            continue
        call = next(iter(calls.values())).replace("(x,", f"({parameter},", 1).replace("'", '"')
        patterns = None if "" in values else _patterns(calls, values)
        if parameter.isidentifier() and len(set(calls.values())) == 1 and ("" in values or patterns is not None):
            chosen = f", paths={json.dumps(list(patterns), ensure_ascii=False)})" if patterns else ")"
            statements[parameter] = f"{parameter} = gshard.{call[:-1]}{chosen}"
        else:
            by_hand += [f"gshard.{text} with x = {parameter}/{path}" for path, text in calls.items()]
    return statements, by_hand


def _by_parameter(inputs: Sequence[Value], paths: Sequence[str]) -> dict[str, dict[str, Value]]:
    """For each parameter its arrays, by their paths inside of it."""
    of_parameter: dict[str, dict[str, Value]] = {}
    for v, path in zip(inputs, paths, strict=bool(paths)):
        parameter, _, below = path.partition("/")
        of_parameter.setdefault(parameter, {})[below] = v
    return of_parameter


def _text(sharding: Sharding, mesh: Mesh) -> str:
    spec = spec_of_cut(sharding, mesh)
    return "" if spec is None else text_of_spec(spec if sharding.atoms else ()).replace("'", '"')


def _patterns(specs: Mapping[str, str], values: Mapping[str, Value]) -> dict[str, str] | None:
    """Patterns that give each path its spec and match no other path; None if there are none."""
    parts = {path: tuple(f"[{w}]" if w.isdecimal() else w for w in path.split("/")) for path in values}
    pattern_words = equal_layers({parts[path]: (v.shape, v.dtype, specs.get(path)) for path, v in values.items()})
    patterns: dict[str, str] = {}
    for path, spec in specs.items():
        words = pattern_words.get(parts[path], parts[path])
        patterns.setdefault("/".join(word.strip("[]") for word in words), spec)
    ends = {path.rpartition("/")[2] for path in values}
    common_end = f"/{next(iter(ends))}" if len(ends) == 1 and len(values) > 1 else ""  # a pattern is for all below it
    shorter = {pattern.removesuffix(common_end): spec for pattern, spec in patterns.items()}
    for candidate in (_folded(shorter, specs, values), shorter, patterns, dict(specs)):
        first_match = {path: next((p for p in candidate if is_below(p, path)), None) for path in values}
        if all((None if p is None else candidate[p]) == specs.get(path) for path, p in first_match.items()):
            return candidate
    return None


def _folded(patterns: Mapping[str, str], specs: Mapping[str, str], paths: Iterable[str]) -> dict[str, str]:
    """Patterns with the same spec and the same end as one, such as those of a weight and of its moments in Adam."""
    by_end: dict[tuple[tuple[str, ...], str], list[tuple[str, ...]]] = {}
    for pattern, spec in patterns.items():
        words = tuple(pattern.split("/"))
        by_end.setdefault((words[-_END:], spec), []).append(words)
    folded: dict[str, str] = {}
    for (_, spec), alike in by_end.items():
        shortest = min(map(len, alike))
        size = next((n for n in range(shortest, 0, -1) if len({words[-n:] for words in alike}) == 1), 0)
        end = f"**/{'/'.join(alike[0][-size:])}"
        if len(alike) > 1 and size and all(specs.get(path) == spec for path in paths if is_below(end, path)):
            folded[end] = spec
        else:
            folded.update({"/".join(words): spec for words in alike})
    return folded
