"""The one module that touches JAX names outside its public interface.

Everything here hides a difference between the JAX versions we support (0.10.2 and newer) or reads
something JAX offers no public door to (the user's source line).
"""

from __future__ import annotations

from typing import Any

from jax._src import source_info_util as _source_info_util
from jax.extend import source_info_util as _public_source_info

# Frames inside the library are not the user's: an error or a report names the line that called us.
_public_source_info.register_exclusion(__file__.rsplit("/core/", 1)[0])


def user_line(source_info: Any = None) -> str:
    """The user's ``file:line (function)`` of an equation, or of the call under way.

    Args:
        source_info: an equation's ``source_info``; None means the current call stack.

    Returns:
        text such as ``train.py:41 (loss)``, or an empty string if JAX kept no line.
    """
    info = source_info if source_info is not None else _source_info_util.current()
    frame = _source_info_util.user_frame(info.traceback)
    if frame is None:
        return ""
    return f"{frame.file_name.rsplit('/', 1)[-1]}:{frame.start_line} ({frame.function_name})"
