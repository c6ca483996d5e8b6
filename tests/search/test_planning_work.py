"""The work of planning is bounded: it is counted here, because seconds depend on the computer."""

import importlib

import pytest

from families import CASES, SMALL
from gshard.core.mesh import Mesh
from gshard.core.planning_tables import tables
from gshard.device.machine import Machine
from gshard.planning.propagate import Choice
from gshard.rewrite import driver
from gshard.search import emitted
from gshard.search.pipeline import plans_of
from gshard.tracing.trace import trace

of_propagate = importlib.import_module("gshard.planning.propagate")


def counting(monkeypatch, module, name):
    """Notes each call of a function of a module."""
    original, calls = getattr(module, name), list[None]()

    def counted(*args, **options):
        calls.append(None)
        return original(*args, **options)

    monkeypatch.setattr(module, name, counted)
    return calls


@pytest.mark.parametrize(
    "name",
    [
        "order/sort",
        "windows/convolution_two_axes",
        pytest.param("windows/convolution_two_axes'", marks=pytest.mark.slow),
        pytest.param("windows/convolution_of_features'", marks=pytest.mark.slow),
    ],
)
def test_few_rewrites_fire_while_programs_are_priced(name, monkeypatch):
    """On average few for each program that is traced to be priced: each reaches its fixed point soon.

    These fired some thousand times, since what had been composed was composed again.
    """
    case = CASES[name]
    program = trace(case.function, *case.arguments)
    fired, alone = (counting(monkeypatch, *what) for what in ((driver, "recorded"), (emitted, "emitted_alone")))
    mesh = Mesh.abstract(**case.mesh)
    with tables():
        made = plans_of(program, mesh, Machine.of("h100", mesh.size))
        assert made[0].cost is not None
        every_choice(made)
    assert 0 < len(alone) <= 100
    assert len(fired) <= 3 * (len(alone) + 3), "some in each of them, and in the programs of three plans"


def every_choice(made):
    """The problems of plans, with every choice priced."""
    return [found for one in made if one.choice is not None and (found := one.choice()) is not None]


@pytest.mark.parametrize(
    "name",
    [
        "windows/convolution_two_axes", "vocabulary/tied",
        pytest.param("windows/convolution_two_axes'", marks=pytest.mark.slow),
        pytest.param("small/unet_both_step", marks=pytest.mark.slow),
        pytest.param("small/lstm_both_step", marks=pytest.mark.slow),
        pytest.param("small/graphs_both_step", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_few_choices_are_traced_and_the_best_is_the_best_of_all(name, monkeypatch):
    """What has to be traced to be priced is assumed to take little until it is chosen (``choose``).

    The plan costs what the best one costs if every choice is priced first. That takes several times as many traces.
    """
    case = {**CASES, **SMALL}[name]
    program, alone = trace(case.function, *case.arguments), counting(monkeypatch, emitted, "emitted_alone")
    chosen, choose = list[Choice](), of_propagate.choose

    def noted(*args, **options):
        found = choose(*args, **options)
        if found is not None:
            chosen.append(found)
        return found

    monkeypatch.setattr(of_propagate, "choose", noted)
    mesh = Mesh.abstract(**case.mesh)
    with tables():
        made = plans_of(program, mesh, Machine.of("h100", mesh.size))
        first = len(alone)
        every = every_choice(made)
    assert len(every) == 3
    assert sorted(found.cost for found in chosen) == pytest.approx(sorted(found.cost for found in every), rel=1e-9)
    assert 2 * first <= len(alone)
