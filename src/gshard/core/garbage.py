"""Runs Python's cycle collector less often while a program is traced, planned and partitioned.

These stages make some hundred thousand small objects; nearly all of them stay. Python would look for cycles after
every 700 of them, and now and then through everything there is, JAX's objects included: a third of the time went there.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

# Objects made between two looks; a look at so many takes some milliseconds.
_SELDOM = 50_000

_lock = threading.Lock()
_inside = 0
_usual = 0


@contextlib.contextmanager
def collected_seldom() -> Iterator[None]:
    """Raises the threshold of the youngest generation, and restores it when the last of all threads leaves.

    Also a decorator. A higher threshold, and a collector that is switched off, stay as they are.

    >>> with collected_seldom(), collected_seldom():
    ...     gc.get_threshold()[0] >= 50_000
    True
    """
    global _inside, _usual
    with _lock:
        _inside += 1
        if _inside == 1:
            _usual = gc.get_threshold()[0]
            if 0 < _usual < _SELDOM:
                gc.set_threshold(_SELDOM)
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0 and gc.get_threshold()[0] == _SELDOM:
                gc.set_threshold(_usual)
