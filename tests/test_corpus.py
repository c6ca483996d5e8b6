"""Plans of the corpus are as its table holds them; ``python tests/corpus.py --write`` writes the table."""

from __future__ import annotations

import jax
import pytest

import corpus
from sampled import sampled

KNOWN = corpus.known_rows()
DRAWN = sampled(corpus.NAMES, lambda name: name.split("/")[0], lambda name: 20, "corpus")


@pytest.mark.skipif(not jax.__version__.startswith("0.10."), reason="other versions of JAX trace other programs")
@pytest.mark.parametrize("objective", corpus.OBJECTIVES)
@pytest.mark.parametrize("name", [n if n in DRAWN else pytest.param(n, marks=pytest.mark.slow) for n in corpus.NAMES])
def test_a_plan_is_the_known_one(name: str, objective: str) -> None:
    found, known = corpus.explained(name, objective), KNOWN[f"{name} {objective}"]
    assert found == known, f"if that is meant, write the table; figures that are worse: {found.worse_than(known)}"


def test_the_table_has_no_other_rows() -> None:
    assert [*KNOWN] == [f"{name} {objective}" for name in corpus.NAMES for objective in corpus.OBJECTIVES]
