"""The law: a plan depends on the program, the mesh and the options: not on what was planned before, nor on hash seeds.

Each order of planning is a process of its own, for nothing can be planned first twice in one.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHAINS = Path(__file__).resolve().parent.parent / "marked_chains.py"


@pytest.fixture(scope="module")
def forwards():
    return planned("forwards", "0")


def planned(order, hash_seed):
    environment = os.environ | {"PYTHONHASHSEED": hash_seed}
    line = [sys.executable, str(CHAINS), order]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    return found


def assert_equal(ours, theirs):
    assert sorted(ours) == sorted(theirs)
    assert len(ours) > 30
    different = [name for name in ours if ours[name] != theirs[name]]
    assert not different, f"{different}:\n{ours[different[0]]}\n\n{theirs[different[0]]}"


@pytest.mark.parametrize("order, hash_seed", [
    ("backwards", "1"),
    pytest.param("backwards", "0", marks=pytest.mark.slow),  # each by itself, to tell them apart
    pytest.param("forwards", "1", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_plan_depends_on_nothing_else(order, hash_seed, forwards):
    assert_equal(forwards, planned(order, hash_seed))
