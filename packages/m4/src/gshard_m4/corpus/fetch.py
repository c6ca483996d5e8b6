"""Fetch: the archives of sources, downloaded once.

They are kept, each source in a folder of its own, with the SHA-256 of every file in ``SHA256SUMS`` (which ``sha256sum
--check`` reads). A folder appears when all of it is there; one whose contents have changed since is fetched again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path

from gshard_m4.corpus.cache import work_folder
from gshard_m4.corpus.registries import Registries, RegistryError
from gshard_m4.corpus.source import Source

SUMS = "SHA256SUMS"


@dataclasses.dataclass(frozen=True, slots=True)
class Fetched:
    """A source's archives, or why there are none.

    Attributes:
        source: which.
        sha256: file -> SHA-256 in hexadecimal; Debian's names of files have the versions in them.
        folder: where they are; None if they could not be had.
        problem: why not, in one line.
        was_there: whether they had been fetched before.
    """

    source: Source
    sha256: Mapping[str, str] = dataclasses.field(default_factory=dict)
    folder: Path | None = None
    problem: str = ""
    was_there: bool = False

    @property
    def files(self) -> list[Path]:
        """The archives."""
        return [self.folder / name for name in self.sha256] if self.folder else []

    @property
    def size(self) -> int:
        """Bytes of all archives."""
        return sum(path.stat().st_size for path in self.files)


class Fetcher:
    """Fetches sources into a cache.

    Args:
        cache: folder.
    """

    def __init__(self, cache: Path):
        self._packages = cache / "packages"
        self._registries = Registries(cache / "apt")

    def fetch(self, source: Source) -> Fetched:
        """Downloads a source's archives, unless they are in the cache already."""
        folder = self._packages / source.title.replace(" ", "-")
        if known := _verified(folder):
            return Fetched(source, known, folder, was_there=True)
        with work_folder(self._packages) as unfinished:
            work = unfinished / folder.name
            work.mkdir()
            try:
                self._registries.download(source, work)
            except RegistryError as error:
                return Fetched(source, problem=str(error))
            sums = {path.name: checksum(path) for path in sorted(work.iterdir())}
            (work / SUMS).write_text("".join(f"{sha}  {file}\n" for file, sha in sums.items()))
            shutil.rmtree(folder, ignore_errors=True)
            work.rename(folder)
        return Fetched(source, sums, folder)


def _verified(folder: Path) -> dict[str, str]:
    """The files of a folder and their hashes; nothing if one of them is missing or has changed."""
    try:
        lines = (folder / SUMS).read_text().splitlines()
        sums = {file: sha for sha, _, file in (line.partition("  ") for line in lines)}
        return sums if all(checksum(folder / file) == sha for file, sha in sums.items()) else {}
    except OSError:
        return {}


def checksum(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
