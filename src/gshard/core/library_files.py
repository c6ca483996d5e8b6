"""Library files: tells source files of libraries of layers and optimizers from the user's.

A layer of Flax is one line of Flax for all layers of a model; the line of the user's that calls it tells them apart.
"""

from __future__ import annotations

import re

_LIBRARIES = re.compile(r"[/\\](site|dist)-packages[/\\](chex|einops|equinox|flax|haiku|jaxtyping|optax|penzai)[/\\]")


def is_of_library(path: str) -> bool:
    """Whether a source file belongs to an installed library of layers or optimizers.

    >>> is_of_library("/env/site-packages/flax/linen/linear.py"), is_of_library("/elsewhere/flax/train.py")
    (True, False)
    """
    return _LIBRARIES.search(path) is not None
