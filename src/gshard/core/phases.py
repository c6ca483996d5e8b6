"""Logs the time of tracing, planning, partitioning and lowering, and runs the cycle collector less often in them."""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from gshard.core.errors import counted
from gshard.core.jax_adapter_dispatch import logs_compilations

# Runs Python's cycle collector less often while a program is traced, planned and partitioned.

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


_T = TypeVar("_T")

_log = logging.getLogger("gshard")
_stages = logging.getLogger("gshard.stages")
_stages.setLevel(logging.INFO)  # level DEBUG of ``gshard`` lists phases and shall not print whole programs


@contextlib.contextmanager
def phase(doing: str, name: str, devices: int | None = None) -> Iterator[None]:
    """Logs the wall time of a block in seconds, unless it raises. Inside, the garbage collector runs less often.

    >>> import jax
    >>> with jax.log_compiles(), phase("planning", "step", 8):
    ...     plan = "computed here"
    """
    start = time.perf_counter()
    with collected_seldom():
        yield
    level = logging.WARNING if logs_compilations() else logging.DEBUG
    if _log.isEnabledFor(level):
        for_devices = "" if devices is None else f" for {counted(devices, 'device')}"
        _log.log(level, "Finished %s %s%s in %.3g s", doing, name, for_devices, time.perf_counter() - start)


def log_stage(stage: str, name: str, result: _T, shown: Callable[[_T], object] = lambda result: result) -> None:
    """Logs the result of a stage of the pipeline as one DEBUG record of the logger ``gshard.stages``.

    gshard formats the text only if this logger is enabled for DEBUG.
    """
    if _stages.isEnabledFor(logging.DEBUG):
        _stages.debug("%s: after '%s'\n%s", name, stage, shown(result))
