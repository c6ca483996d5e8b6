"""Rewrites requirements.lock: what pip resolves on each of the given Pythons, merged into one file.

    python scripts/lock.py python3.11 python3.12 python3.13

A package whose version is the same everywhere is one line; where Pythons differ each version gets the
marker of its Pythons, and the newest Python given stands for all later ones.
"""

import json
import subprocess
import sys
import tempfile
import tomllib
from itertools import chain, groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADER = """\
# Every package that development, tests, documentation and m4 use, by name and version.
# Written by `make lock` from the requirements in both pyproject.toml.
"""


def requirements() -> list[str]:
    """Everything that gshard and m4 require: base, all extras, and what builds them; without gshard, which is here."""
    wanted = []
    for file in (ROOT / "pyproject.toml", ROOT / "packages" / "m4" / "pyproject.toml"):
        project = tomllib.loads(file.read_text())
        extras = chain.from_iterable(project["project"]["optional-dependencies"].values())
        wanted += [*project["build-system"]["requires"], *project["project"]["dependencies"], *extras]
    return [line for line in wanted if not line.startswith("gshard")]


def resolve(python: str, wanted: list[str]) -> tuple[tuple[int, int], dict[str, str]]:
    """The version of ``python`` and what pip would install there, ``{name: version}``."""
    with tempfile.TemporaryDirectory() as folder:
        report, source = Path(folder, "report.json"), Path(folder, "requirements.txt")
        source.write_text("\n".join(wanted))
        command = [python, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", report]
        subprocess.run([*command, "-r", source], check=True)
        found = json.loads(report.read_text())
    major, minor = found["environment"]["python_version"].split(".")
    return (int(major), int(minor)), {
        item["metadata"]["name"].lower().replace("_", "-"): item["metadata"]["version"] for item in found["install"]
    }


def merge(resolved: dict[tuple[int, int], dict[str, str]]) -> list[str]:
    """One line for each package and version, with a marker where the Pythons differ.

    >>> merge({(3, 11): {"jax": "0.10.2"}, (3, 12): {"jax": "0.12.0.1"}})
    ['jax==0.10.2 ; python_version < "3.12"', 'jax==0.12.0.1 ; python_version >= "3.12"']
    """
    pythons = sorted(resolved)
    lines = []
    for name in sorted(set().union(*resolved.values())):
        runs = [list(run) for _, run in groupby(pythons, key=lambda python: resolved[python].get(name))]
        for i, run in enumerate(runs):
            version = resolved[run[0]].get(name)
            if version is None:
                continue
            bounds = []
            if i > 0:
                bounds.append('python_version >= "{}.{}"'.format(*run[0]))
            if i < len(runs) - 1:
                bounds.append('python_version < "{}.{}"'.format(*runs[i + 1][0]))
            lines.append(f"{name}=={version}" + (" ; " + " and ".join(bounds) if bounds else ""))
    return lines


if __name__ == "__main__":
    wanted = requirements()
    lines = merge(dict(resolve(python, wanted) for python in sys.argv[1:]))
    (ROOT / "requirements.lock").write_text(HEADER + "\n".join(lines) + "\n")
    print(f"requirements.lock: {len(lines)} lines")
