"""The start of the command: a package that is missing is one sentence, whatever it was that needed it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import m4
from m4 import __main__ as start

WITHOUT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {package!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
sys.argv = ["m4", "train", "--help"]
from m4.__main__ import run
run()
"""


@pytest.mark.parametrize("package", ["tyro", "orbax"])
def test_without_the_extra(package: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(m4.__file__).parents[1])}
    code = WITHOUT.format(package=package)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == start.MISSING
    assert done.stderr.count("\n") == 1
    assert f"the package {package!r} is not installed" in done.stderr
    assert 'pip install "gshard[m4]"' in done.stderr


def test_another_import_error_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ModuleNotFoundError("No module named 'jaxlib'", name="jaxlib")

    monkeypatch.setattr(start.importlib, "import_module", fail)
    with pytest.raises(ModuleNotFoundError, match="jaxlib"):
        start.main([])
