"""Finds marks whose results nothing reads, in all calls of their source line.

    gshard.split(x, 0, "data")        # no effect: a mark applies to the value that it returns

gshard finds them in JAX's jaxpr, before it removes dead code. A line is not reported if the result of its mark is read
in one of its calls, in a derivative, or for another leaf of the pytree.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gshard.core.jax_adapter import closed, sub_jaxprs, user_line
from gshard.core.mark import Mark
from gshard.language.mark_primitive import mark_p, name_p


def unread_marks(whole: Any) -> tuple[str, ...]:
    """A text for each source line of a jaxpr with marks whose results nothing reads."""
    texts: dict[str, str] = {}
    read: set[str] = set()
    for line, mark, is_read in _marks(closed(whole)[0], set()):
        texts.setdefault(line, str(mark) if isinstance(mark, Mark) else f"name(x, {str(mark)!r})")
        if is_read:
            read.add(line)
    return tuple(
        f"{line}: nothing reads the result of {text}: write x = {text}, or leave it out"
        for line, text in texts.items()
        if line and line not in read
    )


def _marks(jaxpr: Any, seen: set[int]) -> Iterator[tuple[str, Any, bool]]:
    """For each mark its line, the mark, and whether its result is read. Each body is visited once."""
    read = {id(v) for v in jaxpr.outvars}
    read |= {id(v) for eqn in jaxpr.eqns for v in eqn.invars}
    for eqn in jaxpr.eqns:
        if eqn.primitive in (mark_p, name_p):
            yield user_line(eqn.source_info), eqn.params["mark"], id(eqn.outvars[0]) in read
        for inner in sub_jaxprs(eqn.params):
            if id(inner) not in seen:
                seen.add(id(inner))
                yield from _marks(closed(inner)[0], seen)
