"""Library files: tells source files of libraries from the user's.

A layer of Flax is one line of Flax for all layers of a model; the line of the user's that calls it tells them apart.
"""

from __future__ import annotations

import os
import re

import jax

_FOLDERS = tuple(
    os.path.join(os.path.abspath(folder), "")
    for folder in (os.path.dirname(jax.__file__), os.path.dirname(os.path.dirname(__file__)))
)
_LIBRARIES = re.compile(r"[/\\](site|dist)-packages[/\\](chex|einops|equinox|flax|haiku|jaxtyping|optax|penzai)[/\\]")


def is_of_library(path: str) -> bool:
    """Whether a source file belongs to an installed library of layers or optimizers.

    >>> is_of_library("/env/site-packages/flax/linen/linear.py"), is_of_library("/elsewhere/flax/train.py")
    (True, False)
    """
    return _LIBRARIES.search(path) is not None


def is_of_jax_or_gshard(path: str) -> bool:
    """Whether a source file belongs to JAX or gshard, and not to a package whose name begins like theirs.

    >>> import jax
    >>> is_of_jax_or_gshard(jax.__file__), is_of_jax_or_gshard("/env/site-packages/jaxtyping/_array_types.py")
    (True, False)
    >>> is_of_jax_or_gshard(jax.__file__.replace("__init__", "_models/net").replace("jax/_models", "jax_models"))
    False
    """
    return path.startswith(_FOLDERS)
