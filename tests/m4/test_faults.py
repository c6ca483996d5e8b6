"""FAULTS.md names tests that there are, and those that try faults are on it."""

import re
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
PAGE = (HERE / "FAULTS.md").read_text("utf-8")
NAMED = sorted(set(re.findall(r"`(test_\w+\.py)::(test_\w+)`", PAGE)))


@pytest.mark.parametrize("file", sorted({file for file, _ in NAMED}))
def test_every_test_that_is_named_is_there(file):
    there = set(re.findall(r"^def (test_\w+)", (HERE / file).read_text("utf-8"), re.MULTILINE))
    named = {name for of, name in NAMED if of == file}
    assert named <= there
    if file == "test_together.py":  # it has little else than faults
        assert there <= named


def test_every_row_names_a_test():
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| fault |")]
    assert len(rows) > 30
    assert all("::test_" in row for row in rows)
