"""The programs that benchmarks measure, and how benchmarks measure one."""

import math
from pathlib import Path

import jax
import numpy as np
import pytest

from families import CASES
from training_files import loaded

BENCHMARK = Path(__file__).resolve().parent.parent / "benchmarks" / "against_xla_programs.py"


@pytest.fixture(scope="module")
def benchmark():
    with pytest.MonkeyPatch.context() as patch:  # it sets the environment of a process of its own
        patch.setenv("XLA_FLAGS", "")
        patch.setenv("JAX_PLATFORMS", "cpu")
        patch.syspath_prepend(str(BENCHMARK.parent))  # what it imports stands beside it
        return loaded(BENCHMARK, "against_xla_programs")


def test_there_are_many_on_eight_devices():
    assert len(CASES) >= 60
    assert all(math.prod(case.mesh.values()) == 8 for case in CASES.values())
    one, other = (jax.tree.leaves(CASES[f"layers/layer_tensor{end}"].arguments) for end in ("", "'"))
    assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True)), "of a program and its gradient"


def test_one_is_measured_from_both_sides(benchmark):
    case = CASES["contractions/summed_to_rows"]
    sides = {result["side"]: result for result in benchmark.run(case)}
    assert set(sides) == {"ours", *benchmark.CHANCES}
    assert sides["ours"]["bytes"] == sides["ours"]["predicted"] == 128 * 192 * 4 * 7 // 8
    assert list(sides["ours"]["kinds"]) == ["reduce_scatter"]
    assert all(result["off"] < benchmark.NEAR for result in sides.values())
    assert benchmark.ratio_of(sides) <= 0.5
    # XLA sums up everything everywhere and slices; where it would not, nothing is given back.
    for chance in benchmark.CHANCES:
        assert sides[chance]["at_best"] == sides["ours"]["bytes"]
    assert sides["ours"]["at_best"] == sides["ours"]["bytes"]


def test_ratios(benchmark):
    def ratio(ours, *xla):
        chances = dict(zip(benchmark.CHANCES, xla, strict=False))
        return benchmark.ratio_of({"ours": {"bytes": ours}, **chances})

    assert ratio(0, {"bytes": 0, "off": 0.0}) == 1.0
    assert ratio(6, {"bytes": 12, "off": 0.0}, {"bytes": 8, "off": 0.0}) == 0.75, "the better of both"
    assert ratio(6, {"bytes": 12, "off": 0.0}, {"bytes": 8, "off": 1.0}) == 0.5, "the better of those that are right"
    assert ratio(6, {"bytes": 0, "off": 0.0}) == math.inf
    assert ratio(6, {"error": "aborted"}) is None
