"""Finds marks without effect, in all calls of their source line.

    gshard.split(x, 0, "data")                               # nothing reads the result
    gshard.split(gshard.split(x, 0, "data"), 1, "model")     # the second split makes dimension 0 whole again

gshard finds them in JAX's jaxpr, before it removes dead code. A line is not reported if its mark has an effect in one
of its calls, in a derivative, or for another leaf of the pytree.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from gshard.core.jax_adapter import closed, sub_jaxprs, user_line
from gshard.core.mark import Mark
from gshard.language.mark_primitive import mark_p, name_p


def unread_marks(whole: Any) -> tuple[str, ...]:
    """A text for each source line of a jaxpr with marks whose results nothing reads, or only a mark that undoes it."""
    found: dict[tuple[str, str], str] = {}
    for line, text, why in _marks(closed(whole)[0], set()):
        found[line, text] = why and found.get((line, text), why)
    return tuple(f"{line}: {why}" for (line, _), why in found.items() if line and why)


def _marks(jaxpr: Any, seen: set[int]) -> Iterator[tuple[str, str, str]]:
    """For each mark its line, its text, and why it has no effect, if it has none. Each body is visited once."""
    readers: dict[int, list[Any]] = defaultdict(list)
    for reader, values in ((None, jaxpr.outvars), *((eqn, eqn.invars) for eqn in jaxpr.eqns)):
        for v in values:
            readers[id(v)].append(reader)
    for eqn in jaxpr.eqns:
        if eqn.primitive in (mark_p, name_p):
            mark = eqn.params["mark"]
            text = str(mark) if isinstance(mark, Mark) else f"name(x, {str(mark)!r})"
            yield user_line(eqn.source_info), text, _without_effect(mark, text, readers[id(eqn.outvars[0])])
        for inner in sub_jaxprs(eqn.params):
            if id(inner) not in seen:
                seen.add(id(inner))
                yield from _marks(closed(inner)[0], seen)


def _without_effect(mark: Any, text: str, readers: list[Any]) -> str:
    """Why a mark has no effect; an empty string if it has one."""
    if not readers:
        return f"nothing reads the result of {text}: write x = {text}, or leave it out"
    if len(readers) > 1 or readers[0] is None or readers[0].primitive is not mark_p:
        return ""
    after, axes = readers[0].params["mark"], [_axes_of_split(m) for m in (mark, readers[0].params["mark"])]
    if not all(axes) or mark.dim == after.dim or set(axes[0]) & set(axes[1]):
        return ""  # to move an axis to another dimension is a reshard
    both = dict(sorted([(mark.dim, mark.partitions), (after.dim, after.partitions)]))
    return f"{after} makes dimension {mark.dim} of {text} whole again: write split(x, {both})"


def _axes_of_split(mark: Any) -> tuple[str, ...]:
    if not isinstance(mark, Mark) or mark.kind != "split" or isinstance(mark.partitions, int):
        return ()
    return (mark.partitions,) if isinstance(mark.partitions, str) else mark.partitions
