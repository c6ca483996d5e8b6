"""Plans are as the table of known plans holds them; ``python tests/known_plans.py --write`` writes the table."""

import jax
import pytest

import known_plans
from sampled import sampled

KNOWN = known_plans.known_rows()
DRAWN = sampled(known_plans.NAMES, lambda name: name.split("/")[0], lambda name: 60, "known plans")


@pytest.mark.skipif(not jax.__version__.startswith("0.10."), reason="other versions of JAX trace other programs")
@pytest.mark.parametrize("objective", known_plans.OBJECTIVES)
@pytest.mark.parametrize(
    "name", [n if n in DRAWN else pytest.param(n, marks=pytest.mark.slow) for n in known_plans.NAMES]
)
def test_a_plan_is_the_known_one(name, objective):
    found, known = known_plans.explained(name, objective), KNOWN[f"{name} {objective}"]
    assert found == known, f"if that is meant, write the table; figures that are worse: {found.worse_than(known)}"


def test_the_table_has_no_other_rows():
    assert [*KNOWN] == [f"{name} {objective}" for name in known_plans.NAMES for objective in known_plans.OBJECTIVES]
