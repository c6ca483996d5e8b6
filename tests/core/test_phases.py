"""The log of phases: one record for each, at the level at which JAX logs its own."""

import contextlib
import gc
import logging
import re
import threading

import jax
import jax.numpy as jnp
import pytest

import gshard
from gshard.core.mesh import Mesh
from gshard.core.phases import collected_seldom, phase
from gshard.core.planning_tables import tables, tabulated, with_tables
from gshard.emit.partition import partition
from gshard.planning.propagate import propagate
from gshard.tracing.trace import trace

SHAPE = jax.ShapeDtypeStruct((8, 4), "float32")
TIME = re.compile(r" in [\d.]+(e-?\d+)? s$")


def step(x):
    return jnp.sin(gshard.split(x, 0, "data")).sum()


def records_of(caplog):
    """Levels and messages, without the seconds."""
    found = [r for r in caplog.records if r.name == "gshard" and r.getMessage().startswith("Finished")]
    assert all(TIME.search(r.getMessage()) for r in found)
    return [(r.levelno, TIME.sub("", r.getMessage())) for r in found]


def test_each_phase_is_logged_once_as_a_warning_where_jax_logs_compilations(caplog):
    f = gshard.jit(step, mesh=jax.make_mesh((8,), ("data",)))
    with jax.log_compiles(), caplog.at_level(logging.WARNING, "gshard"):
        f.lower(SHAPE).compile()
        f.lower(SHAPE).compile()
    said = ["rewriting step"]
    said += [f"{doing} step for 8 devices" for doing in ("planning", "partitioning", "lowering", "compiling")]
    assert records_of(caplog) == [(logging.WARNING, f"Finished {text}") for text in said]


def test_phases_are_logged_for_debugging_otherwise(caplog):
    with caplog.at_level(logging.INFO, "gshard"):
        gshard.jit(step, mesh=gshard.Mesh.abstract(data=8)).lower(SHAPE).spmd  # noqa: B018
    assert records_of(caplog) == []
    with caplog.at_level(logging.DEBUG, "gshard"):
        gshard.jit(step, mesh=gshard.Mesh.abstract(data=4)).lower(SHAPE).spmd  # noqa: B018
    levels, texts = zip(*records_of(caplog), strict=True)
    assert set(levels) == {logging.DEBUG}
    assert texts[-2:] == ("Finished planning step for 4 devices", "Finished partitioning step for 4 devices")


def test_a_phase_that_fails_is_not_logged(caplog):
    with caplog.at_level(logging.DEBUG, "gshard"), pytest.raises(gshard.PlanError), phase("planning", "step", 8):
        raise gshard.PlanError("refused.")
    assert records_of(caplog) == []


def test_a_partitioned_function_inside_jax_jit_is_logged_too(caplog):
    inner = gshard.jit(step, mesh=jax.make_mesh((8,), ("data",)))
    with caplog.at_level(logging.DEBUG, "gshard"):
        jax.jit(lambda x: inner(x) + 1).lower(SHAPE)
    texts = [text for _, text in records_of(caplog)]
    # Planned twice: how its results leave before anything is known of the operands, then with their shardings.
    assert texts.count("Finished planning call for 8 devices") == 2
    assert texts.count("Finished partitioning call for 8 devices") == 1


# Python looks for cycles less often for a while, and as before afterwards.
@pytest.fixture(autouse=True)
def as_it_was():
    before = gc.get_threshold()
    gc.set_threshold(700, 11, 12)
    yield
    gc.set_threshold(*before)


def test_the_threshold_is_raised_and_restored():
    with collected_seldom():
        assert gc.get_threshold() == (50_000, 11, 12)
    assert gc.get_threshold() == (700, 11, 12)
    with pytest.raises(ZeroDivisionError), collected_seldom():
        raise ZeroDivisionError
    assert gc.get_threshold() == (700, 11, 12)


@pytest.mark.parametrize("threshold", [0, 90_000], ids=["off", "higher"])
def test_what_is_rarer_already_stays(threshold):
    gc.set_threshold(threshold)
    with collected_seldom():
        assert gc.get_threshold()[0] == threshold
    assert gc.get_threshold()[0] == threshold


def test_the_last_thread_restores_it():
    entered, may_leave = threading.Event(), threading.Event()

    def stay():
        with collected_seldom():
            entered.set()
            may_leave.wait(30)

    other = threading.Thread(target=stay)
    with collected_seldom():
        other.start()
        assert entered.wait(30)
    assert gc.get_threshold()[0] == 50_000
    may_leave.set()
    other.join(30)
    assert gc.get_threshold()[0] == 700


def test_every_stage_does_so():
    seen = []

    def f(x):
        seen.append(gc.get_threshold()[0])
        return x * 2

    partition(propagate(trace(f, jnp.ones(8)), Mesh.abstract(x=2)))
    assert seen == [50_000]
    assert gc.get_threshold()[0] == 700


# Tables: results are kept while something is planned, by its thread alone, and not longer.
computed = []


@tabulated(2)
def noted(key):
    computed.append(key)
    return len(computed)


@with_tables
def three_times(key):
    return [noted(key) for _ in range(3)]


def test_results_are_kept_within_one_call_only():
    computed.clear()
    assert [three_times("a"), three_times("a")] == [[1, 1, 1], [2, 2, 2]]
    assert [noted("a"), noted("a")] == [3, 4]


def test_the_outermost_tables_count():
    computed.clear()
    with tables():
        assert three_times("a") == three_times("a") == [1, 1, 1]
        with tables():
            assert noted("a") == 1
        assert noted("a") == 1
    assert noted("a") == 2


def test_another_thread_has_its_own():
    computed.clear()
    with tables():
        noted("a")
        thread = threading.Thread(target=three_times, args=("a",))
        thread.start()
        thread.join()
        noted("a")
    assert computed == ["a", "a"]


def test_tables_end_with_an_error():
    computed.clear()

    @with_tables
    def fails():
        noted("a")
        raise ValueError

    for _ in range(2):
        with contextlib.suppress(ValueError):
            fails()
    assert computed == ["a", "a"]
