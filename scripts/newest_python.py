"""Finds a Python that gets a newer JAX from requirements.lock than this one has, for `make test-newest`.

    python scripts/newest_python.py     # prints the path of an interpreter; says on stderr why there is none

Interpreters on the path come first, then those of pyenv, which are not on the path unless a version is chosen. An
interpreter counts only if it starts: a shim of pyenv exists also for versions that are not chosen.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ("3.13", "3.12")  # the newest first


def jax_of(python: str) -> Version:
    """The version of JAX that requirements.lock gives a Python, such as "3.12"."""
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    wanted = [Requirement(line) for line in lines if line.startswith("jax==")]
    (jax,) = (w for w in wanted if w.marker is None or w.marker.evaluate({"python_version": python}))
    (pinned,) = jax.specifier
    return Version(pinned.version)


def candidates(version: str) -> Iterator[str]:
    """Where an interpreter of this version may be."""
    on_path = shutil.which(f"python{version}")
    if on_path:
        yield on_path
    root = os.environ.get("PYENV_ROOT") or output("pyenv", "root")
    if root:
        yield from map(str, sorted(Path(root).glob(f"versions/{version}.*/bin/python")))


def output(*command: str) -> str:
    """What a program prints; nothing if it does not run."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def found() -> tuple[str, str]:
    """An interpreter, or nothing and the reason."""
    own = "{}.{}".format(*sys.version_info)
    newer = [version for version in VERSIONS if jax_of(version) > jax_of(own)]
    if not newer:
        return "", f"Python {own} has the newest JAX of requirements.lock, {jax_of(own)}"
    for version in newer:
        for path in candidates(version):
            if output(path, "-c", "import sys; print('{}.{}'.format(*sys.version_info))") == version:
                return path, ""
    return "", f"no Python {newer[-1]} or newer found"


if __name__ == "__main__":
    python, reason = found()
    print(python or f"skipped: {reason}", file=sys.stdout if python else sys.stderr)
