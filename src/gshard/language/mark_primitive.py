"""Defines marks, names and inspections as primitives: identities. Marks and names survive JAX's transformations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import jet
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from gshard.core.jax_adapter import without_axes_of_dim
from gshard.core.layout import Names
from gshard.core.mark import Mark

mark_p = Primitive("gshard_mark")
name_p = Primitive("gshard_name")  # tracing.trace converts it to a mark by a layout


def bind_mark(x: Any, mark: Mark) -> Any:
    """Puts a mark on one array."""
    return mark_p.bind(jax.numpy.asarray(x), mark=mark)


def bind_names(x: Any, names: Names) -> Any:
    """Names the dimensions of one array."""
    return name_p.bind(jax.numpy.asarray(x), mark=names)


def _define_identity(primitive: Primitive) -> None:
    """Defines an identity with a parameter ``mark``: on one device, in derivatives, also on cotangents, under vmap."""

    def impl(x: Any, *, mark: Mark | Names) -> Any:
        return x

    def typed(x: Any, *, mark: Mark | Names) -> Any:
        """A stack of layers has no sharding of its layers in its type, since JAX refuses loops over such stacks."""
        return without_axes_of_dim(x, 0) if isinstance(mark, Mark) and mark.schedule is not None else x

    def transposed(ct: Any, x: Any, *, mark: Mark | Names) -> list[Any]:
        if not isinstance(mark, Mark):
            return [primitive.bind(ct, mark=mark)]
        cotangent = primitive.bind(ct, mark=mark.transposed)
        if mark.schedule is None or without_axes_of_dim(x.aval, 0) is x.aval:
            return [cotangent]
        return [jax.sharding.reshard(cotangent, x.aval.sharding)]

    def batched(args: Sequence[Any], dims: Sequence[int], *, mark: Mark | Names) -> tuple[Any, int]:
        """The mark leaves the dimension that vmap adds open."""
        return primitive.bind(args[0], mark=mark.with_batch_dimension(dims[0])), dims[0]

    primitive.def_impl(impl)
    primitive.def_abstract_eval(typed)
    mlir.register_lowering(primitive, lambda ctx, x, *, mark: [x])
    ad.deflinear2(primitive, transposed)
    batching.primitive_batchers[primitive] = batched
    jet.deflinear(primitive)


_define_identity(mark_p)
_define_identity(name_p)
