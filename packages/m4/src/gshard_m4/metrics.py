"""Metrics of a run: one line of JSON for each step, and TensorBoard event files if asked for."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from gshard_m4.errors import TrainError


class MetricsLog:
    """Writes the metrics of each step; use it in a ``with`` statement.

    A run that goes on from step n keeps the first n lines of its file: what a stopped run did after its last checkpoint
    is done again, and would stand there twice.

    Args:
        path: the file of JSON lines.
        first: the step that the run begins with.
        tensorboard: folder for event files, or None.

    Raises:
        TrainError: a file cannot be written, or tensorboardX is not installed.
    """

    def __init__(self, path: Path, first: int, tensorboard: Path | None = None):
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            kept: list[str] = []
            if first and path.exists():
                with path.open(encoding="utf-8") as old:
                    kept = list(itertools.islice(old, first))
            hidden = path.with_name(f".{path.name}-{os.getpid()}")
            hidden.write_text("".join(kept), "utf-8")
            os.replace(hidden, path)
            self._file = path.open("a", encoding="utf-8", buffering=1)
        except OSError as error:
            raise self._cannot(error) from error
        self._events = _events(tensorboard, first) if tensorboard else None

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes the numbers of a step; those that are not finite become null in JSON, which has no other word.

        Raises:
            TrainError: the disk is full.
        """
        told = {name: x if not isinstance(x, float) or math.isfinite(x) else None for name, x in values.items()}
        try:
            self._file.write(json.dumps({"step": step, **told}, allow_nan=False) + "\n")
        except OSError as error:
            raise self._cannot(error) from error
        if self._events is not None:
            for name, value in values.items():
                if math.isfinite(value):
                    self._events.add_scalar(name, value, step)

    def _cannot(self, error: OSError) -> TrainError:
        return TrainError(
            f"the metrics cannot be written: {error.strerror}.",
            where=str(self._path),
            hint="Name a folder that can be written to, on a disk with room.",
        )

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()
        if self._events is not None:
            self._events.close()


def _events(folder: Path, first: int) -> Any:
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise TrainError(
            "TensorBoard files need the package tensorboardX.", hint="Install it, or leave --tensorboard out."
        ) from error
    # The name is otherwise that of the second: a run that goes on at once would overwrite what it goes on from.
    return SummaryWriter(str(folder), purge_step=first, filename_suffix=f".{first}-{os.getpid()}")
