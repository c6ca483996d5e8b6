"""Archives: the files inside a package, read without installing or unpacking it."""

from __future__ import annotations

import contextlib
import subprocess
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO


def members(path: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the wanted files of a wheel, a tar file or a Debian package, one at a time.

    A file of another kind is given itself.

    Raises:
        OSError: the archive is damaged.
    """
    try:
        if path.suffix == ".whl":
            with zipfile.ZipFile(path) as archive:
                for name in sorted(filter(wanted, archive.namelist())):
                    yield name, archive.read(name)
        elif path.suffix == ".deb" or path.suffix == ".tgz" or ".tar." in path.name:
            with _tar(path) as file, tarfile.open(fileobj=file, mode="r|*") as tar:
                for member in tar:
                    if member.isfile() and wanted(member.name):
                        contents = tar.extractfile(member)
                        assert contents is not None
                        yield member.name, contents.read()
        elif wanted(path.name):
            yield path.name, path.read_bytes()
    except (zipfile.BadZipFile, tarfile.TarError, EOFError) as error:
        raise OSError(f"the archive {path.name} is damaged: {error}") from error


@contextlib.contextmanager
def _tar(path: Path) -> Iterator[IO[bytes]]:
    """The tar file itself, or the one in a Debian package."""
    if path.suffix != ".deb":
        with path.open("rb") as file:
            yield file
        return
    command = ["dpkg-deb", "--fsys-tarfile", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        yield process.stdout
        while process.stdout.read(1 << 20):  # what follows the archive's end
            pass
    if process.returncode:
        raise OSError(f"the archive {path.name} is damaged: dpkg-deb ended with {process.returncode}")
