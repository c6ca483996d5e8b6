"""Program memory: what a compiler reports of the memory of a compiled program."""

from __future__ import annotations

from typing import Any


def memory_figures(compiled: Any) -> dict[str, int] | None:
    """Bytes of ``arguments``, ``results``, ``shared`` (results in donated arguments) and ``temporaries``.

    Args:
        compiled: what ``jax.stages.Lowered.compile`` returns.

    Returns:
        the figures; None if the backend reports none.
    """
    found = compiled.memory_analysis()
    if found is None:
        return None
    return {
        "arguments": found.argument_size_in_bytes, "results": found.output_size_in_bytes,
        "shared": found.alias_size_in_bytes, "temporaries": found.temp_size_in_bytes,
    }  # fmt: skip
