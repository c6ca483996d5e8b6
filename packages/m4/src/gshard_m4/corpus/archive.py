"""Archives: the files inside a package, read without installing or unpacking it."""

from __future__ import annotations

import subprocess
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path


def members(path: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the wanted files of a wheel, a tar file or a Debian package, one at a time.

    Raises:
        OSError: the archive is damaged.
    """
    try:
        if path.suffix == ".deb":
            yield from _debian(path, wanted)
        elif path.suffix in (".whl", ".zip", ".xpi"):
            with zipfile.ZipFile(path) as archive:
                for name in sorted(filter(wanted, archive.namelist())):
                    yield name, archive.read(name)
        else:
            with tarfile.open(path, "r|*") as tar:
                yield from _tar(tar, wanted)
    except (zipfile.BadZipFile, tarfile.TarError, EOFError) as error:
        raise OSError(f"the archive {path.name} is damaged: {error}") from error


def _debian(path: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    command = ["dpkg-deb", "--fsys-tarfile", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        with tarfile.open(fileobj=process.stdout, mode="r|") as tar:
            yield from _tar(tar, wanted)
        assert process.stdout is not None
        while process.stdout.read(1 << 20):  # what follows the archive's end
            pass
    if process.returncode:
        raise OSError(f"the archive {path.name} is damaged: dpkg-deb ended with {process.returncode}")


def _tar(tar: tarfile.TarFile, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    for member in tar:
        if member.isfile() and wanted(member.name):
            file = tar.extractfile(member)
            assert file is not None
            yield member.name, file.read()
