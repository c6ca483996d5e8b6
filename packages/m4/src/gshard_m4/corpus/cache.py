"""Cache: folders to work in beside what is kept, so that a file appears only when it is finished.

What a killed process left is swept away by the next one; several may share the cache.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gshard_m4.lock import alive

_PREFIX = "unfinished"
_NAME = re.compile(rf"{_PREFIX}-(\d+)-")


@contextmanager
def work_folder(parent: Path) -> Iterator[Path]:
    """An empty folder inside another, gone when it is left."""
    parent.mkdir(parents=True, exist_ok=True)
    for path in parent.glob(f"{_PREFIX}-*"):
        found = _NAME.match(path.name)
        if found and not alive(int(found.group(1))):
            shutil.rmtree(path, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=parent, prefix=f"{_PREFIX}-{os.getpid()}-") as name:
        yield Path(name)
