"""Fetch: the archives of sources, through the clients of their registries, once.

They are kept, each source in a folder of its own, with the SHA-256 of every file in ``SHA256SUMS`` (which ``sha256sum
--check`` reads). A folder appears when all of it is there; one whose contents have changed since is fetched again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from gshard_m4.corpus.apt import Apt, AptError
from gshard_m4.corpus.cache import work_folder
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
    """Fetches sources into a cache; apt's lists are got once, when the first of its packages is asked for.

    Args:
        cache: folder.
    """

    def __init__(self, cache: Path):
        self._cache = cache
        self._apt: Apt | AptError | None = None

    def fetch(self, source: Source) -> Fetched:
        """Downloads a source's archives, unless they are in the cache already."""
        folder = self._cache / "packages" / source.title.replace(" ", "-")
        known = _verified(folder)
        if known:
            return Fetched(source, known, folder, was_there=True)
        with work_folder(self._cache / "packages") as unfinished:
            work = unfinished / folder.name
            work.mkdir()
            try:
                self._download(source, work)
            except (AptError, _IndexError) as error:
                return Fetched(source, problem=str(error))
            sums = {path.name: checksum(path) for path in sorted(work.iterdir())}
            (work / SUMS).write_text("".join(f"{sha}  {file}\n" for file, sha in sums.items()))
            shutil.rmtree(folder, ignore_errors=True)
            work.rename(folder)
        return Fetched(source, sums, folder)

    def _download(self, source: Source, folder: Path) -> None:
        if source.registry == "pip":
            _from_pip(source, folder)
        elif source.registry == "npm":
            _from_npm(source, folder)
        else:
            apt = self._open_apt()
            if source.registry == "apt":
                apt.download(source.packages, folder)
            elif source.registry == "apt-source":
                apt.download_source(source.packages[0], folder)
            else:
                apt.copy_descriptions(folder)

    def _open_apt(self) -> Apt:
        if self._apt is None:
            try:
                self._apt = Apt.open(self._cache / "apt")
            except AptError as error:
                self._apt = error
        if isinstance(self._apt, AptError):
            raise self._apt
        return self._apt


class _IndexError(Exception):
    """What pip or npm said last."""


def _from_pip(source: Source, folder: Path) -> None:
    # The archive is only read: what it needs, and which Python it would run on, does not matter.
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
        "--only-binary=:all:", "--ignore-requires-python", "--dest", str(folder),
        f"{source.packages[0]}=={source.version}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not any(folder.iterdir()):
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise _IndexError(said[-1] if said else f"pip ended with {done.returncode}")


def _from_npm(source: Source, folder: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise _IndexError("this system has no npm")
    command = [npm, "pack", "--loglevel=error", "--ignore-scripts", f"{source.packages[0]}@{source.version}"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode or not any(folder.iterdir()):
        said = [line for line in done.stderr.splitlines() if " error " in f" {line} " and "code" not in line]
        raise _IndexError(said[0] if said else f"npm ended with {done.returncode}")


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
