"""The work of planning is bounded: it is counted here, because seconds depend on the computer."""

from __future__ import annotations

from typing import Any

import pytest

from families import CASES
from gshard.core.mesh import Mesh
from gshard.device.machine import Machine
from gshard.rewrite import driver
from gshard.search import emitted
from gshard.search.pipeline import plans_of
from gshard.tracing.trace import trace


def counting(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[None]:
    """Notes each call of a function of a module."""
    original, calls = getattr(module, name), list[None]()

    def counted(*args: Any, **options: Any) -> Any:
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
def test_few_rewrites_fire_while_programs_are_priced(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On average few for each program that is traced to be priced: each reaches its fixed point soon.

    These fired some thousand times, since what had been composed was composed again.
    """
    case = CASES[name]
    program = trace(case.function, *case.arguments)
    fired, alone = (counting(monkeypatch, *what) for what in ((driver, "recorded"), (emitted, "emitted_alone")))
    mesh = Mesh.abstract(**case.mesh)
    made = plans_of(program, mesh, Machine.of("h100", mesh.size))
    assert made[0].cost is not None
    assert 0 < len(alone) <= 100
    assert len(fired) <= 3 * (len(alone) + 3), "some in each of them, and in the programs of three plans"
