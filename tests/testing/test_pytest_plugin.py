"""The plugin for pytest: small test files that it runs in processes of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pages

ROOT = Path(__file__).resolve().parent.parent.parent

STEPS = """
import os

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P

import gshard

mesh = AbstractMesh((8,), ("data",))
x = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=NamedSharding(mesh, P("data")))
SUMS = int(os.environ["SUMS"])


def f(x):
    for i in range(SUMS):
        x = x / jnp.sum(x, 0)
    return x


def test_limits(collectives):
    assert collectives.check(jax.jit(f), (x,), all_reduce=1, all_gather=0).times_by_kind == {"all_reduce": 1}


class TestBaseline:
    @pytest.mark.parametrize("dtype", ["float32", "int32"])
    def test_each(self, collectives, dtype):
        collectives.baseline(jax.jit(f), (x.update(dtype=dtype),), exact=True)


def test_several(collectives):
    collectives.baseline(jax.jit(f), (x,))
    collectives.baseline(gshard.jit(lambda x: f(gshard.split(x, 0, "data")), mesh=mesh), (x,), name="by gshard")


def test_twice(collectives):
    collectives.baseline(jax.jit(f), (x,))
    with pytest.raises(ValueError, match="give each a name="):
        collectives.baseline(jax.jit(f), (x,))
"""
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


def run(folder, *options, sums=1):
    """What pytest returns and prints."""
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "SUMS": str(sums)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "gshard_pytest", "-p", "no:cacheprovider", *options]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_a_baseline_is_written_kept_and_failed(folder):
    (folder / "tests" / "test_steps.py").write_text(STEPS)
    baselines = folder / "tests" / "collectives"
    code, text = run(folder)
    assert code == 1
    assert "1 passed" in text
    assert "4 failed" in text
    assert text.count("there is no baseline of f") >= 4
    assert "pytest --gshard-update" in text
    assert not baselines.exists()
    code, text = run(folder, "--gshard-update")
    assert code == 0, text
    written = {path.name: path.read_text() for path in baselines.iterdir()}
    assert sorted(written) == [
        "test_steps.TestBaseline.test_each-float32.txt",
        "test_steps.TestBaseline.test_each-int32.txt",
        "test_steps.test_several.by-gshard.txt",
        "test_steps.test_several.txt",
        "test_steps.test_twice.txt",
    ]
    assert re.search(r"^all_reduce +x1 +224  over data +in all$", written["test_steps.test_several.txt"], re.M)
    code, text = run(folder)
    assert code == 0, text
    assert {path.name: path.read_text() for path in baselines.iterdir()} == written
    code, text = run(folder, sums=2)
    assert code == 1
    assert "5 failed" in text
    assert "all_reduce  1        2" in text
    assert "+++ compiled now" in text
    assert re.search(r"-all_reduce +x1 +224  over data +in all", text)
    assert re.search(r"\+all_reduce +x2 +448  over data +in all", text)
    assert "test_steps.py:" in text
    assert "src/gshard" not in text, "the traceback ends in the test"
    assert {path.name: path.read_text() for path in baselines.iterdir()} == written
    code, text = run(folder, "--gshard-update", sums=2)
    assert code == 1, "a limit is not a baseline"
    assert "1 failed, 4 passed" in text
    assert all("x2" in path.read_text() for path in baselines.iterdir())


def test_it_imports_nothing_before_it_is_used(folder):
    (folder / "tests" / "test_without.py").write_text(WITHOUT)
    code, text = run(folder)
    assert code == 0, text
    code, text = run(folder, "--fixtures", "--help")
    assert "--gshard-update" in text


def test_the_page_is_a_file_of_tests(folder):
    code = [block.text for block in pages.blocks(ROOT / "docs" / "budgets.md") if block.kind == "python"]
    (folder / "tests" / "test_step.py").write_text("\n".join(code))
    baseline = folder / "tests" / "collectives" / "test_step.test_step.txt"
    done, text = run(folder, "--gshard-update", "tests/test_step.py")
    assert done == 0, text
    assert "x13" in baseline.read_text()
    done, text = run(folder, "tests/test_step.py")
    assert done == 0, text
    baseline.write_text(baseline.read_text().replace("x13", "x12"))
    done, text = run(folder, "tests/test_step.py")
    assert done == 1
    assert "all_gather over data: 13 in one call, 3.9 MiB; was 12, 3.9 MiB" in text
