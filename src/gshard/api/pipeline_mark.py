"""The mark of layers that run as a pipeline.

stacked = gshard.pipeline(stacked, "stage", micro_batches=8)
x, _ = jax.lax.scan(layer, x, stacked)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from gshard.api.marks import arrays_of, arrays_text, marked, partitions_of, unused_pattern
from gshard.core.errors import ShardingError
from gshard.core.jax_adapter import user_line
from gshard.core.jax_adapter_tracebacks import without_our_frames
from gshard.core.mark import Schedule, mark_of_stack
from gshard.core.paths import is_below, path_inside

T = TypeVar("T")  # an array or a pytree of arrays
_HINT = "Write pipeline(stacked, 'stage', micro_batches=8)."


@without_our_frames
def pipeline(
    x: T,
    over: int | str | Sequence[str],
    *,
    micro_batches: int,
    rounds: int = 1,
    paths: str | Sequence[str] | None = None,
) -> T:
    """Marks layers as the stages of a pipeline.

    A loop ``jax.lax.scan(layer, x, stacked)`` over the marked stack runs as a pipeline on a mesh: each stage has
    ``layers / stages`` layers, the batch of the carry is cut into micro-batches, and all stages run at once, each on
    another micro-batch. The loop of the derivative is a pipeline in the other direction. Results are those of the
    loop, up to the order in which gradients of weights are added up. Outside of a mesh the mark is the identity.

    A layer must compute each row of the batch alone. The batch is the first dimension of the carry if the rows along it
    are independent, and otherwise the next dimension along which they are.

    Args:
        x: array ``[layers, ...]``, or pytree of such arrays, any dtypes. Of separate layers, equal pytrees, make one by
            ``jax.tree.map(lambda *w: jnp.stack(w), *layers)``: on a mesh one all-to-all moves the weights to their
            stages, and one moves the gradients back.
        over: the mesh axis of the stages, a tuple of axes, or a number of stages.
        micro_batches: their number. It divides the batch. A stage waits in ``stages - 1`` of
            ``micro_batches * rounds + stages - 1`` turns.
        rounds: how often each micro-batch passes all stages. The first stage has the first layers of each round, and
            so on. The mark leaves the stack open then, since a stage has layers that are apart.
        paths: patterns of paths as of ``shard_by_path``: only what they match is marked. None marks all of ``x``.

    Returns:
        the same values.

    Raises:
        ShardingError: an array has no layers, or the arrays have different numbers of them; a number is no positive
            integer; or a pattern matches nothing. When a program is planned: layers or rows
            are not divisible, or a layer mixes the rows of the batch.

    >>> import jax, jax.numpy as jnp
    >>> stacked = pipeline(jnp.stack([jnp.eye(3), 2 * jnp.eye(3)]), "stage", micro_batches=2)
    >>> jax.lax.scan(lambda x, w: (x @ w, None), jnp.ones((8, 3)), stacked)[0].sum().tolist()
    48.0
    """
    call = f"pipeline(x, {over!r}, micro_batches={micro_batches!r})"
    for word, number in (("micro_batches", micro_batches), ("rounds", rounds)):
        if not isinstance(number, int | np.integer) or isinstance(number, bool) or number < 1:
            raise ShardingError(f"{word} is a positive integer, not {number!r}.", user_line(), call, _HINT)
    schedule = Schedule(partitions_of(over, call), int(micro_batches), int(rounds))
    leaves = _matching(x, call, (paths,) if isinstance(paths, str) else paths)
    of_count = {array.shape[:1]: (name, array) for name, array in leaves if array is not None}
    if len(of_count) > 1 or () in of_count:
        what = "the arrays of a pipeline have one dimension of layers, and it comes first."
        hint = (
            "Mark only the stacks that one loop scans over, each with as many layers. Stack separate layers: "
            "jax.tree.map(lambda *w: jnp.stack(w), *layers)."
        )
        raise ShardingError(what, user_line(), f"{arrays_text([*of_count.values()])}; {call}", hint)
    marks = [None if x is None else mark_of_stack(schedule, x.ndim, name) for name, x in leaves]
    return marked(x, leaves, marks, None)  # type: ignore[no-any-return]


def _matching(x: Any, call: str, patterns: Sequence[str] | None) -> list[tuple[str, Any]]:
    """The leaves as of ``arrays_of``, with None for those that no pattern matches."""
    leaves = arrays_of(x, call)
    if patterns is None:
        return leaves
    paths = [path_inside(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(x)]
    for pattern in patterns:
        if not any(is_below(pattern, path) for path in paths):
            raise unused_pattern(pattern, paths)
    matches = [any(is_below(pattern, path) for pattern in patterns) for path in paths]
    return [(name, array if is_match else None) for (name, array), is_match in zip(leaves, matches, strict=True)]
