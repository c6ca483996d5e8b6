"""The benchmark that reads the contest's instances reads them as the contest means them."""

import gzip
import json
from pathlib import Path

import numpy as np

from gshard.solver.solve import solve
from training_files import loaded

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "search_contest.py"


def test_an_instance_is_read(tmp_path):
    contest = loaded(BENCHMARK, "search_contest")
    problem = {
        "nodes": {
            "intervals": [[0, 3], [2, 2], [1, 4]], "costs": [[15, 80], [65], [0, 10**18]],
            "usages": [[7, 4], [9], [3, 1]],
        },
        "edges": {"nodes": [[1, 0], [2, 0]], "costs": [[4, 10**18], [1, 2, 3, 2 * 10**18]]},
        "usage_limit": 9,
    }  # fmt: skip
    path = tmp_path / "asplos-2025-iopddl-A.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"problem": problem}).encode()))
    given = contest.read(path)
    read = contest.problem_of(given)
    assert read.limit == 9
    assert len(read.loads) == 2  # an empty interval is no load
    assert read.tables[0].tolist() == [[4.0], [np.inf]]
    assert read.tables[1].tolist() == [[1.0, 3.0], [2.0, np.inf]]
    found = solve(read)
    assert not found.fits  # node 0 must be in state 0, node 2 in state 0: ten bytes
    assert found.peak == 10
    assert contest.evaluate(given, [0, 0, 0]) == (15 + 65 + 0 + 4 + 1, 10)
    assert contest.evaluate(given, [1, 0, 0]) == (80 + 65 + 10**18 + 2, 7)
