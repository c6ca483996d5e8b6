"""Tests of moves plan thousands of them on one mesh: what they have in common is computed once for a file."""

import pytest

from gshard.core.planning_tables import tables


@pytest.fixture(autouse=True, scope="module")
def tables_of_a_file():
    with tables():
        yield
