"""Logs the seconds of tracing, rewriting, planning, partitioning, lowering and compiling.

At its end, each phase writes one record to the logger ``gshard``::

    Finished planning step for 8 devices in 2.9 s

The level is the level of JAX's records of this kind: WARNING while ``jax_log_compiles`` is on, so that Python prints
the record without a configuration of logging, and DEBUG otherwise.

During a phase Python's garbage collector runs less often (``core.garbage``). JAX's tracing and lowering also create
many objects that stay alive, and a process with large libraries holds millions of objects that each collection would
visit.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from gshard.core.errors import counted
from gshard.core.garbage import collected_seldom
from gshard.core.jax_adapter_dispatch import logs_compilations

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
