"""Saver: checkpoints of a run, written while training goes on; the newest and the best are kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

from gshard_m4 import checkpoint


class Saver:
    """Writes one step at a time in the background; use it in a ``with`` statement.

    An error while writing is raised by the next call, or at the end of the ``with``.

    Args:
        directory: where the steps lie.
        keep: how many of the newest steps are kept; the best one is kept beside them.
    """

    def __init__(self, directory: Path, keep: int):
        self._directory, self._keep = directory, keep
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="saving")
        self._writing: Future[None] | None = None

    def save(self, step: int, state: Any, meta: Mapping[str, Any], score: float | None = None) -> None:
        """Copies the state off its devices and returns; writing goes on in the background.

        Args:
            step, state, meta, score: see `checkpoint.begin`.

        Raises:
            CheckpointError: this step or the one before could not be written.
        """
        self.wait()
        finish = checkpoint.begin(self._directory, step, state, meta, score=score)
        self._writing = self._thread.submit(self._finish, finish)

    def wait(self) -> None:
        """Returns once everything is on the disk.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def _finish(self, finish: Callable[[], Path]) -> None:
        finish()
        if jax.process_index() == 0:
            checkpoint.prune(self._directory, self._keep)

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None and jax.process_count() > 1:
            return  # the others are about to end, and their parts may never come
        try:
            self.wait()
        except BaseException:
            if error is None:  # otherwise what ended the training is what must be told
                raise
