"""Finds a released JAX that pyproject.toml does not allow yet, for `make test-next`.

python scripts/next_jax.py    # prints an interpreter and the version; says on stderr if there is none
"""

import sys
import tomllib

from lock import ROOT, resolve
from newest_python import found
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet


def allowed() -> SpecifierSet:
    """The versions of JAX that pyproject.toml allows."""
    lines = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (jax,) = (wanted for wanted in map(Requirement, lines) if wanted.name == "jax")
    return jax.specifier


if __name__ == "__main__":
    python = found()[0] or sys.executable
    version = resolve(python, ["jax"])[1]["jax"]
    if version in allowed():
        print(f"skipped: pyproject.toml allows the newest JAX, {version} ({allowed()})", file=sys.stderr)
    else:
        print(python, version)
