"""Stages: long work in a folder, done once each and gone on with after a stop."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Stages:
    """What is done in an unfinished folder, so that it is not done again after a stop.

    Args:
        folder: the folder; emptied unless it was begun for the same purpose.
        purpose: what the result depends on.
    """

    def __init__(self, folder: Path, purpose: Any):
        self.folder = folder
        said = json.dumps(purpose)
        begun = folder / "begun.json"
        if not begun.exists() or begun.read_text() != said:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            begun.write_text(said)

    def __call__(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What a stage gave, from its file if it was done before."""
        done = self.folder / f"{name}.done.json"
        if not done.exists():
            found = make()
            writing = done.with_suffix(".unfinished")
            writing.write_text(json.dumps(found, ensure_ascii=False), encoding="utf-8")
            writing.replace(done)
        return dict(json.loads(done.read_text(encoding="utf-8")))

    def forget(self) -> None:
        """Takes away what only resuming needs."""
        for path in (self.folder / "begun.json", *self.folder.glob("*.done.json")):
            path.unlink()
