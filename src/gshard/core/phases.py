"""Phases: logs the seconds of tracing, rewriting, planning, partitioning, lowering and compiling.

Each phase is one record of the logger ``gshard`` when it ends::

    Finished planning step for 8 devices in 2.9 s

Its level is that of JAX's own records of this kind: WARNING while ``jax_log_compiles`` is on, so that it is printed
without a set-up, and DEBUG otherwise.

Python looks for garbage seldom during a phase (``core.garbage``): JAX's tracing and lowering too make many objects that
stay, and a process with large libraries holds millions that would be looked through each time.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from gshard.core.garbage import collected_seldom
from gshard.core.jax_adapter_dispatch import logs_compilations

_T = TypeVar("_T")

_log = logging.getLogger("gshard")
_stages = logging.getLogger("gshard.stages")
_stages.setLevel(logging.INFO)  # so that DEBUG of ``gshard``, which lists phases, does not print whole programs


@contextlib.contextmanager
def phase(doing: str, name: str, devices: int | None = None) -> Iterator[None]:
    """Logs how many seconds of wall time pass until its end, if it does not fail. Garbage is collected seldom inside.

    Args:
        doing: the phase, such as ``"planning"``.
        name: the name of the function.
        devices: for how many devices; None for a phase that does not depend on the mesh.

    >>> import jax
    >>> with jax.log_compiles(), phase("planning", "step", 8):
    ...     plan = "computed here"
    """
    begun = time.perf_counter()
    with collected_seldom():
        yield
    level = logging.WARNING if logs_compilations() else logging.DEBUG
    if _log.isEnabledFor(level):
        where = "" if devices is None else f" for {devices} device{'' if devices == 1 else 's'}"
        _log.log(level, "Finished %s %s%s in %.3g s", doing, name, where, time.perf_counter() - begun)


def log_stage(stage: str, name: str, made: _T, shown: Callable[[_T], object] = lambda made: made) -> None:
    """Logs what a stage of the pipeline made: one DEBUG record of the logger ``gshard.stages``, with its text.

    Nothing is formatted unless that logger is enabled for DEBUG.

    Args:
        stage: such as ``"propagate"``.
        name: the name of the function.
        made: what the stage made.
        shown: what of it is printed, by ``str``.
    """
    if _stages.isEnabledFor(logging.DEBUG):
        _stages.debug("%s: after '%s'\n%s", name, stage, shown(made))
