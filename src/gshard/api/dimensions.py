"""dimensions: finds the classes of equal dimensions of a function, and their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from gshard.api.jit import Jitted
from gshard.api.names import names_of_arguments, paths_of_arguments, with_names_of_arguments
from gshard.core.errors import ArgumentError
from gshard.core.jax_adapter_tracebacks import without_our_frames
from gshard.core.paths import positional_names
from gshard.naming.dimension_classes import Dimensions, dimensions_of
from gshard.tracing.trace import trace


@without_our_frames
def dimensions(f: Callable[..., Any], *args: Any, names: Any = None, **kwargs: Any) -> Dimensions:
    """Tells which dimensions of a function are the same one, without planning or running it.

    The names of a few arguments, or of a few values inside (``gshard.name``), so become names of all:
    ``found.arguments`` has them for every argument, as ``names=`` of ``jit`` takes them.

    Args:
        f: a function, or one that ``gshard.jit`` returned, whose ``names`` count where none are given here.
        args, kwargs: its arguments: arrays or ``jax.ShapeDtypeStruct``.
        names: what dimensions of arguments are called, as for ``jit``.

    Returns:
        the classes; print it.

    Raises:
        ShardingError, TraceError: as ``jit``.
        ArgumentError: ``names`` for a function that ``gshard.jit`` returned, which has its own.

    >>> import jax.numpy as jnp
    >>> f = lambda w1, w2, x: jnp.tanh(x @ w1) @ w2
    >>> w1, w2, x = jnp.zeros((8, 32)), jnp.zeros((32, 8)), jnp.zeros((4, 8))
    >>> found = dimensions(f, w1, w2, x, names={"w1": "embed hidden", "x": "batch _"})
    >>> print(found)
    dimensions of <lambda>: 4 classes
      hidden  32  4 values  w1.1, w2.0
      batch   4   4 values  x.0
      embed   8   2 values  w1.0, x.1
      a       8   2 values  w2.1
    >>> found.arguments
    {'w1': 'embed hidden', 'w2': 'hidden a', 'x': 'batch embed'}
    """
    if isinstance(f, Jitted):
        if names is not None:
            raise ArgumentError(
                "gshard.stages.dimensions takes names for a plain function only.",
                got=f"names={names!r}, for {f!r}",
                hint="Give them to gshard.jit, which made this function.",
            )
        lowered = f.lower(*args, **kwargs)
        program, tree = lowered.program, lowered.in_tree
    else:
        program, tree = trace(f, *args, **kwargs), jax.tree.structure((args, kwargs))
        said = names_of_arguments(positional_names(f, len(args)), names, args, kwargs)
        program = with_names_of_arguments(program, said, ())
    return dimensions_of(program, paths_of_arguments(program, tree))
