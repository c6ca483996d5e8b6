"""Finds the sums over devices with which a ``shard_map`` ends, so that they can leave it.

JAX ends a region with such a sum for the gradient of an operand that every device of the region reads whole. Without
the sum, the region returns the addends: parts of an unreduced value, which gshard finishes as the program needs it. If
a mark splits the result at once, a reduce-scatter does. Maxima and minima over devices leave in the same way.
Elementwise equations between a sum and the end of the body, such as the division of a mean, leave with it.

A sum stays if another equation of the body reads it, or if the spec of its result names one of its axes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend.core import Literal

from gshard.core.jax_adapter import as_if_at, as_weak, bind, jaxpr_without_dead_code
from gshard.core.jax_adapter_context import context_of, in_context
from gshard.core.partition_spec import words_of
from gshard.language.per_device import IGNORED, axes_of, name_of, names_of
from gshard.language.traits import traits_of
from gshard.tracing.expand import without_shardings

_MONOIDS = {"psum": "add", "pmax": "max", "pmin": "min"}


@dataclasses.dataclass(frozen=True)
class Ending:
    """The last equations of a region for one result.

    Attributes:
        total: the equation of the sum.
        after: the elementwise equations behind it.
        source: the position of the first result that is computed from the sum.
    """

    total: Any
    after: tuple[Any, ...]
    source: int

    @property
    def monoid(self) -> str:
        """The monoid that combines the addends."""
        return _MONOIDS[name_of(self.total)]

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes over which addends are combined."""
        return axes_of(self.total)


@dataclasses.dataclass(frozen=True)
class WithoutSums:
    """A region without its last sums.

    Attributes:
        body: the jaxpr of the body. Where a sum has left, it returns the addends.
        endings: for each result what has left; None for a result that the body still returns.
    """

    body: Any
    endings: tuple[Ending | None, ...]

    def results(self, arrays: Sequence[Any], combine: Callable[[int, Any, Ending], Any]) -> list[Any]:
        """The results of the whole region.

        Args:
            arrays: the results of the region without sums.
            combine: combines addends: ``combine(i, addends, ending)`` for result ``i`` of the region.
        """
        combined: dict[int, Any] = {}
        results = []
        for x, end in zip(arrays, self.endings, strict=True):
            if end is not None:
                with _like(end.total):
                    if end.source not in combined:
                        combined[end.source] = combine(end.source, arrays[end.source], end)
                x = combined[end.source]
                for eqn in end.after:
                    with _like(eqn):
                        x = _applied(eqn, x)
            results.append(x)
        return results


@contextlib.contextmanager
def _like(eqn: Any) -> Iterator[None]:
    with as_if_at(eqn.source_info), in_context(context_of(eqn)):
        yield


def _applied(eqn: Any, x: Any) -> Any:
    """The result of an elementwise equation of one array."""
    if eqn.primitive.name in IGNORED:
        return x
    operands = [np.asarray(v.val, v.aval.dtype) if isinstance(v, Literal) else x for v in eqn.invars]
    (x,) = bind(eqn.primitive, without_shardings(eqn.primitive.name, eqn.params), operands)
    return as_weak(x, eqn.outvars[0].aval.weak_type)


def without_sums(params: Mapping[str, Any], manual: Collection[str]) -> WithoutSums | None:
    """A ``shard_map`` without its last sums; None if it ends with none.

    Args:
        params: its parameters.
        manual: the axes that become manual in it.
    """
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
        if total is not None and _may_leave(total, [specs[i] for i in positions], manual, params) and leaves(total):
            for i in positions:
                endings[i] = Ending(total, after[i], positions[0])
    if not any(endings):
        return None
    returned = [v if end is None else end.total.invars[0] for v, end in zip(body.outvars, endings, strict=True)]
    return WithoutSums(jaxpr_without_dead_code(body.replace(outvars=returned)), tuple(endings))


def _may_leave(total: Any, specs: Sequence[Any], manual: Collection[str], params: Mapping[str, Any]) -> bool:
    """Whether an equation is a sum over devices that may leave a region, whose results at the end have these specs."""
    axes = axes_of(total)
    if name_of(total) not in _MONOIDS or len(total.invars) != 1 or total.params.get("axis_index_groups") is not None:
        return False
    if not set(axes) <= set(manual) or math.prod(params["mesh"].shape[a] for a in axes) == 1:
        return False
    entries, others = words_of(specs[0])
    is_named = any(a in names_of(entry) for entry in entries for a in axes)
    return total.outvars[0].aval.dtype != bool and not (is_named or any(others.values()) or set(specs) - {specs[0]})


def _arrays(operands: Sequence[Any]) -> list[Any]:
    return [v for v in operands if not isinstance(v, Literal)]


def _is_elementwise(eqn: Any) -> bool:
    """Whether an equation changes each element of one array by itself."""
    name = eqn.primitive.name
    return (name in IGNORED or traits_of(name).elementwise) and len(_arrays(eqn.invars)) == 1 and len(eqn.outvars) == 1
