"""Fetch: a source's archive, through pip, once.

The archive is kept with its SHA-256 beside it; one whose contents have changed since is fetched again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

from m4.corpus.source import Source


@dataclasses.dataclass(frozen=True, slots=True)
class Fetched:
    """A source's archive, or why there is none.

    Attributes:
        source: which.
        archive: the file; None if it could not be had.
        sha256: of the archive.
        problem: what pip said last.
        was_there: whether it had been fetched before.
    """

    source: Source
    archive: Path | None
    sha256: str = ""
    problem: str = ""
    was_there: bool = False


def fetch(source: Source, cache: Path) -> Fetched:
    """Downloads a source's wheel into the cache, unless it is there already."""
    folder = cache / "packages" / f"{source.name}-{source.version}"
    archive = next(iter(sorted(folder.glob("*.whl"))), None)
    if archive is not None:
        known = folder / f"{archive.name}.sha256"
        found = checksum(archive)
        if known.exists() and known.read_text().strip() == found:
            return Fetched(source, archive, found, was_there=True)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as work:
        # The archive is only read: what it needs, and which Python it would run on, does not matter.
        command = [
            sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
            "--only-binary=:all:", "--ignore-requires-python", "--dest", work, f"{source.name}=={source.version}",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = sorted(Path(work).glob("*.whl"))
        if done.returncode or not wheels:
            said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            return Fetched(source, None, problem=said[-1] if said else f"pip ended with {done.returncode}")
        archive = folder / wheels[0].name
        found = checksum(wheels[0])
        wheels[0].replace(archive)
        (folder / f"{archive.name}.sha256").write_text(found + "\n")
    return Fetched(source, archive, found)


def checksum(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
