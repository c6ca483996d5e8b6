"""FAULTS.md names tests that there are, and those that try faults are on it."""

import ast
import re
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
PAGE = (HERE / "FAULTS.md").read_text("utf-8")
NAMED = sorted(set(re.findall(r"`(test_\w+\.py)::(test_\w+)`", PAGE)))
# Files that have little else than faults.
WHOLE = ("test_resume.py", "test_together.py")


def names_in(file):
    body = ast.parse((HERE / file).read_text("utf-8")).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


@pytest.mark.parametrize("file", sorted({file for file, _ in NAMED}))
def test_every_test_that_is_named_is_there(file):
    assert {name for of, name in NAMED if of == file} <= names_in(file)


@pytest.mark.parametrize("file", WHOLE)
def test_what_tries_faults_is_on_the_page(file):
    assert names_in(file) <= {name for of, name in NAMED if of == file}


def test_every_row_names_a_test():
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| fault |")]
    assert len(rows) > 30
    assert all("::test_" in row for row in rows)
