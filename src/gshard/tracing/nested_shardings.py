"""Converts the shardings of a nested ``jax.jit`` to marks on its operands and results.

    init = jax.jit(lambda k: jax.random.normal(k, (1024, 512)), out_shardings=NamedSharding(mesh, P("data")))
    gshard.jit(lambda k: init(k) ** 2, mesh=mesh)        # as if the result of init were marked: shard(x, P("data"))

``in_shardings`` become marks on the operands, and ``out_shardings`` become marks on the results, like
``jax.lax.with_sharding_constraint`` in the same places. JAX transforms the shardings with the call: a derivative has
them for tangents and cotangents, and a mapped call has them with one more dimension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from gshard.core.errors import ShardingError
from gshard.core.jax_adapter import shapes_of, user_line
from gshard.core.jax_adapter_given import bound_without_shardings, has_default_layout
from gshard.language.mark_primitive import bind_mark
from gshard.tracing.expand import mark_of_any_sharding


def with_shardings_as_marks(primitive: Any, params: Mapping[str, Any], in_avals: Sequence[Any]) -> Any | None:
    """The closed jaxpr of a call of ``jit`` with marks instead of shardings; None for other equations."""
    if primitive.name not in ("jit", "pjit"):
        return None
    _refuse_layouts(params, in_avals)
    shardings_of = {name: params[name] for name in ("in_shardings", "out_shardings")}
    if not any(isinstance(s, jax.sharding.Sharding) for shardings in shardings_of.values() for s in shardings):
        return None

    def marked(name: str, arrays: Sequence[Any]) -> list[Any]:
        results = list(arrays)
        for i, (x, sharding) in enumerate(zip(arrays, shardings_of[name], strict=True)):
            if isinstance(sharding, jax.sharding.Sharding):
                mark = mark_of_any_sharding(sharding, x.shape, f"{name}[{i}] of {params['name']}")
                results[i] = bind_mark(x, mark)
        return results

    def called(*arrays: Any) -> list[Any]:
        return marked("out_shardings", bound_without_shardings(primitive, params, marked("in_shardings", arrays)))

    return jax.make_jaxpr(called)(*shapes_of(in_avals))


def _refuse_layouts(params: Mapping[str, Any], in_avals: Sequence[Any]) -> None:
    for side, avals in (("in", in_avals), ("out", params["jaxpr"].out_avals)):
        arguments = zip(params[f"{side}_layouts"], params[f"{side}_shardings"], avals, strict=True)
        for i, (layout, sharding, aval) in enumerate(arguments):
            if layout is None or has_default_layout(layout, sharding, aval):
                continue
            raise ShardingError(
                f"{side}_shardings[{i}] of {params['name']} has a layout in memory, which gshard does not keep.",
                user_line(),
                f"{layout}",
                "Give the sharding without jax.experimental.layout.Format.",
            )
