"""Runs Python's cycle collector less often while a program is traced, planned and partitioned.

These stages create some hundred thousand small objects, and nearly all of them stay alive. By default Python looks for
cycles after every 700 objects, and from time to time among all objects, including those of JAX. That took a third of
the time of these stages.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

# Number of new objects between two collections; a collection of so many takes some milliseconds.
_THRESHOLD = 50_000

_lock = threading.Lock()
_active_contexts = 0
_previous_threshold = 0


@contextlib.contextmanager
def collected_seldom() -> Iterator[None]:
    """Raises the threshold of the youngest generation, and restores it when the last thread leaves the context.

    This context manager is also a decorator. It does not change a higher threshold or a disabled collector.

    >>> with collected_seldom(), collected_seldom():
    ...     gc.get_threshold()[0] >= 50_000
    True
    """
    global _active_contexts, _previous_threshold
    with _lock:
        _active_contexts += 1
        if _active_contexts == 1:
            _previous_threshold = gc.get_threshold()[0]
            if 0 < _previous_threshold < _THRESHOLD:
                gc.set_threshold(_THRESHOLD)
    try:
        yield
    finally:
        with _lock:
            _active_contexts -= 1
            if _active_contexts == 0 and gc.get_threshold()[0] == _THRESHOLD:
                gc.set_threshold(_previous_threshold)
