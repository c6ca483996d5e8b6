"""Python looks for cycles less often for a while, and as before afterwards."""

import gc
import threading
from collections.abc import Iterator

import jax.numpy as jnp
import pytest

from gshard.core.mesh import Mesh
from gshard.core.phases import collected_seldom
from gshard.emit.partition import partition
from gshard.planning.propagate import propagate
from gshard.tracing.trace import trace


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(700, 11, 12)
    yield
    gc.set_threshold(*before)


def test_the_threshold_is_raised_and_restored() -> None:
    with collected_seldom():
        assert gc.get_threshold() == (50_000, 11, 12)
    assert gc.get_threshold() == (700, 11, 12)


def test_it_is_restored_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), collected_seldom():
        raise ZeroDivisionError
    assert gc.get_threshold() == (700, 11, 12)


@pytest.mark.parametrize("threshold", [0, 90_000], ids=["off", "higher"])
def test_what_is_rarer_already_stays(threshold: int) -> None:
    gc.set_threshold(threshold)
    with collected_seldom():
        assert gc.get_threshold()[0] == threshold
    assert gc.get_threshold()[0] == threshold


def test_the_last_thread_restores_it() -> None:
    entered, may_leave = threading.Event(), threading.Event()

    def stay() -> None:
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


def test_every_stage_does_so() -> None:
    seen = []

    def f(x: jnp.ndarray) -> jnp.ndarray:
        seen.append(gc.get_threshold()[0])
        return x * 2

    partition(propagate(trace(f, jnp.ones(8)), Mesh.abstract(x=2)))
    assert seen == [50_000]
    assert gc.get_threshold()[0] == 700
