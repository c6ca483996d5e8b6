"""Finds the sums over devices with which a ``shard_map`` ends, so that they can leave it.

JAX ends a region with such a sum for the gradient of an operand that every device of the region reads whole. Without
the sum, the region returns the addends: parts of an unreduced value, which gshard finishes as the program needs it. If
a mark splits the result at once, a reduce-scatter does. Elementwise equations between a sum and the end of the body,
such as the division of a mean, leave with it.

A sum stays if another equation of the body reads it, or if the spec of its result names one of its axes. Maxima stay,
because no collective scatters them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from gshard.core.jax_adapter import as_if_at, as_weak, bind, jaxpr_without_dead_code
from gshard.core.jax_adapter_context import context_of, in_context
from gshard.core.partition_spec import axes_of_entry, words_of
from gshard.language.per_device import IGNORED, summed_axes
from gshard.language.traits import traits_of
from gshard.tracing.expand import without_shardings


@dataclasses.dataclass(frozen=True)
class Ending:
    """The last equations of a region for one result."""

    total: Any  # the equation of the sum
    after: tuple[Any, ...]  # the elementwise equations behind it
    source: int  # the position of the first result that is computed from the sum

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes over which addends are added."""
        return summed_axes(self.total)


@dataclasses.dataclass(frozen=True)
class WithoutSums:
    """A region without its last sums."""

    body: Any  # the jaxpr of the body. Where a sum has left, it returns the addends.
    endings: tuple[Ending | None, ...]  # for each result what has left; None for a result that the body still returns

    def results(self, arrays: Sequence[Any], add: Callable[[int, Any, Ending], Any]) -> list[Any]:
        """The results of the whole region."""
        sums: dict[int, Any] = {}
        results = []
        for x, end in zip(arrays, self.endings, strict=True):
            if end is not None:
                if end.source not in sums:
                    with _like(end.total):
                        sums[end.source] = add(end.source, arrays[end.source], end)
                x = sums[end.source]
                for eqn in end.after:
                    with _like(eqn):
                        x = _applied(eqn, x)
            results.append(x)
        return results


@contextlib.contextmanager
def _like(eqn: Any) -> Iterator[None]:
    """Equations traced inside get the source line, the scopes and the context of another equation."""
    with as_if_at(eqn.source_info), in_context(context_of(eqn)):
        yield


def _applied(eqn: Any, x: Any) -> Any:
    """The result of an elementwise equation of one array."""
    if eqn.primitive.name in IGNORED:
        return x
    operands = [np.asarray(v.val, jax.typeof(v.val).dtype) if isinstance(v, Literal) else x for v in eqn.invars]
    (x,) = bind(eqn.primitive, without_shardings(eqn.primitive.name, eqn.params), operands)
    return as_weak(x, eqn.outvars[0].aval.weak_type)


def without_sums(params: Mapping[str, Any], manual: Collection[str]) -> WithoutSums | None:
    """A ``shard_map`` without its last sums; None if it ends with none."""
    body, specs = params["jaxpr"], params["out_specs"]
    made = {v: eqn for eqn in body.eqns for v in eqn.outvars}
    readers: dict[Any, list[Any]] = {}
    for eqn in body.eqns:
        for v in _arrays(eqn.invars):
            readers.setdefault(v, []).append(eqn)

    def leaves(eqn: Any) -> bool:
        return all(_is_elementwise(e) and leaves(e) for e in readers.get(eqn.outvars[0], ()))

    results: dict[Any, list[int]] = {}
    after: list[tuple[Any, ...]] = []
    for i, v in enumerate(body.outvars):
        chain: list[Any] = []
        while (made_by := made.get(v) if _arrays([v]) else None) is not None and _is_elementwise(made_by):
            chain.insert(0, made_by)
            (v,) = _arrays(made_by.invars)
        after.append(tuple(chain))
        results.setdefault(v if _arrays([v]) else i, []).append(i)
    endings: list[Ending | None] = [None] * len(specs)
    for v, positions in results.items():
        total = made.get(v)
        axes = () if total is None else summed_axes(total)
        if _may_leave(axes, [specs[i] for i in positions], manual, params["mesh"].shape) and leaves(total):
            for i in positions:
                endings[i] = Ending(total, after[i], positions[0])
    if not any(endings):
        return None
    returned = [v if end is None else end.total.invars[0] for v, end in zip(body.outvars, endings, strict=True)]
    return WithoutSums(jaxpr_without_dead_code(body.replace(outvars=returned)), tuple(endings))


def _may_leave(axes: Sequence[str], specs: Sequence[Any], manual: Collection[str], sizes: Mapping[str, int]) -> bool:
    """Whether a sum over some axes may leave a region, if the results that are computed from it have these specs."""
    if not set(axes) <= set(manual) or math.prod(sizes[a] for a in axes) == 1 or set(specs) != {specs[0]}:
        return False
    entries, others = words_of(specs[0])
    return not others and set(axes).isdisjoint(a for entry in entries for a in axes_of_entry(entry))


def _arrays(operands: Sequence[Any]) -> list[Any]:
    return [v for v in operands if not isinstance(v, Literal)]


def _is_elementwise(eqn: Any) -> bool:
    """Whether an equation changes each element of one array by itself. Its other operands are numbers."""
    name, shapes = eqn.primitive.name, [np.shape(v.val) for v in eqn.invars if isinstance(v, Literal)]
    is_of_one = len(_arrays(eqn.invars)) == len(eqn.outvars) == 1 and not any(shapes)
    return is_of_one and (name in IGNORED or traits_of(name).elementwise)
