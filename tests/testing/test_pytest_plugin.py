"""The plugin for pytest: small test files that it runs in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import pages
from gshard_pytest import Collectives

ROOT = Path(__file__).resolve().parent.parent.parent

WITHOUT = """
import sys


def test_nothing_is_imported():
    assert "gshard_pytest" in sys.modules
    assert "jax" not in sys.modules and "gshard" not in sys.modules


def test_not_even_by_the_fixture(collectives):
    assert "jax" not in sys.modules and "gshard" not in sys.modules
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return tmp_path


def run(folder, *options):
    """What pytest returns and prints."""
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "gshard_pytest", "-p", "no:cacheprovider", *options]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_it_imports_nothing_before_it_is_used(folder):
    (folder / "tests" / "test_without.py").write_text(WITHOUT)
    code, text = run(folder)
    assert code == 0, text


def test_the_page_is_a_file_of_tests(folder):
    code = [block.text for block in pages.blocks(ROOT / "docs" / "budgets.md") if block.kind == "python"]
    (folder / "tests" / "test_step.py").write_text("\n".join(code))
    baseline = folder / "tests" / "collectives" / "test_step.test_step.txt"
    done, text = run(folder, "--gshard-update", "tests/test_step.py")
    assert done == 0, text
    assert "x13" in baseline.read_text()
    baseline.write_text(baseline.read_text().replace("x13", "x12"))
    done, text = run(folder, "tests/test_step.py")
    assert done == 1
    assert "all_gather over data: 13 in one call, 3.9 MiB; was 12, 3.9 MiB" in text
    assert "+++ compiled now" in text
    assert "src/gshard" not in text, "the traceback ends in the test"


@pytest.mark.parametrize("case", ["a b/c"])
def test_each_baseline_has_a_file_of_its_own(collectives, case, tmp_path):
    test = "test_pytest_plugin.test_each_baseline_has_a_file_of_its_own-a-b-c"
    assert collectives.path() == Path(__file__).parent / "collectives" / f"{test}.txt"
    assert collectives.path("by gshard").name == f"{test}.by-gshard.txt"
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.ShapeDtypeStruct((64,), "float32", sharding=jax.NamedSharding(mesh, jax.P("data")))
    written = Collectives(tmp_path, "test", update=True)
    written.baseline(jax.jit(jnp.sum), (x,))
    written.baseline(jax.jit(jnp.sum), (x,), name="another")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["test.another.txt", "test.txt"]
    with pytest.raises(ValueError, match="give each a name="):
        written.baseline(jax.jit(jnp.sum), (x,))
