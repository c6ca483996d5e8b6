"""Runs: which ones there are, which is the newest, and which corpus each was trained on.

So a command needs neither ``--run`` nor ``--data`` where it is clear what is meant, and one that is given a wrong name
says which names there are.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path

from gshard_m4 import checkpoint
from gshard_m4.config import Run
from gshard_m4.errors import CheckpointError
from gshard_m4.text import DATA

RUNS = Path("runs")
_DEEP = ("*/checkpoints", "*/*/checkpoints")  # runs/demo, runs/scaling-cpu/depth-8e-4l-seed-0


def found(folder: Path = RUNS) -> list[Path]:
    """The runs in a folder that have a checkpoint, the newest first."""
    saved = [path for pattern in _DEEP for path in folder.glob(pattern) if checkpoint.steps(path)]
    saved.sort(key=lambda path: (path / f"{checkpoint.steps(path)[-1]:08d}").stat().st_mtime, reverse=True)
    return [path.parent for path in saved]


def chosen(asked: Path | None, quiet: bool = False) -> Run:
    """The run that was asked for, or the newest.

    Args:
        asked: its folder; None for the newest.
        quiet: do not say which one is taken.

    Raises:
        CheckpointError: there is none, or no such one; names those that exist.
    """
    there = found()
    if asked is None:
        if not there:
            raise CheckpointError(
                "there is no trained model.",
                where=str(RUNS.absolute()),
                hint="gshard-m4 demo trains one in ten minutes; --run names one that is elsewhere.",
            )
        if not quiet:
            others = f", the newest of {len(there)} runs" if len(there) > 1 else ""
            print(f"gshard-m4: using {there[0]}{others}", file=sys.stderr)
        return Run(there[0])
    if not checkpoint.steps(Run(asked).checkpoints):
        names = ", ".join(map(str, there[:8])) + (", ..." if len(there) > 8 else "")
        raise CheckpointError(
            "there is no checkpoint.",
            where=str(Run(asked).checkpoints),
            hint=f"Name one of the runs there are: {names}." if there else "Train first, or name another run.",
        )
    return Run(asked)


def remember_corpus(run: Run, data: Path) -> None:
    """Writes down, beside the checkpoints, where the corpus of a run is; a folder that cannot be written is left."""
    where = os.path.relpath(data, run.directory)  # both may be moved together
    with contextlib.suppress(OSError):  # what is to be told of it, training tells
        run.directory.mkdir(parents=True, exist_ok=True)
        run.corpus.write_text(json.dumps({"corpus": where}) + "\n", "utf-8")


def corpus_of(run: Run, asked: Path | None = None) -> Path:
    """The folder of the corpus a run was trained on.

    Args:
        run: the run.
        asked: what the user says it is.
    """
    if asked is not None:
        return asked
    try:
        return Path(os.path.normpath(run.directory / json.loads(run.corpus.read_text("utf-8"))["corpus"]))
    except (OSError, ValueError, KeyError, TypeError):
        return DATA
