"""The mark as a primitive: an identity that JAX's transformations carry along; the cotangent of a mark is a mark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from gshard.core.mark import Mark

mark_p = Primitive("gshard_mark")


def bind_mark(x: Any, mark: Mark) -> Any:
    """Puts a mark on one array."""
    return mark_p.bind(jax.numpy.asarray(x), mark=mark)


@mark_p.def_impl
def _impl(x: Any, *, mark: Mark) -> Any:
    return x


mark_p.def_abstract_eval(lambda x, *, mark: x)
mlir.register_lowering(mark_p, lambda ctx, x, *, mark: [x])
ad.deflinear2(mark_p, lambda ct, x, *, mark: [mark_p.bind(ct, mark=mark)])


def _batch(args: Sequence[Any], dims: Sequence[int], *, mark: Mark) -> tuple[Any, int]:
    """A dimension that vmap adds is left open: the mark speaks of the others only."""
    return mark_p.bind(args[0], mark=mark.with_batch_dimension(dims[0])), dims[0]


batching.primitive_batchers[mark_p] = _batch
