"""The driver ends, and warns of a row that would not."""

import logging

import jax.numpy as jnp
import pytest

from gshard.rewrite.driver import at, run
from gshard.tracing.trace import trace


def negated():
    return trace(lambda x: -x, jnp.ones(3)).block


@pytest.mark.parametrize("most", [0, 3])
def test_rows_run_until_none_fires(most, caplog):
    times = []

    @at("neg")
    def few(graph, e):
        times.append(e)
        return [e] if len(times) <= most else None

    block = negated()
    _, fired = run([few], block.equations, block.outputs, None)
    assert len(fired) == most
    assert not caplog.records


def test_a_row_without_an_end_is_stopped_and_named(caplog):
    @at("neg")
    def endless(graph, e):
        return [e]

    block = negated()
    with caplog.at_level(logging.WARNING, "gshard"):
        equations, fired = run([endless], block.equations, block.outputs, None)
    assert [e.name for e in equations] == ["neg"]
    assert len(fired) == 1000
    (record,) = caplog.records
    assert "endless still fires at test_driver.py:" in record.getMessage()
