"""Debian's packages: downloaded with apt into a private state, so that nothing of the system changes or is installed.

Which servers are used, and through which proxy, is what the system's own apt is set up for.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

RELEASE = "bookworm"
_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_HELPER = "/usr/lib/apt/apt-helper"
_TARGETS = ("Created-By: Packages", f"Codename: {RELEASE}", "Component: main", "Origin: Debian")
# Only these have had translators; each is a file to download.
_LANGUAGES = (
    "en ca cs da de el eo es eu fi fr gl hr hu id it ja km ko nb nl pl pt pt_BR ro ru sk sr sv tr uk vi zh_CN zh_TW"
).split()
_OWN_SETTINGS = re.compile(r"^Acquire::(Languages|GzipIndexes|CompressionTypes|IndexTargets|Changelogs)\b")


class AptError(Exception):
    """Why packages cannot be had: one line."""


@dataclasses.dataclass(frozen=True)
class Apt:
    """apt with a state of its own.

    Attributes:
        environment: of its commands.
        lists: folder of the lists of packages and descriptions.
        names: of all packages.
    """

    environment: Mapping[str, str]
    lists: Path
    names: frozenset[str]

    @staticmethod
    def open(folder: Path) -> Apt:
        """Sets up the state in a folder and gets the lists of packages.

        Raises:
            AptError: this is no Debian of the release we read, or its servers do not answer.
        """
        missing = [tool for tool in ("apt-get", "apt-cache", "apt-config", "dpkg-deb") if shutil.which(tool) is None]
        if missing:
            raise AptError(f"this system has no {missing[0]}")
        folder = folder.absolute()
        for part in ("state/lists/partial", "cache/archives/partial", "etc/preferences.d", "etc/sources.list.d"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        uri = _ask(["apt-get", "indextargets", "--format", "$(REPO_URI)", *_TARGETS]).split()
        if not uri:
            raise AptError(f"apt has no list of Debian's release {RELEASE} (is apt-get update needed?)")
        signed = f"[signed-by={_KEYRING}] " if _KEYRING.exists() else ""
        lines = [f"{kind} {signed}{sorted(uri)[0]} {RELEASE} main\n" for kind in ("deb", "deb-src")]
        (folder / "etc/sources.list").write_text("".join(lines))
        acquire = [s for s in _ask(["apt-config", "dump", "Acquire"]).splitlines() if not _OWN_SETTINGS.match(s)]
        (folder / "apt.conf").write_text("\n".join([*_settings(folder), *acquire]) + "\n")
        environment = {**os.environ, "APT_CONFIG": str(folder / "apt.conf"), "LC_ALL": "C.UTF-8"}
        languages = [option for code in _LANGUAGES for option in ("-o", f"Acquire::Languages::={code}")]
        _ask(["apt-get", "update", *languages], environment)
        names = _ask(["apt-cache", "pkgnames"], environment).split()
        return Apt(environment, folder / "state/lists", frozenset(names))

    def download(self, packages: Sequence[str], folder: Path) -> None:
        """Puts packages into a folder.

        Args:
            packages: names; one that ends in ``*`` is all that begin so, without the empty ones that need all others.
            folder: an empty one.

        Raises:
            AptError: one of them is not to be had.
        """
        wanted: list[str] = []
        for name in packages:
            begins = name.removesuffix("*")
            found = sorted(n for n in self.names if n.startswith(begins) and not n.endswith("-all"))
            wanted += found if name.endswith("*") else [name]
            if not found or (not name.endswith("*") and name not in self.names):
                raise AptError(f"there is no package {name} in Debian's release {RELEASE}")
        _ask(["apt-get", "download", "--quiet", *wanted], self.environment, folder)

    def download_source(self, package: str, folder: Path) -> None:
        """Puts the original source of a package into a folder, or one part of it: ``package:part``.

        Raises:
            AptError: it is not to be had.
        """
        name, _, part = package.partition(":")
        said = _ask(["apt-get", "source", "--print-uris", name], self.environment)
        files = [line.split() for line in said.splitlines() if line.startswith("'")]
        wanted = [
            (uri.strip("'"), file, checksum)
            for uri, file, _, checksum in files
            if not file.endswith((".dsc", ".asc")) and "debian.tar" not in file and part in file
        ]
        if not wanted:
            raise AptError(f"the source of {package} has no such file")
        for uri, file, checksum in wanted:
            _ask([_HELPER, "download-file", uri, str(folder / file), checksum], self.environment)

    def copy_descriptions(self, folder: Path) -> None:
        """Puts the translated descriptions of all packages into a folder.

        Raises:
            AptError: there are none.
        """
        found = sorted(self.lists.glob("*_main_i18n_Translation-*"))
        if not any(path.name.endswith("-en") for path in found) or len(found) < 2:
            raise AptError("the servers have no translated descriptions")
        for path in found:
            shutil.copy(path, folder / path.name[path.name.index("i18n_Translation-") :])


def _settings(folder: Path) -> list[str]:
    return [
        f'Dir::State "{folder / "state"}";',
        'Dir::State::status "/var/lib/dpkg/status";',
        f'Dir::Cache "{folder / "cache"}";',
        f'Dir::Etc "{folder / "etc"}";',
        'APT::Sandbox::User "root";',
        'Acquire::GzipIndexes "false";',
        'Acquire::Retries "3";',
    ]


def _ask(command: Sequence[str], environment: Mapping[str, str] | None = None, folder: Path | None = None) -> str:
    try:
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    except OSError as error:
        raise AptError(f"{command[0]} cannot be run: {error.strerror}") from error
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith("E:")] or [f"exit code {done.returncode}"]
        raise AptError(f"{Path(command[0]).name} {command[1]}: {said[0].removeprefix('E: ')}")
    return done.stdout
