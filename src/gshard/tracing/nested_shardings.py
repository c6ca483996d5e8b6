"""Reads the shardings of a nested ``jax.jit`` as marks on its operands and results.

    init = jax.jit(lambda k: jax.random.normal(k, (1024, 512)), out_shardings=NamedSharding(mesh, P("data")))
    gshard.jit(lambda k: init(k) ** 2, mesh=mesh)        # as if the result of init were marked: shard(x, P("data"))

``in_shardings`` are marks on the operands as they enter, ``out_shardings`` marks on the results, as
``jax.lax.with_sharding_constraint`` in the same places. JAX transforms them with the call: a derivative has them for
its tangents and cotangents, a mapped call with one more dimension.
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
    """The closed jaxpr of a call of ``jit`` with marks in the place of its shardings; None for any other equation.

    Args:
        primitive: of the equation.
        params: its parameters.
        in_avals: the types of its operands.

    Raises:
        ShardingError: a sharding is not over the devices of a mesh, or comes with a layout in memory.
    """
    if primitive.name not in ("jit", "pjit"):
        return None
    _refuse_layouts(params, in_avals)
    given = {name: params[name] for name in ("in_shardings", "out_shardings")}
    if not any(isinstance(s, jax.sharding.Sharding) for shardings in given.values() for s in shardings):
        return None

    def marked(name: str, arrays: Sequence[Any]) -> list[Any]:
        said = zip(arrays, given[name], strict=True)
        return [
            bind_mark(x, mark_of_any_sharding(s, x.shape, f"{name}[{i}] of {params['name']}"))
            if isinstance(s, jax.sharding.Sharding)
            else x
            for i, (x, s) in enumerate(said)
        ]

    def called(*arrays: Any) -> list[Any]:
        return marked("out_shardings", bound_without_shardings(primitive, params, marked("in_shardings", arrays)))

    return jax.make_jaxpr(called)(*shapes_of(in_avals))


def _refuse_layouts(params: Mapping[str, Any], in_avals: Sequence[Any]) -> None:
    avals = {"in": in_avals, "out": params["jaxpr"].out_avals}
    for side, types in avals.items():
        given = zip(params[f"{side}_layouts"], params[f"{side}_shardings"], types, strict=True)
        for i, (layout, sharding, aval) in enumerate(given):
            if layout is None or has_default_layout(layout, sharding, aval):
                continue
            raise ShardingError(
                f"{side}_shardings[{i}] of {params['name']} has a layout in memory, which gshard does not keep.",
                user_line(),
                f"{layout}",
                "Give the sharding without jax.experimental.layout.Format.",
            )
