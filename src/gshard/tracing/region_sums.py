"""Moves the last sum over devices out of a ``shard_map``.

    shard_map(x -> psum(f(x), "a"), out_specs=P())    becomes
    reduce_sum(shard_map(x -> f(x)[None], out_specs=P("a")), 0)

The region returns the addends of all devices along ``a``. They are the parts of an array, so gshard plans the sum like
any other: a result that is split at once needs a reduce-scatter only. JAX ends a region with such a sum for the gradient
of an operand that every device of the region reads whole. A maximum or minimum leaves in the same way, and with each the
elementwise equations between it and the end of the body, such as the division of a mean.

A sum stays if another equation of the body reads it, or if the spec of the result names one of its axes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal
from jax.sharding import PartitionSpec

from gshard.core.jax_adapter import as_if_at, as_weak, bind, jaxpr_without_dead_code
from gshard.core.jax_adapter_context import context_of, in_context
from gshard.core.partition_spec import words_of
from gshard.language.per_device import IGNORED, axes_of, name_of, names_of
from gshard.language.traits import traits_of
from gshard.tracing.expand import REDUCERS, without_shardings


@dataclasses.dataclass(frozen=True)
class Ending:
    """The last equations of a region for one result.

    Attributes:
        total: the equation of the sum.
        after: the elementwise equations behind it.
        source: the position of the first result with the same addends.
    """

    total: Any
    after: tuple[Any, ...]
    source: int


@dataclasses.dataclass(frozen=True)
class WithoutSums:
    """A region without its last sums.

    Attributes:
        body: the jaxpr of the body. Where a sum has left, it returns the addends.
        out_specs: the specs of its results. Addends have a new first dimension.
        endings: for each result what has left; None for a result that the body still returns.
    """

    body: Any
    out_specs: tuple[Any, ...]
    endings: tuple[Ending | None, ...]

    def addends(self, results: Sequence[Any]) -> list[Any]:
        """The results of the body, addends with their new dimension."""
        return [x if end is None else jnp.expand_dims(x, 0) for x, end in zip(results, self.endings, strict=True)]

    def finished(self, arrays: Sequence[Any]) -> list[Any]:
        """The results of the whole region, from the results of the region without sums."""
        return [
            x if end is None else _finished(arrays[end.source], end)
            for x, end in zip(arrays, self.endings, strict=True)
        ]


def _finished(x: Any, end: Ending) -> Any:
    for eqn in (end.total, *end.after):
        with as_if_at(eqn.source_info), in_context(context_of(eqn)):
            if eqn is end.total:
                x = REDUCERS[name_of(eqn)](x, (0,))
            elif eqn.primitive.name not in IGNORED:
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
    return WithoutSums(
        jaxpr_without_dead_code(body.replace(outvars=returned)),
        tuple(
            spec if end is None else PartitionSpec(axes_of(end.total), *spec)
            for spec, end in zip(specs, endings, strict=True)
        ),
        tuple(endings),
    )


def _may_leave(total: Any, specs: Sequence[Any], manual: Collection[str], params: Mapping[str, Any]) -> bool:
    """Whether an equation is a sum over devices that may leave a region, whose results at the end have these specs."""
    axes = axes_of(total)
    if name_of(total) not in REDUCERS or len(total.invars) != 1 or total.params.get("axis_index_groups") is not None:
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
