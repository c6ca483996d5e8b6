"""The mark of separate layers that run as a pipeline.

for w in layers:
    x = gshard.stage(layer, "stage", micro_batches=8)(x, w)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from gshard.api.pipeline_mark import schedule_of
from gshard.core.errors import ShardingError
from gshard.core.jax_adapter import is_tracing, user_line
from gshard.core.keywords import keywords
from gshard.core.pipeline_schedule import Schedule
from gshard.language.stage_primitive import STAGE, stage_p

P = ParamSpec("P")
R = TypeVar("R")


@keywords("Write stage(layer, 'stage', micro_batches=8)(x, weights).")
def stage(
    f: Callable[P, R],
    over: int | str | Sequence[str],
    *,
    micro_batches: int,
    rounds: int = 1,
) -> Callable[P, R]:
    """Makes a function one of the layers of a pipeline. Layers follow each other without a loop in the program.

    Under ``gshard.jit`` a chain of calls becomes a loop over stacked operands, which runs as a pipeline as of
    ``gshard.pipeline``: what a call reads of the one before it is handed on, what all calls read is shared, and all
    other operands, such as the weights, are stacked. Between the steps weights stay separate arrays. Outside of gshard
    the calls are calls of ``jax.jit``, or of ``f`` itself if JAX does not trace.

    All calls of a chain must have the same operations and shapes, and each must read a result of the one before it
    directly. A layer must compute each row of the batch alone.

    Args:
        f: a function of pytrees, such as a layer; also a bound method, or a module of Flax NNX or Equinox with its own
            weights. Give it ``jax.checkpoint(layer)``, not the other way round. Its arguments that are no arrays stay
            as they are.
        over, micro_batches, rounds: as of ``pipeline``.

    Returns:
        a function with the arguments and results of ``f``.

    Raises:
        ShardingError: ``f`` cannot be called, or a number is no positive integer. When it is called: ``f`` returns no
            array. When a program is planned: a call has no equal call before or after it, or reads what is computed
            from an earlier one outside of the calls; or as of ``pipeline``.

    >>> import jax.numpy as jnp
    >>> x = jnp.ones((8, 3))
    >>> for w in (jnp.eye(3), 2 * jnp.eye(3)):
    ...     x = stage(jnp.dot, "stage", micro_batches=2)(x, w)
    >>> x.sum().tolist()
    48.0
    """
    call = f"stage(f, {over!r}, micro_batches={micro_batches!r})"
    hint = "Write stage(layer, 'stage', micro_batches=8)(x, weights)."
    if not callable(f):
        raise ShardingError(f"a stage is a function, not {type(f).__name__}.", user_line(), call, hint)
    found = schedule_of(over, micro_batches, rounds, call, hint)

    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        if not is_tracing():
            return f(*args, **kwargs)
        leaves, tree = jax.tree.flatten((args, kwargs))
        arrays = {i: x for i, x in enumerate(leaves) if isinstance(x, jax.Array | np.ndarray)}

        def staged(arrays: dict[int, Any]) -> Any:
            own_args, own_kwargs = jax.tree.unflatten(tree, [arrays.get(i, x) for i, x in enumerate(leaves)])
            return _marked(f(*own_args, **own_kwargs), found)

        staged.__name__ = STAGE
        return _marked(jax.jit(staged)(_marked(arrays, None)), None)  # type: ignore[no-any-return]

    return functools.update_wrapper(called, f, updated=())


def _marked(x: Any, schedule: Schedule | None) -> Any:
    """The pytree with its arrays of floats, or all of its arrays if there are none, through ``stage_p``."""
    leaves, tree = jax.tree.flatten(x)
    arrays = {i: y for i, y in enumerate(leaves) if isinstance(y, jax.Array | np.ndarray)}
    floats = {i: y for i, y in arrays.items() if jnp.issubdtype(y.dtype, jnp.inexact)}
    if not arrays:
        hint = "A stage reads what the one before it returns."
        raise ShardingError("a stage without arrays as arguments and results.", user_line(), str(schedule), hint)
    chosen = floats or arrays
    made = dict(zip(chosen, stage_p.bind(*chosen.values(), schedule=schedule), strict=True))
    return jax.tree.unflatten(tree, [made.get(i, y) for i, y in enumerate(leaves)])
