"""Samples of tables: every kind is in them, they are the same at every run, and together they leave little out."""

import pytest

from harness import elementwise, rows
from sampled import crossed, others_slow, sampled, sampled_rows

SEEDS = ("rules_sound", "rules_complete", "linear")
ELEMENTWISE = {row.name for row in elementwise()}


@pytest.mark.parametrize("seed", SEEDS)
def test_every_kind_of_row_is_drawn(seed):
    drawn = sampled_rows(rows(), seed)
    others = {row.primitive for row in rows() if row.name not in ELEMENTWISE}
    assert others <= {row.primitive for row in drawn}
    assert len([row for row in drawn if row.name in ELEMENTWISE]) > 5
    assert [row.name for row in drawn] == [row.name for row in sampled_rows(rows(), seed)]


def test_together_they_leave_little_out():
    names = {row.name for row in rows()} - ELEMENTWISE
    drawn = {row.name for seed in SEEDS for row in sampled_rows(rows(), seed)}
    assert len(names & drawn) > 0.7 * len(names)


def test_what_is_not_drawn_is_slow():
    fast = {parameter.id for parameter in others_slow(rows(), "linear") if not parameter.marks}
    assert fast == {row.name for row in sampled_rows(rows(), "linear")}
    assert len(others_slow(rows(), "linear")) == len(list(rows()))


def test_the_first_of_each_kind_is_drawn_and_few_others():
    names = [f"{kind}{i}" for kind in "abc" for i in range(200)]
    drawn = sampled(names, lambda name: name[0], lambda name: 10, "seed")
    assert {"a0", "b0", "c0"} <= drawn
    assert 30 < len(drawn) < 100
    assert drawn != sampled(names, lambda name: name[0], lambda name: 10, "another")


def test_in_a_grid_every_value_occurs():
    a, b, c = list("abcdefg"), list(range(5)), [None, float]
    every = crossed(a, b, c, one_in=5)
    fast = [parameter.values for parameter in every if not parameter.marks]
    assert len(every) == len({parameter.id for parameter in every}) == 70
    assert 14 <= len(fast) < 20
    assert [set(values) for values in zip(*fast)] == [set(a), set(b), set(c)]
