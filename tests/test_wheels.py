"""The two distributions: gshard without m4, and m4 with a command that shadows no other program."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from email.parser import HeaderParser
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
PROJECTS = {"gshard": ROOT, "gshard_m4": ROOT / "packages" / "m4"}
COMMANDS = {"gshard": "gshard", "gshard_m4": "gshard-m4"}
PACKAGES = list(PROJECTS)
HELD = {"gshard": ("gshard", "gshard_pytest"), "gshard_m4": ("gshard_m4",)}  # packages of a distribution


def project(package):
    return tomllib.loads((PROJECTS[package] / "pyproject.toml").read_text())["project"]


def needed(package):
    return {wanted.name: wanted for wanted in map(Requirement, project(package)["dependencies"])}


def test_gshard_requires_jax_and_numpy_and_m4_requires_gshard():
    assert set(needed("gshard")) == {"jax", "numpy"}
    assert needed("gshard_m4")["gshard"].specifier.contains(project("gshard")["version"])


def test_one_version_one_author_one_licence():
    cited = dict(re.findall(r"^(version|license|  - name): (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE))
    for package, folder in PROJECTS.items():
        said = project(package)
        assert said["version"] == cited["version"] == version(said["name"])
        assert said["license"] == cited["license"]
        assert said["authors"] == [{"name": cited["  - name"]}]
        assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_each_jax_of_the_lock_is_allowed():
    locked = re.findall(r"^jax==(\S+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    assert locked
    assert all(needed("gshard")["jax"].specifier.contains(one) for one in locked)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """Built from copies: setuptools would add what an earlier build left in the folder."""
    built = {}
    for package, folder in PROJECTS.items():
        copy = tmp_path_factory.mktemp(package)
        shutil.copytree(folder / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(folder / name, copy)
        pip("wheel", "--no-build-isolation", "--wheel-dir", copy / "dist", copy)
        (built[package],) = (copy / "dist").glob("*.whl")
    return built


def pip(command, *arguments, python=sys.executable):
    line = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", command, "--quiet"]
    subprocess.run([*line, "--no-index", "--no-deps", *arguments], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
def test_a_wheel_holds_its_package_and_nothing_else(wheels, package):
    with zipfile.ZipFile(wheels[package]) as wheel:
        names = set(wheel.namelist())
        (about,) = {name.partition("/")[0] for name in names if ".dist-info/" in name}
        metadata = HeaderParser().parsestr(wheel.read(f"{about}/METADATA").decode())
        entries = wheel.read(f"{about}/entry_points.txt").decode().split()
    source = PROJECTS[package] / "src"
    every = (path for held in HELD[package] for path in (source / held).rglob("*") if "__pycache__" not in path.parts)
    files = {path.relative_to(source).as_posix() for path in every if path.is_file() and path.suffix != ".md"}
    assert {name for name in names if not name.startswith(about)} == files
    assert entries[:3] == ["[console_scripts]", COMMANDS[package], "="]
    plugins = ["[pytest11]", "gshard_pytest", "=", "gshard_pytest"] if package == "gshard" else []
    assert entries[4:] == plugins
    required = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    assert {wanted.name for wanted in required if wanted.marker is None} == set(needed(package))
    assert metadata["Author"] == "the gshard authors"
    assert f"{about}/licenses/LICENSE" in names


@pytest.mark.slow
def test_wheels_run_in_a_fresh_environment(wheels, tmp_path):
    """With the packages of this environment, but not its gshard."""
    venv.create(tmp_path / "venv")
    bin_ = tmp_path / "venv" / "bin"
    pip("install", *wheels.values(), python=bin_ / "python")
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    here = [path for path in sys.path if path.endswith("site-packages")]
    # Only now, so that pip has not seen them. Editable installs in these folders do not count.
    (site / "zz_others.pth").write_text("\n".join(here))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def said(*line):
        done = subprocess.run(line, env=environment, cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout

    for package in PACKAGES:
        where = said(bin_ / "python", "-c", f"import {package}; print({package}.__file__)").strip()
        assert where == str(site / package / "__init__.py")
        name = COMMANDS[package]
        assert said(bin_ / name, "--version").startswith(f"{name} {project(package)['version']} (")
    assert "train" in said(bin_ / "gshard-m4", "--help")
    assert "--gshard-update" in said(bin_ / "python", "-m", "pytest", "--help"), "pytest finds the plugin by itself"
    installed = {path.name for path in bin_.iterdir() if not path.name.lower().startswith(("activate", "python"))}
    assert installed == set(COMMANDS.values())
